"""How much memory does a kernel take while it is measured?

All that is there at its fullest moment: operands, what autograd keeps between forward and backward, the result of the
run before, the gradient of the result and those of the operands, and the temporaries of formulas that PyTorch runs
operator by operator. Tensors are counted, each as many elements as the routine is over; traffic would say something
else, since foreach Adam passes 20 times over five tensors. A backward is measured beside the forward that was run for
it. Formulas compiled for a GPU keep what inductor's partitioner keeps, and have no temporaries.

CPUs have other kernels for three things: dropout keeps its mask as numbers of the operand's format, RMS norm is a
formula, and a sum of two formats copies the narrower operand first. Vectors, statistics of rows and what libraries take
for themselves (cuBLAS's workspace) are not counted. Tests measure what PyTorch allocates.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final

import torch

from calibrate.kernels.pytorch_ops import attention, matmul
from clustersim.common.dtypes import DType
from clustersim.common.units import Bytes
from clustersim.model.kernels import AttentionShape, Kernel, KernelKind, MatmulShape, MemoryBoundOp, MemoryBoundShape

_INDEX: Final = 8  # bytes of a token's number


@dataclass(frozen=True, slots=True)
class Tensors:
    """So many tensors at the fullest moment: in the kernel's format, in FP32, and of bytes.

    alike: how many where the kernel's format is FP32, so that nothing is converted; None: as many as otherwise.
    """

    own: int
    wide: int = 0
    mask: int = 0
    alike: int | None = None

    def bytes(self, dtype: DType, elements: int) -> Bytes:
        """Of so many elements in each."""
        if self.alike is not None and dtype.bytes == DType.FP32.bytes:
            return float(elements * (self.alike * dtype.bytes + self.mask))
        return float(elements * (self.own * dtype.bytes + self.wide * DType.FP32.bytes + self.mask))


Counts = Mapping[tuple[MemoryBoundOp, bool], tuple[Tensors, Tensors]]
"""By routine and whether it is fused: what a forward takes, and what a backward takes with it."""


def _one(routine: MemoryBoundOp, forward: Tensors, backward: Tensors | None = None) -> Counts:
    """A routine that is one kernel either way."""
    return {(routine, fused): (forward, backward or forward) for fused in (False, True)}


_COUNTS: Final[Counts] = MappingProxyType(
    {
        **_one(MemoryBoundOp.LAYERNORM, Tensors(2), Tensors(4)),
        (MemoryBoundOp.RMSNORM, True): (Tensors(2), Tensors(4)),
        (MemoryBoundOp.RMSNORM, False): (Tensors(2, wide=2, alike=3), Tensors(4, wide=6, alike=9)),
        **_one(MemoryBoundOp.GELU, Tensors(2), Tensors(4)),
        (MemoryBoundOp.SWIGLU, True): (Tensors(3), Tensors(6)),
        (MemoryBoundOp.SWIGLU, False): (Tensors(4), Tensors(9)),
        (MemoryBoundOp.ROTARY, True): (Tensors(3), Tensors(4)),
        (MemoryBoundOp.ROTARY, False): (Tensors(5), Tensors(6)),
        **_one(MemoryBoundOp.RESIDUAL, Tensors(3), Tensors(4)),
        (MemoryBoundOp.RESIDUAL_DROPOUT, True): (Tensors(3, mask=1), Tensors(5, mask=1)),
        (MemoryBoundOp.RESIDUAL_DROPOUT, False): (Tensors(4, mask=1), Tensors(5, mask=1)),
        **_one(MemoryBoundOp.DROPOUT, Tensors(2, mask=1), Tensors(4, mask=1)),
        (MemoryBoundOp.SOFTMAX, True): (Tensors(2, mask=1), Tensors(4, mask=1)),
        (MemoryBoundOp.SOFTMAX, False): (Tensors(3, mask=1), Tensors(5, mask=1)),
        (MemoryBoundOp.SOFTCAP, True): (Tensors(2), Tensors(4)),
        (MemoryBoundOp.SOFTCAP, False): (Tensors(3), Tensors(6)),
        **_one(MemoryBoundOp.LOSS_TORCH, Tensors(1, wide=2, alike=2), Tensors(1, wide=3, alike=4)),
        **_one(MemoryBoundOp.LOSS_VOCAB_PARALLEL, Tensors(1, wide=1), Tensors(2, wide=1, alike=2)),
        **_one(MemoryBoundOp.LOSS_FUSED, Tensors(1), Tensors(2)),
        **_one(MemoryBoundOp.LOSS_CHUNKED, Tensors(1), Tensors(2)),
        (MemoryBoundOp.SCALED_SUM, True): (Tensors(3), Tensors(5)),
        (MemoryBoundOp.SCALED_SUM, False): (Tensors(4), Tensors(5)),
        **_one(MemoryBoundOp.SCALE, Tensors(2), Tensors(4)),
        **_one(MemoryBoundOp.WEIGHTING, Tensors(2), Tensors(5)),
        **_one(MemoryBoundOp.TOP_K, Tensors(2, wide=2)),
        **_one(MemoryBoundOp.TOP_K_SIGMOID, Tensors(4, wide=2)),
        **_one(MemoryBoundOp.TOP_K_GROUPED, Tensors(4, wide=2, mask=1)),
        **_one(MemoryBoundOp.ROW_MAP, Tensors(0, wide=5, mask=2)),
        **_one(MemoryBoundOp.PERMUTE, Tensors(1), Tensors(2)),
        **_one(MemoryBoundOp.UNPERMUTE, Tensors(2)),
        **_one(MemoryBoundOp.BIAS_GRADIENT, Tensors(1)),
        **_one(MemoryBoundOp.BIAS_ADD, Tensors(2)),
        **_one(MemoryBoundOp.ZERO, Tensors(1)),
        **_one(MemoryBoundOp.UNSCALE, Tensors(1)),
        **_one(MemoryBoundOp.CAUSAL_MASK, Tensors(0, wide=2)),
        **_one(MemoryBoundOp.GRADIENT_NORM, Tensors(1)),
        **_one(MemoryBoundOp.GRADIENT_CLIP, Tensors(1)),
        **_one(MemoryBoundOp.LOOKUP, Tensors(1), Tensors(2)),
        **_one(MemoryBoundOp.POSITIONS, Tensors(2), Tensors(3)),
        **_one(MemoryBoundOp.COPY, Tensors(1)),
        **_one(MemoryBoundOp.ACCUMULATE, Tensors(1)),
        (MemoryBoundOp.ADAM, True): (Tensors(4), Tensors(4)),
        (MemoryBoundOp.ADAM, False): (Tensors(5), Tensors(5)),
        **_one(MemoryBoundOp.SGD, Tensors(3)),
    }
)
_ON_CPU: Final[Counts] = MappingProxyType(
    {
        **_COUNTS,
        (MemoryBoundOp.RMSNORM, True): (Tensors(2, wide=3, alike=3), Tensors(1, wide=8, alike=9)),
        (MemoryBoundOp.RESIDUAL_DROPOUT, False): (Tensors(5), Tensors(6)),
        **_one(MemoryBoundOp.DROPOUT, Tensors(3), Tensors(5)),
    }
)
_TOUCHED: Final = {
    MemoryBoundOp.ADAM: 4,
    MemoryBoundOp.SGD: 3,
}  # as large as the weights; of other routines one at least


def allocated(kernel: Kernel, device: torch.device) -> Bytes:
    """Bytes that the kernel takes there, at its fullest moment, while it is measured."""
    match kernel.shape:
        case MatmulShape() as shape:
            return matmul.allocated(shape, kernel.dtype)
        case AttentionShape() as shape:
            return attention.allocated(shape, kernel.dtype, gradient=kernel.kind is KernelKind.ATTENTION_BACKWARD)
        case MemoryBoundShape(routine=MemoryBoundOp.QUANTIZE) as shape:
            return float(shape.elements * (kernel.dtype.bytes + sum(d_type.bytes for d_type in shape.formats)))
        case MemoryBoundShape() as shape:
            return _streamed(shape, kernel.dtype, on_cpu=device.type == "cpu")
    return kernel.bytes


def touched(kernel: Kernel) -> Bytes:
    """Bytes of distinct memory that one run of the kernel reads or writes, at least."""
    match kernel.shape:
        case MemoryBoundShape(routine=routine) as shape:
            return float(_TOUCHED.get(routine, 1) * shape.elements * kernel.dtype.bytes)
    return allocated(kernel, torch.device("meta"))


def _streamed(shape: MemoryBoundShape, dtype: DType, *, on_cpu: bool) -> Bytes:
    counts = _ON_CPU if on_cpu else _COUNTS
    both = counts.get((shape.routine, shape.fused), (Tensors(2), Tensors(4)))
    return both[shape.backward].bytes(dtype, shape.elements) + _beside(shape, dtype, on_cpu=on_cpu)


def _beside(shape: MemoryBoundShape, dtype: DType, *, on_cpu: bool) -> Bytes:
    """What has another size or format than the tensor that the routine is over."""
    elements, table = shape.elements, shape.table * shape.width
    others = [d_type.bytes for d_type in shape.formats if d_type is not dtype]
    cast = DType.FP32.bytes if on_cpu and others else 0
    size = 0.0
    match shape.routine:
        case MemoryBoundOp.ADAM | MemoryBoundOp.SGD:
            size = elements * sum(others, 0.0)
        case MemoryBoundOp.COPY:
            size = elements * sum(others or (dtype.bytes,), 0.0)
        case MemoryBoundOp.ACCUMULATE:
            size = elements * (shape.formats[0].bytes + cast)
        case MemoryBoundOp.LOOKUP:
            size = table * dtype.bytes * (2 if shape.backward else 1) + shape.rows * _INDEX
        case MemoryBoundOp.POSITIONS if shape.backward:
            size = table * (2 * dtype.bytes + shape.formats[0].bytes + (cast or dtype.bytes))
        case MemoryBoundOp.POSITIONS:
            size = table * dtype.bytes
        case MemoryBoundOp.PERMUTE if shape.table == shape.rows:
            size = table * (0 if shape.backward else dtype.bytes) + shape.rows * _INDEX
        case MemoryBoundOp.PERMUTE | MemoryBoundOp.UNPERMUTE:
            size = table * dtype.bytes * (2 if shape.backward else 1) + shape.table * _INDEX
        case MemoryBoundOp.ROTARY:
            size = 2 * table * dtype.bytes
    return size
