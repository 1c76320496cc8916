"""What do expert biases and the activation clamp cost in addition to the experts' matmuls?

The experts of gpt-oss add a bias to both of their outputs and clamp the input of the activation (gate and
up). Megatron-LM leaves the first bias to the matmul epilogue, and runs the rest as eager PyTorch
operations, also where its activation is fused. Before the activation both halves are clamped separately
and concatenated; after the second matmul each expert's bias times the probabilities of its tokens is
computed, added to the tokens, and the experts' tokens are concatenated. Backward of the clamp reads the
gradient and the activation's input; backward of the bias computes the gradients of probabilities and
biases, each a product and its sum.

Assumed: probabilities are in the activation format, as routers produce them by default (some dispatchers
require FP32, which takes nearly twice as many bytes here). Reference: NVIDIA/Megatron-LM,
megatron/core/transformer/moe/experts.py (TEGroupedMLP._apply_bias) and
megatron/core/fusions/fused_bias_geglu.py (weighted_bias_quick_geglu_impl).
"""

from dataclasses import replace
from typing import Final

from clustersim.common.dtypes import DType
from clustersim.common.units import Bytes
from clustersim.model.kernels import Kernel, KernelKind, MemoryBoundOp, MemoryBoundShape
from clustersim.model.operators import Operator

_CLAMP_PASSES: Final = 4  # passes over gate and up: read and write both, then concatenate
_CLAMP_BACKWARD_PASSES: Final = 5  # gradient, input and output; then concatenate
_CLAMP_LAUNCHES: Final = 3  # launches, forward and backward
_BIAS_PASSES: Final = 6  # passes over the tokens: bias times probabilities, the sum, the concatenation
_BIAS_BACKWARD_PASSES: Final = 6  # two elementwise products of the gradient and their sums
_EXPERT_LAUNCHES: Final = 2  # launches per expert: product and sum
_EXPERT_BACKWARD_LAUNCHES: Final = 4


def add_clamp(activation: Operator, dtype: DType, rows: int, width: int) -> Operator:
    """An activation whose input [rows, width] is clamped first; the clamped input is saved, too."""
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
    """A grouped matmul to [rows, width] followed by the addition of expert biases times probabilities."""
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
