"""How long do operators take whose kernels are bound by elements, not by bytes?

PyTorch vectorizes an element-wise operation where its operands are contiguous and of one shape and format; the
kernel then streams at the rate of a large copy. Where an operand is broadcast (the weight of a norm), strided (the
halves of a rotary embedding, heads as views) or of another format, each thread computes the offsets of its elements
one by one (`elementwise_kernel` and `unrolled_elementwise_kernel` in aten/src/ATen/native/cuda/CUDALoops.cuh) and
memory is not the limit: such kernels compute `ELEMENT_RATE` elements a second on each compute unit, or are as slow as
their bytes, whichever takes longer. An operator's time is that of all of its kernels:

    seconds = other bytes / bandwidth + max(unvectorized bytes / bandwidth, elements / (units x rate))

PyTorch's fused Adam reads, computes and writes a weight with its moments in one thread: where these are of 16 bits it
is bound so, too.

Counts of kernels and of their passes are those of a profile of Hugging Face's Llama on an H200
(tests/interop/traces/h200_llama2_7b_4_layers.json.gz), which the tests count again.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final

from clustersim.common.units import Bytes, BytesPerSecond, Seconds
from clustersim.hardware.accelerator import Accelerator
from clustersim.model.kernels import Kernel, MemoryBoundOp, MemoryBoundShape
from clustersim.model.memory_bound import MemoryPasses

ELEMENT_RATE: Final = 2.5e9
"""Elements per second and compute unit of unvectorized kernels.

H200, 132 units: 3.3e11 elements/s, the mean of those of the profile (2.3e11 to 3.9e11). MI355X, 256 units: rotary
embedding by PyTorch, 16 x 16 x 16,384 x 128 elements in 3.94 ms, is five such kernels (HazyResearch/HipKittens,
analysis/rotary/mi350x/mi355x_rotary.json): 2.7e9.
"""
_ADAM_ELEMENTS: Final = 1.9  # a fused update of bf16 states: 1.07e9 weights in 6.1 ms of the profile

_Counts = Mapping[tuple[MemoryBoundOp, bool], tuple[float, MemoryPasses]]
_UNVECTORIZED: Final[_Counts] = MappingProxyType(
    {
        # to FP32; times the root of the mean; times the weight
        (MemoryBoundOp.RMSNORM, False): (3.0, MemoryPasses(3, fp32=3)),
        # gradient times the weight; to FP32; times the root; the mean's gradient expanded
        (MemoryBoundOp.RMSNORM, True): (4.0, MemoryPasses(3, fp32=4)),
        # times the cosine; minus one half; both halves joined; times the sine; the sum
        (MemoryBoundOp.ROTARY, False): (4.5, MemoryPasses(10)),
        # times the sine; minus one half; each half copied into zeros; times the cosine; the sum with the other
        (MemoryBoundOp.ROTARY, True): (4.5, MemoryPasses(10)),
        # to FP32; product of half as many complex numbers; back
        (MemoryBoundOp.ROTARY_COMPLEX, False): (2.5, MemoryPasses(2, fp32=4)),
        (MemoryBoundOp.ROTARY_COMPLEX, True): (2.5, MemoryPasses(2, fp32=4)),
        (MemoryBoundOp.SWIGLU, False): (0.0, MemoryPasses(0)),
        (MemoryBoundOp.SWIGLU, True): (0.0, MemoryPasses(0)),
    }
)
"""Of operators that run operation by operation: elements and passes of unvectorized kernels, per element."""


@dataclass(frozen=True, slots=True)
class ElementwiseWork:
    """What an operator's kernels move and compute.

    streamed: bytes of vectorized kernels; unvectorized: bytes of the others, which compute `elements`;
    is_one_kernel: it reaches the bandwidth of operators, not that of large copies.
    """

    streamed: Bytes
    unvectorized: Bytes
    elements: float
    is_one_kernel: bool = False

    def seconds(self, bandwidth: BytesPerSecond, compute_units: int) -> Seconds:
        """Seconds at the bandwidth that its kernels reach."""
        return self.streamed / bandwidth + max(self.unvectorized / bandwidth, self.element_seconds(compute_units))

    def element_seconds(self, compute_units: int) -> Seconds:
        """Seconds that unvectorized kernels take at least."""
        return self.elements / (compute_units * ELEMENT_RATE)


def elementwise_work(kernel: Kernel) -> ElementwiseWork | None:
    """Work of an operator's kernels; None of operators that are bound by their bytes alone."""
    shape = kernel.shape
    if not isinstance(shape, MemoryBoundShape):
        return None
    if shape.routine is MemoryBoundOp.ADAM and shape.fused:
        return ElementwiseWork(0.0, kernel.bytes, _ADAM_ELEMENTS * shape.elements, is_one_kernel=True)
    if shape.fused or (shape.routine, shape.backward) not in _UNVECTORIZED:
        return None
    element_count, passes = _UNVECTORIZED[shape.routine, shape.backward]
    unvectorized = min(passes.bytes(kernel.dtype, shape.elements), kernel.bytes)
    return ElementwiseWork(kernel.bytes - unvectorized, unvectorized, element_count * shape.elements)


def elementwise_seconds(accelerator: Accelerator, kernel: Kernel) -> Seconds | None:
    """Seconds of an operator's kernels; None of operators that are bound by their bytes alone."""
    work = elementwise_work(kernel)
    if work is None:
        return None
    efficiency, datasheet = accelerator.efficiency, accelerator.memory_bandwidth
    reached = efficiency.operator_bandwidth if work.is_one_kernel else efficiency.reached_bandwidth
    return work.seconds(reached(datasheet), accelerator.compute_units)
