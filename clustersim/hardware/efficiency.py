"""How much of its datasheet peak does an accelerator deliver?

A handful of physical constants per accelerator, used by the kernel model of `cost.roofline`. They are fitted
by `python -m calibrate fit-published` to published kernel measurements, or taken from another accelerator of
the same architecture; the accelerator's file says which.

References: NVIDIA, "Matrix Multiplication Background User's Guide" (tile and wave quantisation); Dao,
"FlashAttention-2", arXiv:2307.08691, section 3.2 (parallelism over query blocks) and 3.1 (non-matmul FLOP).
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Final

from clustersim.common.dtypes import LOW_PRECISION_DTYPES, DType
from clustersim.common.errors import InputError
from clustersim.common.units import BytesPerSecond, Seconds


@dataclass(frozen=True, slots=True)
class MatmulEfficiency:
    """Constants of a library's matrix multiplication. Field names are the keys of accelerator files.

    peak_fraction: that a compute unit sustains inside the main loop of the largest tile (clocks under load
    included); peak_fraction_by_format: the same by low-precision format that it has kernels for, scales included
    (`dtypes.LOW_PRECISION_DTYPES`); prologue: cost of filling and draining a tile's pipeline, in columns of k;
    edge: cost of a tile's perimeter in rows, which makes small tiles slower per FLOP; tiles: (m, n) tile shapes
    of the library; tn_only: low-precision operands are read only along the dimension that a matmul sums over
    (K-major, cuBLAS's TN layout), so that two matmuls of one operand need two copies; prologue_by_format,
    kernel_latency_by_format: of low-precision formats whose kernels are of another library (DeepGEMM, CUTLASS)
    with known constants: columns of k, and seconds of start and drain of the device kernel.
    """

    peak_fraction: float
    prologue: float
    edge: float
    tiles: tuple[tuple[int, int], ...]
    peak_fraction_by_format: Mapping[DType, float] = field(default_factory=dict)
    tn_only: bool = False
    prologue_by_format: Mapping[DType, float] = field(default_factory=dict)
    kernel_latency_by_format: Mapping[DType, Seconds] = field(default_factory=dict)

    def peak_fraction_of(self, dtype: DType) -> float:
        """Fraction of the peak in a format; low-precision formats without their own use the common one."""
        return (
            self.peak_fraction_by_format.get(dtype, self.peak_fraction)
            if dtype in LOW_PRECISION_DTYPES
            else self.peak_fraction
        )

    def prologue_of(self, dtype: DType) -> float:
        """Cost of filling and draining a tile's pipeline in a format, in columns of k."""
        return self.prologue_by_format.get(dtype, self.prologue)

    def with_uniform_fraction(self, share: float) -> "MatmulEfficiency":
        """A copy with one peak fraction for all formats."""
        return replace(
            self, peak_fraction=share, peak_fraction_by_format=dict.fromkeys(self.peak_fraction_by_format, share)
        )

    def scaled(self, ratio: float) -> "MatmulEfficiency":
        """A copy with the peak fractions of all formats multiplied by a ratio."""
        shares = {dtype: share * ratio for dtype, share in self.peak_fraction_by_format.items()}
        return replace(self, peak_fraction=self.peak_fraction * ratio, peak_fraction_by_format=shares)

    def with_peak_fraction(self, dtype: DType, share: float) -> "MatmulEfficiency":
        """A copy with the peak fraction of a low-precision format replaced."""
        return replace(self, peak_fraction_by_format={**self.peak_fraction_by_format, dtype: share})

    def with_format_overheads(
        self, dtype: DType, prologue: float | None, kernel_latency: Seconds | None
    ) -> "MatmulEfficiency":
        """A copy with the prologue and kernel latency of a low-precision format replaced.

        None: as of the other formats.
        """
        prologues = {key: value for key, value in self.prologue_by_format.items() if key is not dtype}
        starts = {key: value for key, value in self.kernel_latency_by_format.items() if key is not dtype}
        return replace(
            self,
            prologue_by_format=prologues if prologue is None else {**prologues, dtype: prologue},
            kernel_latency_by_format=starts if kernel_latency is None else {**starts, dtype: kernel_latency},
        )


@dataclass(frozen=True, slots=True)
class GroupedGemmEfficiency:
    """Constants of the matmuls of several experts (`cost.grouped_gemm`).

    Field names are the keys of accelerator files.

    multi_stream_peak_fraction: in the main loop of matmuls launched one by one on several streams;
    kernel_peak_fraction: of one grouped GEMM kernel for all; prologue, edge: as of other matmuls; host_launch: host
    seconds to launch one of them; kernel_peak_fraction_by_format: of a grouped GEMM by low-precision format, where
    known: it is of another library than in the other formats, so its ratio to other matmuls differs.
    """

    multi_stream_peak_fraction: float
    kernel_peak_fraction: float
    prologue: float
    edge: float
    host_launch: Seconds
    kernel_peak_fraction_by_format: Mapping[DType, float] = field(default_factory=dict)

    def with_kernel_fraction(self, dtype: DType, fraction: float) -> "GroupedGemmEfficiency":
        """A copy with the grouped GEMM's peak fraction in a low-precision format replaced."""
        return replace(self, kernel_peak_fraction_by_format={**self.kernel_peak_fraction_by_format, dtype: fraction})


@dataclass(frozen=True, slots=True)
class AttentionEfficiency:
    """Constants of one flash attention kernel. Field names are the keys of accelerator files.

    peak_fraction: in its main loop; head_overhead: cost of the softmax of one score, in elements of the head
    dimension; key_overhead: cost of the start and end of a block, in keys; causal_ratio: rate with a causal mask
    relative to none, beyond what blocks and waves explain; query_block: query rows that one compute unit processes
    at a time; speedup_by_format: of its matmuls by low-precision format, of those that it has kernels for;
    unequal_head_ratio: rate where heads of keys and values differ in size, for which other kernels may run, relative
    to equal heads.
    """

    peak_fraction: float
    causal_ratio: float
    head_overhead: float
    key_overhead: float
    query_block: int
    speedup_by_format: Mapping[DType, float] = field(default_factory=dict)
    unequal_head_ratio: float = 1.0

    def scaled(self, ratio: float) -> "AttentionEfficiency":
        """A copy with the peak fraction multiplied by a ratio."""
        return replace(self, peak_fraction=self.peak_fraction * ratio)

    def rounded(self, digits: int) -> "AttentionEfficiency":
        """A copy with the peak fraction rounded."""
        return replace(self, peak_fraction=round(self.peak_fraction, digits))


FASTEST_ATTENTION: Final = "flash"  # the flash attention library whose constants an accelerator's main ones are
SDPA_ATTENTION: Final = "sdpa"  # what PyTorch takes: one of the libraries, by accelerator
FLASH_ATTENTION2: Final = "flash2"
FLASH_ATTENTION1: Final = "flash1"
ATTENTION_LIBRARIES: Final = (FLASH_ATTENTION2, "flash3", "flash4", "cudnn")
"""Libraries with flash attention; the first is the default."""
MEASURED_ATTENTION: Final = (*ATTENTION_LIBRARIES, SDPA_ATTENTION)
"""What accelerator files have constants of: libraries, and one as PyTorch calls it, under load."""
FLASH1_SLOWDOWN: Final = 2.0
"""Duration of FlashAttention relative to FlashAttention-2: "around 2x speedup" (arXiv:2307.08691, abstract)."""


@dataclass(frozen=True, slots=True)
class AttentionLibrary:
    """Flash attention of a library that is not an accelerator's fastest. Field names are the keys of its file."""

    forward: AttentionEfficiency
    backward: AttentionEfficiency

    def scaled(self, ratio: float) -> "AttentionLibrary":
        """A copy with the peak fractions multiplied by a ratio."""
        return AttentionLibrary(self.forward.scaled(ratio), self.backward.scaled(ratio))

    def rounded(self, digits: int) -> "AttentionLibrary":
        """A copy with the peak fractions rounded."""
        return AttentionLibrary(self.forward.rounded(digits), self.backward.rounded(digits))


@dataclass(frozen=True, slots=True)
class ScanShare:
    """Share of the roofline that the kernels of a scan reach, by direction."""

    forward: float
    backward: float

    def select(self, *, backward: bool) -> float:
        """The share in one direction."""
        return self.backward if backward else self.forward


@dataclass(frozen=True, slots=True)
class KernelEfficiency:
    """All constants of the kernel model of one accelerator. Field names are the keys of accelerator files.

    published: whether they were fitted to published measurements of this accelerator (not derived from another
    one); attention_forward, attention_backward: flash attention of the fastest library, which is attention_library;
    attention_libraries: of others, by name; sdpa_library: what PyTorch's scaled_dot_product_attention takes first, as
    fast as elsewhere unless the libraries have sdpa;
    grouped_gemm: matmuls of experts, None: unknown, so they are modelled as
    ordinary matmuls;
    memory_bandwidth_fraction: that large memory-bound kernels reach; operator_bandwidth_ratio: bandwidth of the
    memory-bound operators of a training step, relative to these; kernel_latency: seconds of start and drain
    of a device kernel; launch_interval: seconds between two launches that the host can sustain;
    quantization_bandwidth_ratio: bandwidth of kernels that quantize operands to low-precision formats, relative to
    large memory-bound kernels; scan_shares: by routine of linear attention, where its library reaches another share
    than on other GPUs (`cost.scan_rates`).
    """

    published: bool
    matmul: MatmulEfficiency
    attention_forward: AttentionEfficiency
    attention_backward: AttentionEfficiency
    memory_bandwidth_fraction: float
    kernel_latency: Seconds
    launch_interval: Seconds
    grouped_gemm: GroupedGemmEfficiency | None = None
    quantization_bandwidth_ratio: float = 1.0
    operator_bandwidth_ratio: float = 1.0
    attention_library: str = FLASH_ATTENTION2
    attention_libraries: Mapping[str, AttentionLibrary] = field(default_factory=dict)
    sdpa_library: str = FLASH_ATTENTION2
    scan_shares: Mapping[str, ScanShare] = field(default_factory=dict)

    def reached_bandwidth(self, datasheet: BytesPerSecond) -> BytesPerSecond:
        """What large memory-bound kernels reach of the datasheet's memory bandwidth."""
        return datasheet * self.memory_bandwidth_fraction

    def operator_bandwidth(self, datasheet: BytesPerSecond) -> BytesPerSecond:
        """What the memory-bound operators of a training step reach of the datasheet's memory bandwidth."""
        return self.reached_bandwidth(datasheet) * self.operator_bandwidth_ratio

    def kernel_latency_of(self, dtype: DType) -> Seconds:
        """Seconds of start and drain of a matmul kernel in a format."""
        return self.matmul.kernel_latency_by_format.get(dtype, self.kernel_latency)

    @property
    def known_attention(self) -> tuple[str, ...]:
        """Names of the flash attention libraries with known rates; FlashAttention is known where its successor is."""
        libraries = [
            name for name in ATTENTION_LIBRARIES if name in (self.attention_library, *self.attention_libraries)
        ]
        has_sdpa = SDPA_ATTENTION in self.attention_libraries or self.sdpa_library in libraries
        sdpa = [SDPA_ATTENTION] if has_sdpa else []
        return (FASTEST_ATTENTION, *sdpa, *libraries, *([FLASH_ATTENTION1] if FLASH_ATTENTION2 in libraries else []))

    def attention_constants(self, library: str, *, backward: bool) -> AttentionEfficiency:
        """Constants of a library's flash attention in one direction; raise InputError where nothing is known of it."""
        if library not in self.known_attention:
            raise InputError(f"nothing is known of attention {library}; known are {', '.join(self.known_attention)}")
        if library == SDPA_ATTENTION and SDPA_ATTENTION not in self.attention_libraries:
            return self.attention_constants(self.sdpa_library, backward=backward)
        if library == FLASH_ATTENTION1:
            return self.attention_constants(FLASH_ATTENTION2, backward=backward).scaled(1.0 / FLASH1_SLOWDOWN)
        if library in (FASTEST_ATTENTION, self.attention_library):
            return self.attention_backward if backward else self.attention_forward
        constants = self.attention_libraries[library]
        return constants.backward if backward else constants.forward

    @property
    def attention_formats(self) -> tuple[DType, ...]:
        """Low-precision formats that flash attention supports in both forward and backward."""
        return tuple(
            dtype
            for dtype in self.attention_forward.speedup_by_format
            if dtype in self.attention_backward.speedup_by_format
        )

    @property
    def expert_matmul(self) -> GroupedGemmEfficiency:
        """The constants of the matmuls of experts."""
        matmul = self.matmul
        return self.grouped_gemm or GroupedGemmEfficiency(
            matmul.peak_fraction, matmul.peak_fraction, matmul.prologue, matmul.edge, 0.0
        )


@dataclass(frozen=True, slots=True)
class TrainingDerating:
    """How kernels within a training step differ from the same kernels run standalone.

    sustained_ratio: arithmetic rate relative to that of standalone kernels: the power limit under a mix of
    kernels on real values, and other machines and library versions than those of the published kernels;
    low_precision_ratio: the same of low-precision matmuls, None: as of the others; attention_ratio: the same of flash
    attention, from kernels that last so long that the power limit is in their rate, None: unknown;
    gpu_spread: relative standard deviation of the time per FLOP across GPUs (a step waits for the slowest).
    """

    sustained_ratio: float = 1.0
    gpu_spread: float = 0.0
    low_precision_ratio: float | None = None
    attention_ratio: float | None = None

    @property
    def attention_speedup(self) -> float | None:
        """Sustained rate of flash attention relative to that of matmuls, None: unknown."""
        return None if self.attention_ratio is None else self.attention_ratio / self.sustained_ratio

    @property
    def low_precision_speedup(self) -> float:
        """Sustained rate of low-precision matmuls relative to that of the others."""
        return 1.0 if self.low_precision_ratio is None else self.low_precision_ratio / self.sustained_ratio
