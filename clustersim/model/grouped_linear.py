"""Grouped linear layers: what do the experts of one rank compute and move?

The linear layers of several experts are matmuls of each expert's tokens with its own matrix, run in one
of the ways of `overheads.Grouping`: on streams and in one kernel they are one kernel here, in a loop each
is a separate kernel. The three matmuls are those of a linear layer (see `linear`), once per expert.
Tokens are spread evenly over the experts, so that all matmuls have the same sizes.
"""

from dataclasses import dataclass, replace
from typing import Final

from clustersim.common.dtypes import DType
from clustersim.common.units import Bytes
from clustersim.model.kernels import Kernel, KernelKind, MatmulLayout, MatmulShape
from clustersim.model.linear import matmul_kernel
from clustersim.model.memory_bound import accumulate_kernels
from clustersim.model.overheads import Accumulation, Grouping
from clustersim.model.precision_recipe import MatmulFormats, PrecisionRecipe

_KERNEL_KINDS: Final = {
    Grouping.STREAMS: KernelKind.STREAMED_MATMULS,
    Grouping.KERNEL: KernelKind.GROUPED_MATMUL,
    Grouping.FUSED: KernelKind.STREAMED_MATMULS,
}


@dataclass(frozen=True, slots=True)
class GroupedLinear:
    """Linear layers of `expert_count` experts on one rank: [tokens, inputs] to [tokens, outputs].

    tokens: of all experts; formats: of the operands; bias: each expert adds one; grouping: how the matmuls
    are run.
    """

    name: str
    expert_count: int
    tokens: int
    inputs: int
    outputs: int
    formats: MatmulFormats
    bias: bool = False
    grouping: Grouping = Grouping.STREAMS

    @property
    def parameter_count(self) -> int:
        """Elements of all experts' weights and biases."""
        return self.expert_count * self.outputs * (self.inputs + self.bias)

    @property
    def tokens_per_expert(self) -> int:
        """Tokens of one expert, rounded up."""
        return -(-self.tokens // self.expert_count)

    def forward(self, recipe: PrecisionRecipe) -> tuple[Kernel, ...]:
        """The output matmuls of all experts."""
        shape = MatmulShape(self.tokens_per_expert, self.outputs, self.inputs, self.expert_count)
        return self._expert_matmuls(self.name, self.formats.forward, shape, recipe.activations.bytes)

    def input_gradient(self, recipe: PrecisionRecipe) -> tuple[Kernel, ...]:
        """The input-gradient matmuls of all experts."""
        shape = MatmulShape(self.tokens_per_expert, self.inputs, self.outputs, self.expert_count, MatmulLayout.NN)
        name = f"{self.name}.input_gradient"
        return self._expert_matmuls(name, self.formats.input_gradient, shape, recipe.activations.bytes)

    def weight_gradient(self, recipe: PrecisionRecipe, accumulation: Accumulation) -> tuple[Kernel, ...]:
        """The weight-gradient matmuls of all experts, and their accumulation."""
        name, operands, gradients = (
            f"{self.name}.weight_gradient",
            self.formats.weight_gradient,
            recipe.weight_formats.gradients,
        )
        shape = MatmulShape(self.outputs, self.inputs, self.tokens_per_expert, self.expert_count, MatmulLayout.TN)
        if accumulation is Accumulation.FUSED:
            return self._expert_matmuls(name, operands, replace(shape, accumulated=gradients), 2 * gradients.bytes)
        sizes, product_dtype = (self.expert_count * self.outputs, self.inputs), recipe.activations
        accumulation_kernels = accumulate_kernels(
            f"{self.name}.accumulate",
            sizes,
            gradient_dtype=product_dtype,
            accumulator_dtype=gradients,
            accumulation=accumulation,
        )
        return (*self._expert_matmuls(name, operands, shape, product_dtype.bytes), *accumulation_kernels)

    def _expert_matmuls(self, name: str, dtype: DType, shape: MatmulShape, result_bytes: Bytes) -> tuple[Kernel, ...]:
        """One kernel for the matmuls of all experts, or one per expert; a single expert is an ordinary matmul."""
        flops = 2.0 * self.tokens * self.inputs * self.outputs  # of the actual tokens, without rounding up
        kind = _KERNEL_KINDS.get(self.grouping)
        if kind is None or (self.expert_count == 1 and self.grouping is Grouping.STREAMS):
            expert_kernel = replace(
                matmul_kernel(name, dtype, replace(shape, batch=1), result_bytes=result_bytes),
                flops=flops / self.expert_count,
            )
            return (expert_kernel,) * self.expert_count
        return (replace(matmul_kernel(name, dtype, shape, result_bytes=result_bytes), kind=kind, flops=flops),)
