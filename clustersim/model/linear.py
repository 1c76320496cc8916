"""What do the matmuls of a linear layer compute and move?

A matmul of [m, k] and [k, n] is 2mnk FLOP and moves each operand once. A linear layer of `inputs` x
`outputs` on T tokens is three matmuls: forward (T, outputs, inputs), input gradient (T, inputs, outputs),
weight gradient (outputs, inputs, T), which is added to the accumulated gradient in memory (read and
written in the gradients' format): fused in the matmul epilogue (Megatron-LM's gradient accumulation
fusion) or otherwise (`overheads.Accumulation`). The bias is added by the matmul epilogue or the next
kernel at no cost; the bias gradient is one more read of the output gradient. The recipe gives the operand
formats of each matmul; results are in the activation format.
"""

from dataclasses import dataclass, replace

from clustersim.common.dtypes import DType
from clustersim.common.units import Bytes
from clustersim.model.kernels import Kernel, KernelKind, MatmulLayout, MatmulShape
from clustersim.model.lora import Projection
from clustersim.model.memory_bound import BIAS_GRADIENT, accumulate_kernels
from clustersim.model.overheads import Accumulation
from clustersim.model.precision_recipe import MatmulFormats, PrecisionRecipe


def matmul_kernel(name: str, dtype: DType, shape: MatmulShape, *, result_bytes: Bytes) -> Kernel:
    """A matmul whose operands are `dtype`; result_bytes: bytes moved per element of the result."""
    m, n, k = shape.m, shape.n, shape.k
    moved_bytes = shape.batch * ((m * k + k * n) * dtype.bytes + m * n * result_bytes)
    return Kernel(name, KernelKind.MATMUL, dtype, 2.0 * shape.batch * m * n * k, float(moved_bytes), shape)


@dataclass(frozen=True, slots=True)
class LinearLayer:
    """A linear layer on one rank: [tokens, inputs] to [tokens, outputs].

    formats: of the operands; bias_tokens: tokens whose gradient this rank sums for the bias (0: there is no
    bias); projections: fused projections with their output counts; row_parallel: tensor parallelism splits
    its inputs, not its outputs.
    """

    name: str
    tokens: int
    inputs: int
    outputs: int
    formats: MatmulFormats
    bias_tokens: int = 0
    projections: tuple[tuple[Projection, int], ...] = ()
    row_parallel: bool = False

    @property
    def parameter_count(self) -> int:
        """Weight and bias elements."""
        return self.outputs * (self.inputs + (1 if self.bias_tokens else 0))

    def forward(self, recipe: PrecisionRecipe) -> tuple[Kernel, ...]:
        """The output matmul."""
        shape = MatmulShape(self.tokens, self.outputs, self.inputs)
        return (matmul_kernel(self.name, self.formats.forward, shape, result_bytes=recipe.activations.bytes),)

    def input_gradient(self, recipe: PrecisionRecipe) -> tuple[Kernel, ...]:
        """The input-gradient matmul."""
        shape = MatmulShape(self.tokens, self.inputs, self.outputs, operands=MatmulLayout.NN)
        name = f"{self.name}.input_gradient"
        return (matmul_kernel(name, self.formats.input_gradient, shape, result_bytes=recipe.activations.bytes),)

    def weight_gradient(self, recipe: PrecisionRecipe, accumulation: Accumulation) -> tuple[Kernel, ...]:
        """The gradients of weight and bias, including accumulation."""
        if not self.bias_tokens:
            return self._weight_gradient(recipe, accumulation)
        bias = BIAS_GRADIENT.shape_for(self.bias_tokens, self.outputs)
        bias_gradient = BIAS_GRADIENT.forward_kernel(f"{self.name}.bias_gradient", recipe.activations, bias)
        return (*self._weight_gradient(recipe, accumulation), bias_gradient)

    def _weight_gradient(self, recipe: PrecisionRecipe, accumulation: Accumulation) -> tuple[Kernel, ...]:
        name, operands, gradients = (
            f"{self.name}.weight_gradient",
            self.formats.weight_gradient,
            recipe.weight_formats.gradients,
        )
        shape = MatmulShape(self.outputs, self.inputs, self.tokens, operands=MatmulLayout.TN)
        if accumulation is Accumulation.FUSED:
            accumulating_shape = replace(shape, accumulated=gradients)
            return (matmul_kernel(name, operands, accumulating_shape, result_bytes=2 * gradients.bytes),)
        gradient = matmul_kernel(name, operands, shape, result_bytes=recipe.activations.bytes)
        sizes = self.outputs, self.inputs
        accumulation_kernels = accumulate_kernels(
            f"{self.name}.accumulate",
            sizes,
            gradient_dtype=recipe.activations,
            accumulator_dtype=gradients,
            accumulation=accumulation,
        )
        return (gradient, *accumulation_kernels)
