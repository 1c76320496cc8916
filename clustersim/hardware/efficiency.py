"""How much of its datasheet peak does an accelerator deliver?

A handful of physical constants per accelerator, used by the kernel model of `cost.roofline`. They are fitted
by `python -m calibrate fit-published` to published kernel measurements, or taken from another accelerator of
the same architecture; the accelerator's file says which.

References: NVIDIA, "Matrix Multiplication Background User's Guide" (tile and wave quantisation); Dao,
"FlashAttention-2", arXiv:2307.08691, section 3.2 (parallelism over query blocks) and 3.1 (non-matmul FLOP).
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from clustersim.common.dtypes import LOW_PRECISION_DTYPES, DType
from clustersim.common.units import Seconds


@dataclass(frozen=True, slots=True)
class MatmulEfficiency:
    """Constants of a library's matrix multiplication. Field names are the keys of accelerator files.

    share: fraction of the peak that a compute unit sustains inside the main loop of the largest tile (clocks
    under load included); shares: the same by low-precision format that it has kernels for, scales included
    (`dtypes.LOW_PRECISION_DTYPES`); prologue: cost of filling and draining a tile's pipeline, in columns of k;
    edge: cost of a tile's perimeter in rows, which makes small tiles slower per FLOP; tiles: (m, n) tile shapes
    of the library; by_rows: low-precision operands are read only along the dimension that a matmul sums over
    (K-major), so that two matmuls of one operand need two copies; prologues, starts: of low-precision formats
    whose kernels are of another library (DeepGEMM, CUTLASS) with known constants: columns of k, and seconds of
    start and drain of the device kernel.
    """

    share: float
    prologue: float
    edge: float
    tiles: tuple[tuple[int, int], ...]
    shares: Mapping[DType, float] = field(default_factory=dict)
    by_rows: bool = False
    prologues: Mapping[DType, float] = field(default_factory=dict)
    starts: Mapping[DType, Seconds] = field(default_factory=dict)

    def peak_fraction_of(self, dtype: DType) -> float:
        """Fraction of the peak in a format; low-precision formats without their own use the common one."""
        return self.shares.get(dtype, self.share) if dtype in LOW_PRECISION_DTYPES else self.share

    def prologue_of(self, dtype: DType) -> float:
        """Cost of filling and draining a tile's pipeline in a format, in columns of k."""
        return self.prologues.get(dtype, self.prologue)

    def with_uniform_fraction(self, share: float) -> "MatmulEfficiency":
        """A copy with one peak fraction for all formats."""
        return replace(self, share=share, shares=dict.fromkeys(self.shares, share))

    def scaled(self, ratio: float) -> "MatmulEfficiency":
        """A copy with the peak fractions of all formats multiplied by a ratio."""
        shares = {dtype: share * ratio for dtype, share in self.shares.items()}
        return replace(self, share=self.share * ratio, shares=shares)

    def with_peak_fraction(self, dtype: DType, share: float) -> "MatmulEfficiency":
        """A copy with the peak fraction of a low-precision format replaced."""
        return replace(self, shares={**self.shares, dtype: share})

    def with_format_overheads(
        self, dtype: DType, prologue: float | None, kernel_latency: Seconds | None
    ) -> "MatmulEfficiency":
        """A copy with the prologue and kernel latency of a low-precision format replaced.

        None: as of the other formats.
        """
        prologues = {key: value for key, value in self.prologues.items() if key is not dtype}
        starts = {key: value for key, value in self.starts.items() if key is not dtype}
        return replace(
            self,
            prologues=prologues if prologue is None else {**prologues, dtype: prologue},
            starts=starts if kernel_latency is None else {**starts, dtype: kernel_latency},
        )


@dataclass(frozen=True, slots=True)
class GroupedGemmEfficiency:
    """Constants of the matmuls of several experts (`cost.grouped_gemm`).

    Field names are the keys of accelerator files.

    share: fraction of the peak in the main loop of matmuls launched one by one on several streams; kernel_share:
    of one grouped GEMM kernel for all; prologue, edge: as of other matmuls; call: host seconds to launch one of
    them; kernel_shares: of a grouped GEMM by low-precision format, where known: it is of another library than in
    the other formats, so its ratio to other matmuls differs.
    """

    share: float
    kernel_share: float
    prologue: float
    edge: float
    call: Seconds
    kernel_shares: Mapping[DType, float] = field(default_factory=dict)

    def with_kernel_fraction(self, dtype: DType, fraction: float) -> "GroupedGemmEfficiency":
        """A copy with the grouped GEMM's peak fraction in a low-precision format replaced."""
        return replace(self, kernel_shares={**self.kernel_shares, dtype: fraction})


@dataclass(frozen=True, slots=True)
class AttentionEfficiency:
    """Constants of one flash attention kernel. Field names are the keys of accelerator files.

    share: fraction of the peak in its main loop; head_overhead: cost of the softmax of one score, in elements of
    the head dimension; key_overhead: cost of the start and end of a block, in keys; causal: rate with a causal
    mask relative to none, beyond what blocks and waves explain; block: query rows that one compute unit processes
    at a time; formats: speedup of its matmuls by low-precision format, of those that it has kernels for.
    """

    share: float
    causal: float
    head_overhead: float
    key_overhead: float
    block: int
    formats: Mapping[DType, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class KernelEfficiency:
    """All constants of the kernel model of one accelerator. Field names are the keys of accelerator files.

    published: whether they were fitted to published measurements of this accelerator (not derived from another
    one); grouped: matmuls of experts, None: unknown, so they are modelled as ordinary matmuls; memory: fraction
    of the memory bandwidth that a large memory-bound kernel reaches; kernel_latency: seconds of start and drain
    of a device kernel; launch_interval: seconds between two launches that the host can sustain; casts: bandwidth
    of kernels that quantize operands to low-precision formats, relative to other memory-bound kernels.
    """

    published: bool
    matmul: MatmulEfficiency
    attention_forward: AttentionEfficiency
    attention_backward: AttentionEfficiency
    memory: float
    kernel_latency: Seconds
    launch_interval: Seconds
    grouped: GroupedGemmEfficiency | None = None
    casts: float = 1.0

    def kernel_latency_of(self, dtype: DType) -> Seconds:
        """Seconds of start and drain of a matmul kernel in a format."""
        return self.matmul.starts.get(dtype, self.kernel_latency)

    @property
    def attention_formats(self) -> tuple[DType, ...]:
        """Low-precision formats that flash attention supports in both forward and backward."""
        return tuple(dtype for dtype in self.attention_forward.formats if dtype in self.attention_backward.formats)

    @property
    def expert_matmul(self) -> GroupedGemmEfficiency:
        """The constants of the matmuls of experts."""
        matmul = self.matmul
        return self.grouped or GroupedGemmEfficiency(matmul.share, matmul.share, matmul.prologue, matmul.edge, 0.0)


@dataclass(frozen=True, slots=True)
class TrainingDerating:
    """How kernels within a training step differ from the same kernels run standalone.

    sustained_ratio: arithmetic rate relative to that of standalone kernels: the power limit under a mix of
    kernels on real values, and other machines and library versions than those of the published kernels;
    low_precision_ratio: the same of low-precision matmuls, None: as of the others; gpu_spread: relative standard
    deviation of the time per FLOP across GPUs (a step waits for the slowest); flash2_slowdown: time of
    FlashAttention-2 relative to the fastest flash attention, for which the constants are.
    """

    sustained_ratio: float = 1.0
    gpu_spread: float = 0.0
    flash2_slowdown: float = 1.0
    low_precision_ratio: float | None = None

    @property
    def low_precision_speedup(self) -> float:
        """Sustained rate of low-precision matmuls relative to that of the others."""
        return 1.0 if self.low_precision_ratio is None else self.low_precision_ratio / self.sustained_ratio
