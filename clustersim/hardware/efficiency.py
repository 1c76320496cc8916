"""How much of its datasheet does an accelerator deliver?

A handful of physical constants per accelerator, which the kernel model of `cost.roofline` reads. They are fitted by
`python -m calibrate fit-published` to published kernel measurements, or taken from a sibling of the same
architecture; the accelerator's file says which.

References: NVIDIA, "Matrix Multiplication Background User's Guide" (tile and wave quantisation); Dao,
"FlashAttention-2", arXiv:2307.08691, section 3.2 (parallelism over query blocks) and 3.1 (non-matmul FLOP).
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from clustersim.common.dtypes import LOW_PRECISION_DTYPES, DType
from clustersim.common.units import Seconds


@dataclass(frozen=True, slots=True)
class MatmulEfficiency:
    """Constants of a library's matrix multiplication.

    share: part of the peak that a compute unit sustains inside the main loop of the largest tile (clocks under load
    included); shares: the same for the formats with scales that it has kernels for, scales included (`dtypes.LOW_PRECISION_DTYPES`);
    prologue: columns of k that filling and draining a tile's pipeline costs; edge: rows that a tile's perimeter costs,
    so that small tiles are slower per FLOP; tiles: the (m, n) shapes that the library has kernels for; by_rows:
    operands in formats with scales are read along what a product sums over alone, so that two products of one need two
    copies; prologues, starts: of formats with scales whose kernels' own are known, which other libraries have than the
    others' (DeepGEMM, CUTLASS): columns of k, and seconds of start and drain of the device kernel.
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
        """The part of the peak of a format; of one with scales that has none of its own, as of others."""
        return self.shares.get(dtype, self.share) if dtype in LOW_PRECISION_DTYPES else self.share

    def prologue_of(self, dtype: DType) -> float:
        """Columns of k that filling and draining a tile's pipeline costs in a format."""
        return self.prologues.get(dtype, self.prologue)

    def with_uniform_fraction(self, share: float) -> "MatmulEfficiency":
        """The same with one share for all formats."""
        return replace(self, share=share, shares=dict.fromkeys(self.shares, share))

    def scaled(self, ratio: float) -> "MatmulEfficiency":
        """The same at another rate, in all formats."""
        shares = {dtype: share * ratio for dtype, share in self.shares.items()}
        return replace(self, share=self.share * ratio, shares=shares)

    def with_peak_fraction(self, dtype: DType, share: float) -> "MatmulEfficiency":
        """The same with a format with scales at a share of its own."""
        return replace(self, shares={**self.shares, dtype: share})

    def with_format_overheads(
        self, dtype: DType, prologue: float | None, kernel_latency: Seconds | None
    ) -> "MatmulEfficiency":
        """The same with a prologue and a start of a format with scales' own; None: as of the others."""
        prologues = {key: value for key, value in self.prologues.items() if key is not dtype}
        starts = {key: value for key, value in self.starts.items() if key is not dtype}
        return replace(
            self,
            prologues=prologues if prologue is None else {**prologues, dtype: prologue},
            starts=starts if kernel_latency is None else {**starts, dtype: kernel_latency},
        )


@dataclass(frozen=True, slots=True)
class GroupedGemmEfficiency:
    """Constants of the products of several experts (`cost.grouped_gemm`).

    share: part of the peak in the main loop of products that a library launches one by one on several streams;
    kernel_share: of one kernel for all of them; prologue, edge: as of other products; call: what the host needs to
    launch one of them; kernel_shares: of one kernel in formats with scales, where it is known: it is another library's
    than in the others, whose distance from other products it does not keep.
    """

    share: float
    kernel_share: float
    prologue: float
    edge: float
    call: Seconds
    kernel_shares: Mapping[DType, float] = field(default_factory=dict)

    def with_kernel_fraction(self, dtype: DType, fraction: float) -> "GroupedGemmEfficiency":
        """The same with one kernel in a format with scales at a share of its own."""
        return replace(self, kernel_shares={**self.kernel_shares, dtype: fraction})


@dataclass(frozen=True, slots=True)
class AttentionEfficiency:
    """Constants of one flash attention kernel.

    share: part of the peak in its main loop; head_overhead: elements of the head dimension that the softmax of one
    score costs; key_overhead: keys that the start and end of a block cost; causal: rate with a causal mask relative
    to none, beside what blocks and waves explain; block: rows that one compute unit works on at a time; formats: how
    many times as fast its products are in formats with scales, of those that it has kernels for.
    """

    share: float
    causal: float
    head_overhead: float
    key_overhead: float
    block: int
    formats: Mapping[DType, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class KernelEfficiency:
    """All constants of the kernel model for one accelerator.

    published: fitted to published measurements of this accelerator (not derived from a sibling); grouped: of products
    of experts, None: nothing is known of them, so that they are products like others; memory: part of the memory
    bandwidth that a large streaming kernel reaches; kernel_latency: seconds of start and drain of a device kernel;
    launch_interval: seconds between two launches that the host can sustain; casts: bandwidth that kernels reach which
    bring operands into formats with scales, relative to other streaming kernels.
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
        """Seconds of start and drain of a product's kernel in a format."""
        return self.matmul.starts.get(dtype, self.kernel_latency)

    @property
    def attention_formats(self) -> tuple[DType, ...]:
        """Formats with scales in which there is flash attention both ways."""
        return tuple(dtype for dtype in self.attention_forward.formats if dtype in self.attention_backward.formats)

    @property
    def expert_matmul(self) -> GroupedGemmEfficiency:
        """The constants of products of experts."""
        matmul = self.matmul
        return self.grouped or GroupedGemmEfficiency(matmul.share, matmul.share, matmul.prologue, matmul.edge, 0.0)


@dataclass(frozen=True, slots=True)
class TrainingDerating:
    """How kernels of a training step differ from the same kernels by themselves.

    sustained: their arithmetic rate relative to that of single kernels, as the power limit leaves it under a mix of
    kernels on real values, and as other machines and library versions than those of the published kernels have it;
    narrow: the same of products in formats with scales, None: as of others;
    spread: standard deviation of the time per FLOP from GPU to GPU, relative (a step waits for the slowest);
    flash2: how many times longer FlashAttention-2 takes than the flash attention for which the constants are, the
    fastest there is.
    """

    sustained_ratio: float = 1.0
    gpu_spread: float = 0.0
    flash2_slowdown: float = 1.0
    low_precision_ratio: float | None = None

    @property
    def low_precision_speedup(self) -> float:
        """How many times the sustained rate of other products those in formats with scales have."""
        return 1.0 if self.low_precision_ratio is None else self.low_precision_ratio / self.sustained_ratio
