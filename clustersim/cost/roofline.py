"""How long does a kernel take on this accelerator, from its shape and a few constants?

    seconds = max(max(compute, memory) + launches · kernel latency, launches · launch interval)

Memory is bytes over the bandwidth that streaming kernels reach; those that cast operands to formats with scales may
reach less. Compute is FLOP over the peak for streaming kernels;
matrix multiplications and flash attention are cut into the tiles that a compute unit works on, and tiles run in waves
of one tile per compute unit, so a partly filled last wave costs a whole one.

A tile of m x n over k costs 2 m n (k + p) FLOP at a share of the peak; p is what filling and draining its pipeline
costs. The share is largest for the largest tile and falls with the perimeter, as (1 + e/m)(1 + e/n): a small tile
loads more operands per FLOP. The library is assumed to know its own fastest tile, and to split k where that fills the
machine, at the price of writing partial sums.

An attention block costs its scores x (head dimension + h) x (keys + o): h is the softmax, which runs on slower
units, and o the block's start and end. Blocks of causal attention differ in length; they are assumed to be well
balanced, so that the kernel is as long as the mean load of a compute unit or as the longest block. A sliding window
skips the blocks outside it, and has a second edge on which half of a block is masked. In formats with scales it is so
many times as fast as in BF16. A head dimension that the
library has no kernel for is computed as the next that it has (`hardware.alignment`), which also says how many times
longer a matmul takes whose operands are badly aligned. Products of several experts are in `cost.grouped_gemm`.

References: NVIDIA, "Matrix Multiplication Background User's Guide", sections on tile and wave quantisation; Osama et
al., "Stream-K", arXiv:2301.03598, section 3 (splitting k); Dao, "FlashAttention-2", arXiv:2307.08691, sections
3.1-3.2; Williams et al., "Roofline", CACM 52(4).
"""

from dataclasses import dataclass, field, replace

import numpy as np

from clustersim.common.dtypes import NARROW, DType
from clustersim.common.errors import InputError
from clustersim.common.units import Bytes, FlopPerSecond, Seconds
from clustersim.cost.grouped_gemm import grouped_work
from clustersim.cost.matmul_tiles import Work, alignment_rate, matmul_options, matmul_rate
from clustersim.cost.timing import Bound, Provenance, Timing
from clustersim.hardware.accelerator import Accelerator
from clustersim.hardware.efficiency import AttentionEfficiency
from clustersim.model.kernels import GROUPED, AttentionShape, Kernel, KernelKind, MatmulShape, Routine, StreamShape


@dataclass(frozen=True, slots=True)
class Roofline:
    """A source of kernel durations for one accelerator; remembers the kernels that it has timed.

    rate: arithmetic relative to kernels by themselves, for kernels within a training step; narrow: how many times that
    in formats with scales.
    """

    accelerator: Accelerator
    rate: float = 1.0
    narrow: float = 1.0
    _timings: dict[Kernel, Timing] = field(default_factory=dict, repr=False, compare=False)

    def kernel(self, kernel: Kernel) -> Timing:
        """Time one kernel alone on one accelerator."""
        timing = self._timings.get(kernel)
        if timing is None:
            timing = self._timings[kernel] = self._time(kernel)
        return timing

    def _time(self, kernel: Kernel) -> Timing:
        efficiency = self.accelerator.efficiency
        work = self._work(kernel)
        latency = kernel.launches * self._start(kernel)
        floor = max(kernel.launches * efficiency.launch_interval, work.calls)
        busy = work.seconds
        seconds = max(busy + latency, floor)
        provenance = Provenance.PUBLISHED if efficiency.published else Provenance.ROOFLINE
        if busy < seconds - busy:
            return Timing(seconds, provenance, Bound.LAUNCH)
        return Timing(seconds, provenance, Bound.COMPUTE if work.compute > work.memory else Bound.MEMORY)

    def _work(self, kernel: Kernel) -> Work:
        if kernel.kind in GROUPED and isinstance(kernel.shape, MatmulShape):
            return grouped_work(self.accelerator, kernel, self._pace(kernel))
        work = self._alone(kernel)
        return replace(work, compute=work.compute / self._pace(kernel))

    def _alone(self, kernel: Kernel) -> Work:
        if isinstance(kernel.shape, MatmulShape):
            return self._matmul(kernel, kernel.shape)
        if isinstance(kernel.shape, AttentionShape):
            return self._attention(kernel, kernel.shape)
        if isinstance(kernel.shape, StreamShape) and kernel.shape.routine is Routine.QUANTIZE:
            return Work(
                kernel.flops / self._rate(kernel), self._stream(kernel.bytes) / self.accelerator.efficiency.casts
            )
        return Work(kernel.flops / self._rate(kernel), self._stream(kernel.bytes))

    def _start(self, kernel: Kernel) -> Seconds:
        """Seconds of start and drain of one device kernel."""
        efficiency = self.accelerator.efficiency
        alone = kernel.kind is KernelKind.MATMUL
        return efficiency.start_of(kernel.dtype) if alone else efficiency.kernel_latency

    def _pace(self, kernel: Kernel) -> float:
        """Arithmetic of a kernel within a step relative to it by itself."""
        return self.rate * self.narrow if kernel.dtype in NARROW else self.rate

    def _rate(self, kernel: Kernel) -> FlopPerSecond:
        """Rate of a kernel without a shape: matmul units for a matmul, vector units for anything else."""
        if kernel.kind in (KernelKind.MATMUL, *GROUPED):
            return matmul_rate(self.accelerator, kernel.dtype)
        return self.accelerator.peak_of(DType.FP32)

    def _stream(self, size: Bytes) -> Seconds:
        return size / (self.accelerator.memory_bandwidth * self.accelerator.efficiency.memory)

    def _matmul(self, kernel: Kernel, shape: MatmulShape) -> Work:
        sizes = np.array([[shape.m], [shape.n], [shape.k], [shape.batch]], dtype=np.float64)
        compute, memory = matmul_options(self.accelerator, kernel.dtype, sizes, np.array([kernel.bytes]))
        best = int(np.argmin(np.maximum(compute, memory)))
        rate = alignment_rate(self.accelerator, kernel.dtype, shape)
        return Work(float(compute[0, best]) / rate, float(memory[0, best]) / rate)

    def _attention(self, kernel: Kernel, shape: AttentionShape) -> Work:
        backward = kernel.kind is KernelKind.ATTENTION_BACKWARD
        efficiency = self.accelerator.efficiency
        constants = efficiency.attention_backward if backward else efficiency.attention_forward
        scores = kernel.flops / shape.score_flops(backward=backward)
        wide = DType.BF16 if kernel.dtype in NARROW else kernel.dtype
        rate = self.accelerator.peak_of(wide) * constants.share * self._faster(kernel.dtype, constants)
        load = attention_load(self.accelerator, constants, shape, scores)
        return Work(kernel.flops / rate * load, self._stream(kernel.bytes))

    def _faster(self, dtype: DType, constants: AttentionEfficiency) -> float:
        """How many times as fast as in BF16 attention is in a format; raise InputError where it has no kernel."""
        if dtype not in NARROW:
            return 1.0
        if dtype not in constants.formats:
            raise InputError(f"{self.accelerator.name} has no attention in {dtype.value}")
        return constants.formats[dtype]


def attention_load(
    accelerator: Accelerator, constants: AttentionEfficiency, shape: AttentionShape, scores: float
) -> float:
    """Time of an attention kernel relative to its FLOP at full rate on all compute units (at least 1).

    constants: of its direction; scores: score elements computed, over all sequences and heads; causal attention
    computes about half of all.
    """
    rows = shape.batch * shape.heads * shape.query
    blocks = shape.batch * shape.heads * np.ceil(shape.query / constants.block)
    keys = scores / rows
    edges = shape.causal + (shape.window is not None)  # the diagonal, and where a window begins
    mean = keys + edges * constants.block / 2.0 + constants.key_overhead  # half of the block on an edge is masked
    reached = shape.key if shape.window is None else min(shape.key, shape.window + constants.block)
    longest = reached + constants.key_overhead
    waves = blocks / accelerator.compute_units
    busiest = max(waves * mean, longest) if shape.causal else np.ceil(waves) * mean
    padding = blocks * constants.block / rows
    padded = accelerator.alignment.padded(shape.head_dim) + accelerator.alignment.padded(shape.values)
    head = (padded + 2 * constants.head_overhead) / (shape.head_dim + shape.values)
    mask = constants.causal if shape.causal else 1.0
    return float(busiest / (waves * keys) * padding * head / mask)
