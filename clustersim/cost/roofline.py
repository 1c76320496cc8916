"""How long does a kernel take on this accelerator, from its shape and a few constants?

    seconds = max(max(compute, memory) + launches · kernel latency, launches · launch interval)

Memory time is bytes over the bandwidth that memory-bound kernels reach; quantization kernels of
block-scaled formats may reach less; some operators are bound by elements instead (`cost.elementwise`). Compute
time is FLOP over the peak for memory-bound kernels; matmuls and flash attention are split into the tiles that a
compute unit works on, and tiles run in waves of one tile per compute unit, so a partly filled last wave costs a
full one.

A tile of m x n over k costs 2 m n (k + p) FLOP at a fraction of the peak; p is the cost of filling and
draining its pipeline. The fraction is largest for the largest tile and falls with the perimeter, as (1 +
e/m)(1 + e/n): a small tile loads more operands per FLOP. The library is assumed to know its own fastest
tile, and to split k where that fills the machine, at the price of writing partial sums.

An attention block costs its scores x (head dimension + h) x (keys + o): h is the softmax, which runs on
slower units, and o the block's start and end. Blocks of causal attention differ in length; they are assumed
to be well balanced, so that the kernel lasts as long as the mean load of a compute unit or as the longest
block. A sliding window skips the blocks outside it, and has a second edge on which half of a block is
masked. In block-scaled formats attention is faster than in BF16 by a constant. A head dimension that the
library has no kernel for is computed as the next larger one that it has (`hardware.alignment`, which also
gives the slowdown of matmuls with badly aligned operands). Where heads of keys and values differ in size (latent
attention), another kernel may run, slower by a constant. Grouped GEMMs of experts are in
`cost.grouped_gemm`; the shares of both rates that kernels of scans and of sparse attention reach in `cost.scan_rates`.

In a step the power limit slows matmuls (`in_step_rate`). Attention keeps tensor cores less busy, draws less
power and is slowed less, or not at all (`power_limited_rate`): at 34 % of the peak, FlashAttention-2 on an
H100 of 700 W runs at the full clock. Assumed: power beyond idle is proportional to the use of tensor cores,
whatever instructions feed them; the exponentials of the softmax and what memory draws are left out. On
Blackwell, whose fastest libraries keep tensor cores as busy as matmuls do, the rate is known from kernels of a
tenth of a second and more, which have met the limit when they are timed (`TrainingDerating.attention_ratio`);
that of a slower library is not below.

References: NVIDIA, "Matrix Multiplication Background User's Guide", sections on tile and wave quantisation;
Osama et al., "Stream-K", arXiv:2301.03598, section 3 (splitting k); Dao, "FlashAttention-2",
arXiv:2307.08691, sections 3.1-3.2; Williams et al., "Roofline", CACM 52(4).
"""

from dataclasses import dataclass, replace
from typing import Final

import numpy as np

from clustersim.common.cached_method import cached_method
from clustersim.common.dtypes import LOW_PRECISION_DTYPES, DType
from clustersim.common.errors import InputError
from clustersim.common.units import Bytes, FlopPerSecond, Seconds
from clustersim.cost.elementwise import elementwise_seconds
from clustersim.cost.grouped_gemm import grouped_work
from clustersim.cost.matmul_tiles import KernelWork, alignment_rate, matmul_options, matmul_rate
from clustersim.cost.scan_rates import library_share
from clustersim.cost.timing import Bottleneck, KernelTiming, Provenance
from clustersim.hardware.accelerator import Accelerator
from clustersim.hardware.efficiency import AttentionEfficiency
from clustersim.model.kernels import (
    ATTENTION_KINDS,
    GROUPED_MATMUL_KINDS,
    AttentionShape,
    Kernel,
    KernelKind,
    MatmulShape,
    MemoryBoundOp,
    MemoryBoundShape,
    ScanRoutine,
    ScanShape,
    SparseAttentionShape,
)
from clustersim.model.training import AttentionBackend

_POWER_EXPONENT: Final = 3.0  # of the clock: power is clock x voltage^2, and the voltage follows the clock


@dataclass(frozen=True)
class Roofline:
    """Kernel durations of one accelerator by an analytic model (a `KernelCost`), with a cache.

    in_step_rate: arithmetic rate of kernels within a training step relative to isolated ones;
    low_precision_factor: further factor on the rate in block-scaled formats; attention: library of flash attention;
    attention_factor: further factor on its rate in other formats, None: unknown.
    """

    accelerator: Accelerator
    in_step_rate: float = 1.0
    low_precision_factor: float = 1.0
    attention: AttentionBackend = AttentionBackend.FLASH
    attention_factor: float | None = None

    @cached_method
    def time_kernel(self, kernel: Kernel) -> KernelTiming:
        """Time one kernel in isolation."""
        efficiency = self.accelerator.efficiency
        work = self._kernel_work(kernel)
        launch_latency = kernel.launches * self._kernel_latency(kernel)
        host_seconds = max(kernel.launches * efficiency.launch_interval, work.host_seconds)
        busy_seconds = work.seconds
        seconds = max(busy_seconds + launch_latency, host_seconds)
        provenance = Provenance.PUBLISHED if efficiency.published else Provenance.ROOFLINE
        if busy_seconds < seconds - busy_seconds:
            return KernelTiming(seconds, provenance, Bottleneck.LAUNCH)
        return KernelTiming(
            seconds, provenance, Bottleneck.COMPUTE if work.compute > work.memory else Bottleneck.MEMORY
        )

    def _kernel_work(self, kernel: Kernel) -> KernelWork:
        if kernel.kind in GROUPED_MATMUL_KINDS and isinstance(kernel.shape, MatmulShape):
            return grouped_work(self.accelerator, kernel, self._arithmetic_rate(kernel))
        work = self._isolated_work(kernel)
        return replace(work, compute=work.compute / self._in_step_rate(kernel, work))

    def _isolated_work(self, kernel: Kernel) -> KernelWork:
        if isinstance(kernel.shape, MatmulShape):
            return self._matmul_work(kernel, kernel.shape)
        if isinstance(kernel.shape, AttentionShape):
            return self._attention_work(kernel, kernel.shape)
        if isinstance(kernel.shape, ScanShape | SparseAttentionShape):
            return self._library_work(kernel, kernel.shape)
        compute, memory = kernel.flops / self._unshaped_rate(kernel), self._memory_seconds(kernel.bytes)
        if not isinstance(kernel.shape, MemoryBoundShape):
            return KernelWork(compute, memory)
        if (elementwise := elementwise_seconds(self.accelerator, kernel)) is not None:
            return KernelWork(compute, elementwise)
        efficiency, is_cast = self.accelerator.efficiency, kernel.shape.routine is MemoryBoundOp.QUANTIZE
        ratio = efficiency.quantization_bandwidth_ratio if is_cast else efficiency.operator_bandwidth_ratio
        share = self._library_share(kernel.shape)
        return KernelWork(compute / share, memory / (ratio * share))

    def _library_work(self, kernel: Kernel, shape: ScanShape | SparseAttentionShape) -> KernelWork:
        """Products at the matmuls' rate, of a selective scan on vector units; both at the library's share."""
        is_vector = shape.routine is ScanRoutine.SELECTIVE_SCAN
        rate = self.accelerator.peak_flops(DType.FP32) if is_vector else matmul_rate(self.accelerator, kernel.dtype)
        share = self._library_share(shape)
        bandwidth_share = share * self.accelerator.efficiency.operator_bandwidth_ratio
        return KernelWork(kernel.flops / rate / share, self._memory_seconds(kernel.bytes) / bandwidth_share)

    def _library_share(self, shape: ScanShape | SparseAttentionShape | MemoryBoundShape) -> float:
        """Share of the roofline that a library's kernels reach, on this accelerator or on all; 1 of PyTorch's own."""
        if isinstance(shape, MemoryBoundShape) and not shape.fused:
            return 1.0
        share = self.accelerator.efficiency.scan_shares.get(shape.routine.value) or library_share(shape.routine.value)
        return 1.0 if share is None else share.select(backward=shape.backward)

    def _kernel_latency(self, kernel: Kernel) -> Seconds:
        """Seconds of start and drain of one device kernel."""
        efficiency = self.accelerator.efficiency
        is_matmul = kernel.kind is KernelKind.MATMUL
        return efficiency.kernel_latency_of(kernel.dtype) if is_matmul else efficiency.kernel_latency

    def _in_step_rate(self, kernel: Kernel, isolated: KernelWork) -> float:
        """Rate of a kernel within a step relative to isolation, which for attention depends on how fast that is.

        isolated: its work in isolation.
        """
        rate = self._arithmetic_rate(kernel)
        if kernel.kind not in ATTENTION_KINDS or rate >= 1.0 or isolated.compute == 0.0:
            return rate
        is_low_precision = kernel.dtype in LOW_PRECISION_DTYPES
        dtype = DType.BF16 if is_low_precision else kernel.dtype
        utilization = kernel.flops / (isolated.compute * self.accelerator.peak_flops(dtype))
        by_power = power_limited_rate(rate, utilization / self.accelerator.efficiency.matmul.peak_fraction)
        if is_low_precision or self.attention_factor is None:
            return by_power
        return max(by_power, min(1.0, rate * self.attention_factor))

    def _arithmetic_rate(self, kernel: Kernel) -> float:
        """Arithmetic rate of a kernel within a step relative to isolation."""
        return (
            self.in_step_rate * self.low_precision_factor if kernel.dtype in LOW_PRECISION_DTYPES else self.in_step_rate
        )

    def _unshaped_rate(self, kernel: Kernel) -> FlopPerSecond:
        """Rate of a kernel without a shape: tensor cores for a matmul, vector units for anything else."""
        if kernel.kind in (KernelKind.MATMUL, *GROUPED_MATMUL_KINDS):
            return matmul_rate(self.accelerator, kernel.dtype)
        return self.accelerator.peak_flops(DType.FP32)

    def _memory_seconds(self, byte_count: Bytes) -> Seconds:
        return byte_count / self.accelerator.efficiency.reached_bandwidth(self.accelerator.memory_bandwidth)

    def _matmul_work(self, kernel: Kernel, shape: MatmulShape) -> KernelWork:
        sizes = np.array([[shape.m], [shape.n], [shape.k], [shape.batch]], dtype=np.float64)
        compute, memory = matmul_options(self.accelerator, kernel.dtype, sizes, np.array([kernel.bytes]))
        best = int(np.argmin(np.maximum(compute, memory)))
        rate = alignment_rate(self.accelerator, kernel.dtype, shape)
        return KernelWork(float(compute[0, best]) / rate, float(memory[0, best]) / rate)

    def _attention_work(self, kernel: Kernel, shape: AttentionShape) -> KernelWork:
        backward = kernel.kind is KernelKind.ATTENTION_BACKWARD
        constants = self._attention_constants(backward=backward)
        scores = kernel.flops / shape.flops_per_score(backward=backward)
        base_dtype = DType.BF16 if kernel.dtype in LOW_PRECISION_DTYPES else kernel.dtype
        rate = (
            self.accelerator.peak_flops(base_dtype)
            * constants.peak_fraction
            * self._attention_speedup(kernel.dtype, constants)
            * (1.0 if shape.head_dim == shape.value_head_dim else constants.unequal_head_ratio)
        )
        load = attention_load(self.accelerator, constants, shape, scores)
        return KernelWork(kernel.flops / rate * load, self._memory_seconds(kernel.bytes))

    def _attention_constants(self, *, backward: bool) -> AttentionEfficiency:
        """Constants of the library in one direction; those of the fastest where no flash attention runs."""
        library = AttentionBackend.FLASH if self.attention is AttentionBackend.STANDARD else self.attention
        return self.accelerator.efficiency.attention_constants(library.value, backward=backward)

    def _attention_speedup(self, dtype: DType, constants: AttentionEfficiency) -> float:
        """Speed of attention in a format relative to BF16; raise InputError where it has no kernel."""
        if dtype not in LOW_PRECISION_DTYPES:
            return 1.0
        if dtype not in constants.speedup_by_format:
            raise InputError(f"{self.accelerator.name} has no attention in {dtype.value}")
        return constants.speedup_by_format[dtype]


def power_limited_rate(matmul_rate: float, relative_utilization: float) -> float:
    """Rate in a step of a kernel that keeps tensor cores less busy than matmuls do, relative to its rate in isolation.

    matmul_rate: that of matmuls, below 1; relative_utilization: of the kernel's tensor cores, relative to matmuls'.

    Power beyond idle is utilization x clock x voltage^2 (Hennessy and Patterson, "Computer Architecture", section
    1.5); the voltage is taken to follow the clock. Matmuls use up the limit at clock r: r^3; a kernel of relative
    utilization u runs at the clock f with u f^3 = r^3, at most at the full clock: f = min(1, r / u^(1/3)).
    """
    return min(1.0, matmul_rate / float(min(1.0, relative_utilization) ** (1.0 / _POWER_EXPONENT)))


def attention_load(
    accelerator: Accelerator, constants: AttentionEfficiency, shape: AttentionShape, scores: float
) -> float:
    """Time of an attention kernel relative to its FLOP at full rate on all compute units (at least 1).

    constants: of its direction; scores: score elements computed, over all sequences and heads; causal attention
    computes about half of all.
    """
    query_rows = shape.batch * shape.heads * shape.query
    segments = shape.batch * shape.heads * np.ceil(shape.query / constants.query_block)
    keys = scores / query_rows
    masked_edges = shape.causal + (shape.window is not None)  # the diagonal, and the start of a window
    mean_keys = (
        keys + masked_edges * constants.query_block / 2.0 + constants.key_overhead
    )  # half of the block on an edge is masked
    visible_keys = shape.key if shape.window is None else min(shape.key, shape.window + constants.query_block)
    if shape.packed is not None:
        visible_keys = min(visible_keys, shape.packed.longest)
    max_keys = visible_keys + constants.key_overhead
    waves = segments / accelerator.compute_units
    max_load = max(waves * mean_keys, max_keys) if shape.causal else np.ceil(waves) * mean_keys
    padding = segments * constants.query_block / query_rows
    padded = accelerator.alignment.padded_head_dim(shape.head_dim) + accelerator.alignment.padded_head_dim(
        shape.value_head_dim
    )
    head = (padded + 2 * constants.head_overhead) / (shape.head_dim + shape.value_head_dim)
    mask = constants.causal_ratio if shape.causal else 1.0
    return float(max_load / (waves * keys) * padding * head / mask)
