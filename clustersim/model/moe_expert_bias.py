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
from clustersim.model.kernels import Kernel, KernelKind, Routine, StreamShape
from clustersim.model.operators import Operator

_CLAMP: Final = 4  # passes over gate and up: read and write both, and put them together
_CLAMP_BACK: Final = 5  # the gradient, the input, the result; and put together
_CLAMPS: Final = 3  # launches, both ways
_BIAS: Final = 6  # passes over the rows: the bias times probabilities, the sum, and together
_BIAS_BACK: Final = 6  # two products of the gradient and their sums
_OF_EACH: Final = 2  # launches of each expert: product and sum
_OF_EACH_BACK: Final = 4


def clamped(activation: Operator, dtype: DType, rows: int, width: int) -> Operator:
    """An activation whose input [rows, width] is limited before; what was limited is kept, too."""
    shape, size = StreamShape(Routine.COPY, rows, width), rows * width * dtype.bytes
    ahead = _kernel("experts.clamp", dtype, shape, _CLAMP * size, _CLAMPS)
    behind = _kernel("experts.clamp.input_gradient", dtype, shape, _CLAMP_BACK * size, _CLAMPS)
    return replace(
        activation,
        forward=(ahead, *activation.forward),
        input_gradient=(*activation.input_gradient, behind),
        kept=activation.kept + size,
    )


def biased(product: Operator, dtype: DType, experts: int, shape: tuple[int, int]) -> Operator:
    """A grouped product to [rows, width] whose experts' biases are added behind it, times probabilities."""
    stream = StreamShape(Routine.BIAS_ADD, *shape)
    size = stream.elements * dtype.bytes
    behind = _kernel("experts.bias", dtype, stream, _BIAS * size, _OF_EACH * experts + 1)
    ahead = _kernel("experts.bias.gradient", dtype, stream, _BIAS_BACK * size, _OF_EACH_BACK * experts)
    return replace(product, forward=(*product.forward, behind), input_gradient=(ahead, *product.input_gradient))


def _kernel(name: str, dtype: DType, shape: StreamShape, moved: Bytes, launches: int) -> Kernel:
    return Kernel(name, KernelKind.COPY, dtype, flops=0.0, bytes=float(moved), shape=shape, launches=launches)
