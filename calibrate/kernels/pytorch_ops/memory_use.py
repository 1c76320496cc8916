"""Peak memory of a kernel while it is measured.

Everything that is allocated at the peak: operands, tensors that autograd saves between forward and backward,
the result of the previous run, the gradients of result and operands, and the temporaries of formulas that
PyTorch runs operator by operator. Tensors are counted, each with as many elements as the operation covers;
memory traffic would be misleading, since foreach Adam passes 20 times over five tensors. A backward is
measured together with the forward that was run for it. Formulas compiled for a GPU keep what inductor's
partitioner keeps, and have no temporaries.

CPUs have other kernels for three operations: dropout stores its mask in the operand's format, RMS norm is a
formula, and a sum of two formats first copies the operand of lower precision. Vectors, row statistics and
library workspaces (cuBLAS) are not counted. Tests compare with what PyTorch allocates.
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

_INDEX_BYTES: Final = 8  # bytes of a token index


@dataclass(frozen=True, slots=True)
class TensorCounts:
    """Number of tensors at the peak: in the kernel's format, in FP32, and of bytes (masks).

    all_fp32: number if the kernel's format is FP32, so that nothing is converted; None: as otherwise.
    """

    kernel_format: int
    fp32: int = 0
    mask: int = 0
    all_fp32: int | None = None

    def total_bytes(self, dtype: DType, elements: int) -> Bytes:
        """Bytes if each tensor has this many elements."""
        if self.all_fp32 is not None and dtype.bytes == DType.FP32.bytes:
            return float(elements * (self.all_fp32 * dtype.bytes + self.mask))
        return float(elements * (self.kernel_format * dtype.bytes + self.fp32 * DType.FP32.bytes + self.mask))


TensorCountTable = Mapping[tuple[MemoryBoundOp, bool], tuple[TensorCounts, TensorCounts]]
"""By operation and whether it is fused: peak of a forward, and of a backward including its forward."""


def _same_if_fused(op: MemoryBoundOp, forward: TensorCounts, backward: TensorCounts | None = None) -> TensorCountTable:
    """Entries of an operation with the same counts fused and unfused."""
    return {(op, fused): (forward, backward or forward) for fused in (False, True)}


_TENSOR_COUNTS: Final[TensorCountTable] = MappingProxyType(
    {
        **_same_if_fused(MemoryBoundOp.LAYERNORM, TensorCounts(2), TensorCounts(4)),
        (MemoryBoundOp.RMSNORM, True): (TensorCounts(2), TensorCounts(4)),
        (MemoryBoundOp.RMSNORM, False): (TensorCounts(2, fp32=2, all_fp32=3), TensorCounts(4, fp32=6, all_fp32=9)),
        **_same_if_fused(MemoryBoundOp.GELU, TensorCounts(2), TensorCounts(4)),
        (MemoryBoundOp.SWIGLU, True): (TensorCounts(3), TensorCounts(6)),
        (MemoryBoundOp.SWIGLU, False): (TensorCounts(4), TensorCounts(9)),
        (MemoryBoundOp.ROTARY, True): (TensorCounts(3), TensorCounts(4)),
        (MemoryBoundOp.ROTARY, False): (TensorCounts(5), TensorCounts(6)),
        **_same_if_fused(MemoryBoundOp.RESIDUAL, TensorCounts(3), TensorCounts(4)),
        (MemoryBoundOp.RESIDUAL_DROPOUT, True): (TensorCounts(3, mask=1), TensorCounts(5, mask=1)),
        (MemoryBoundOp.RESIDUAL_DROPOUT, False): (TensorCounts(4, mask=1), TensorCounts(5, mask=1)),
        **_same_if_fused(MemoryBoundOp.DROPOUT, TensorCounts(2, mask=1), TensorCounts(4, mask=1)),
        (MemoryBoundOp.SOFTMAX, True): (TensorCounts(2, mask=1), TensorCounts(4, mask=1)),
        (MemoryBoundOp.SOFTMAX, False): (TensorCounts(3, mask=1), TensorCounts(5, mask=1)),
        (MemoryBoundOp.SOFTCAP, True): (TensorCounts(2), TensorCounts(4)),
        (MemoryBoundOp.SOFTCAP, False): (TensorCounts(3), TensorCounts(6)),
        **_same_if_fused(
            MemoryBoundOp.LOSS_TORCH, TensorCounts(1, fp32=2, all_fp32=2), TensorCounts(1, fp32=3, all_fp32=4)
        ),
        **_same_if_fused(
            MemoryBoundOp.LOSS_VOCAB_PARALLEL, TensorCounts(1, fp32=1), TensorCounts(2, fp32=1, all_fp32=2)
        ),
        **_same_if_fused(MemoryBoundOp.LOSS_FUSED, TensorCounts(1), TensorCounts(2)),
        **_same_if_fused(MemoryBoundOp.LOSS_CHUNKED, TensorCounts(1), TensorCounts(2)),
        (MemoryBoundOp.SCALED_SUM, True): (TensorCounts(3), TensorCounts(5)),
        (MemoryBoundOp.SCALED_SUM, False): (TensorCounts(4), TensorCounts(5)),
        **_same_if_fused(MemoryBoundOp.SCALE, TensorCounts(2), TensorCounts(4)),
        **_same_if_fused(MemoryBoundOp.WEIGHTING, TensorCounts(2), TensorCounts(5)),
        **_same_if_fused(MemoryBoundOp.TOP_K, TensorCounts(2, fp32=2)),
        **_same_if_fused(MemoryBoundOp.TOP_K_SIGMOID, TensorCounts(4, fp32=2)),
        **_same_if_fused(MemoryBoundOp.TOP_K_GROUPED, TensorCounts(4, fp32=2, mask=1)),
        **_same_if_fused(MemoryBoundOp.ROW_MAP, TensorCounts(0, fp32=5, mask=2)),
        **_same_if_fused(MemoryBoundOp.PERMUTE, TensorCounts(1), TensorCounts(2)),
        **_same_if_fused(MemoryBoundOp.UNPERMUTE, TensorCounts(2)),
        **_same_if_fused(MemoryBoundOp.BIAS_GRADIENT, TensorCounts(1)),
        **_same_if_fused(MemoryBoundOp.BIAS_ADD, TensorCounts(2)),
        **_same_if_fused(MemoryBoundOp.ZERO, TensorCounts(1)),
        **_same_if_fused(MemoryBoundOp.UNSCALE, TensorCounts(1)),
        **_same_if_fused(MemoryBoundOp.CAUSAL_MASK, TensorCounts(0, fp32=2)),
        **_same_if_fused(MemoryBoundOp.GRADIENT_NORM, TensorCounts(1)),
        **_same_if_fused(MemoryBoundOp.GRADIENT_CLIP, TensorCounts(1)),
        **_same_if_fused(MemoryBoundOp.LOOKUP, TensorCounts(1), TensorCounts(2)),
        **_same_if_fused(MemoryBoundOp.POSITIONS, TensorCounts(2), TensorCounts(3)),
        **_same_if_fused(MemoryBoundOp.COPY, TensorCounts(1)),
        **_same_if_fused(MemoryBoundOp.ACCUMULATE, TensorCounts(1)),
        (MemoryBoundOp.ADAM, True): (TensorCounts(4), TensorCounts(4)),
        (MemoryBoundOp.ADAM, False): (TensorCounts(5), TensorCounts(5)),
        **_same_if_fused(MemoryBoundOp.SGD, TensorCounts(3)),
    }
)
_CPU_TENSOR_COUNTS: Final[TensorCountTable] = MappingProxyType(
    {
        **_TENSOR_COUNTS,
        (MemoryBoundOp.RMSNORM, True): (TensorCounts(2, fp32=3, all_fp32=3), TensorCounts(1, fp32=8, all_fp32=9)),
        (MemoryBoundOp.RESIDUAL_DROPOUT, False): (TensorCounts(5), TensorCounts(6)),
        **_same_if_fused(MemoryBoundOp.DROPOUT, TensorCounts(3), TensorCounts(5)),
    }
)
_TOUCHED_TENSORS: Final = {
    MemoryBoundOp.ADAM: 4,
    MemoryBoundOp.SGD: 3,
}  # tensors as large as the weights; at least one for other operations


def allocated_bytes(kernel: Kernel, device: torch.device) -> Bytes:
    """Bytes that the kernel takes on the device at its peak while it is measured."""
    match kernel.shape:
        case MatmulShape() as shape:
            return matmul.matmul_bytes(shape, kernel.dtype)
        case AttentionShape() as shape:
            return attention.attention_bytes(shape, kernel.dtype, gradient=kernel.kind is KernelKind.ATTENTION_BACKWARD)
        case MemoryBoundShape(routine=MemoryBoundOp.QUANTIZE) as shape:
            return float(shape.elements * (kernel.dtype.bytes + sum(dtype.bytes for dtype in shape.formats)))
        case MemoryBoundShape() as shape:
            return _memory_bound_bytes(shape, kernel.dtype, on_cpu=device.type == "cpu")
    return kernel.bytes


def touched_bytes(kernel: Kernel) -> Bytes:
    """Lower bound of the distinct bytes that one run of the kernel reads or writes."""
    match kernel.shape:
        case MemoryBoundShape(routine=routine) as shape:
            return float(_TOUCHED_TENSORS.get(routine, 1) * shape.elements * kernel.dtype.bytes)
    return allocated_bytes(kernel, torch.device("meta"))


def _memory_bound_bytes(shape: MemoryBoundShape, dtype: DType, *, on_cpu: bool) -> Bytes:
    table = _CPU_TENSOR_COUNTS if on_cpu else _TENSOR_COUNTS
    forward_and_backward = table.get((shape.routine, shape.fused), (TensorCounts(2), TensorCounts(4)))
    return forward_and_backward[shape.backward].total_bytes(dtype, shape.elements) + _other_tensor_bytes(
        shape, dtype, on_cpu=on_cpu
    )


def _other_tensor_bytes(shape: MemoryBoundShape, dtype: DType, *, on_cpu: bool) -> Bytes:
    """Bytes of tensors with another size or format than the main one."""
    elements, table_elements = shape.elements, shape.table * shape.width
    other_formats = [d_type.bytes for d_type in shape.formats if d_type is not dtype]
    cast_bytes = DType.FP32.bytes if on_cpu and other_formats else 0
    size = 0.0
    match shape.routine:
        case MemoryBoundOp.ADAM | MemoryBoundOp.SGD:
            size = elements * sum(other_formats, 0.0)
        case MemoryBoundOp.COPY:
            size = elements * sum(other_formats or (dtype.bytes,), 0.0)
        case MemoryBoundOp.ACCUMULATE:
            size = elements * (shape.formats[0].bytes + cast_bytes)
        case MemoryBoundOp.LOOKUP:
            size = table_elements * dtype.bytes * (2 if shape.backward else 1) + shape.rows * _INDEX_BYTES
        case MemoryBoundOp.POSITIONS if shape.backward:
            size = table_elements * (2 * dtype.bytes + shape.formats[0].bytes + (cast_bytes or dtype.bytes))
        case MemoryBoundOp.POSITIONS:
            size = table_elements * dtype.bytes
        case MemoryBoundOp.PERMUTE if shape.table == shape.rows:
            size = table_elements * (0 if shape.backward else dtype.bytes) + shape.rows * _INDEX_BYTES
        case MemoryBoundOp.PERMUTE | MemoryBoundOp.UNPERMUTE:
            size = table_elements * dtype.bytes * (2 if shape.backward else 1) + shape.table * _INDEX_BYTES
        case MemoryBoundOp.ROTARY:
            size = 2 * table_elements * dtype.bytes
    return size
