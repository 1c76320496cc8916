"""What do experts with biases cost beside their products?

gpt-oss's experts add a bias to each of their two results, and limit what goes into the activation (a clamp of gate and
up). Megatron-LM leaves the first bias to the product, and runs the rest as PyTorch does it, one tensor operation after
the other, also where its activation is fused. Before the activation both halves are clamped, each on its own, and put
together again; behind the second product, each expert's bias times the probabilities of its rows is made, added to the
rows, and the experts' rows are put together. Backward of the clamp reads the gradient and the activation's input, that
of the bias makes the gradients of probabilities and biases, each a product and its sum.

Assumed: probabilities are in the format of activations, as routers make them unless told otherwise (some dispatchers
want FP32, which takes nearly twice as many bytes here).
Reference: NVIDIA/Megatron-LM, megatron/core/transformer/moe/experts.py (TEGroupedMLP._apply_bias) and
megatron/core/fusions/fused_bias_geglu.py (weighted_bias_quick_geglu_impl).
"""

from dataclasses import replace
from typing import Final

from clustersim.common.dtypes import DType
from clustersim.common.units import Bytes
from clustersim.model.kernels import Kernel, KernelKind, MemoryBoundOp, MemoryBoundShape
from clustersim.model.operators import Operator

_CLAMP_PASSES: Final = 4  # passes over gate and up: read and write both, and put them together
_CLAMP_BACKWARD_PASSES: Final = 5  # the gradient, the input, the result; and put together
_CLAMP_LAUNCHES: Final = 3  # launches, both ways
_BIAS_PASSES: Final = 6  # passes over the rows: the bias times probabilities, the sum, and together
_BIAS_BACKWARD_PASSES: Final = 6  # two products of the gradient and their sums
_EXPERT_LAUNCHES: Final = 2  # launches of each expert: product and sum
_EXPERT_BACKWARD_LAUNCHES: Final = 4


def add_clamp(activation: Operator, dtype: DType, rows: int, width: int) -> Operator:
    """An activation whose input [rows, width] is limited before; what was limited is kept, too."""
    shape, tensor_bytes = MemoryBoundShape(MemoryBoundOp.COPY, rows, width), rows * width * dtype.bytes
    forward = _copy_kernel("experts.clamp", dtype, shape, _CLAMP_PASSES * tensor_bytes, _CLAMP_LAUNCHES)
    backward = _copy_kernel(
        "experts.clamp.input_gradient", dtype, shape, _CLAMP_BACKWARD_PASSES * tensor_bytes, _CLAMP_LAUNCHES
    )
    return replace(
        activation,
        forward=(forward, *activation.forward),
        input_gradient=(*activation.input_gradient, backward),
        saved_bytes=activation.saved_bytes + tensor_bytes,
    )


def add_expert_bias(grouped_matmul: Operator, dtype: DType, expert_count: int, shape: tuple[int, int]) -> Operator:
    """A grouped product to [rows, width] whose experts' biases are added behind it, times probabilities."""
    bias_shape = MemoryBoundShape(MemoryBoundOp.BIAS_ADD, *shape)
    tensor_bytes = bias_shape.elements * dtype.bytes
    forward = _copy_kernel(
        "experts.bias", dtype, bias_shape, _BIAS_PASSES * tensor_bytes, _EXPERT_LAUNCHES * expert_count + 1
    )
    backward = _copy_kernel(
        "experts.bias.gradient",
        dtype,
        bias_shape,
        _BIAS_BACKWARD_PASSES * tensor_bytes,
        _EXPERT_BACKWARD_LAUNCHES * expert_count,
    )
    return replace(
        grouped_matmul,
        forward=(*grouped_matmul.forward, forward),
        input_gradient=(backward, *grouped_matmul.input_gradient),
    )


def _copy_kernel(name: str, dtype: DType, shape: MemoryBoundShape, moved_bytes: Bytes, launches: int) -> Kernel:
    return Kernel(name, KernelKind.COPY, dtype, flops=0.0, bytes=float(moved_bytes), shape=shape, launches=launches)
