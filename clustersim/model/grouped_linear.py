"""What do the experts of one rank compute and move?

The linear layers of several experts are products of each expert's tokens with its own matrix, which are run in one of
the ways of `overheads.Grouping`: on streams and in one kernel they are one kernel here, in a loop each is a kernel like
any other. The three products are those of a linear layer (see `linear`), each as many times as there are experts.
Tokens are spread evenly over the experts, so that every product has the same sizes.
"""

from dataclasses import dataclass, replace
from typing import Final

from clustersim.common.dtypes import DType
from clustersim.common.units import Bytes
from clustersim.model.kernels import Kernel, KernelKind, MatmulShape, Operands
from clustersim.model.linear import product
from clustersim.model.memory_bound import accumulate
from clustersim.model.overheads import Accumulation, Grouping
from clustersim.model.precision_recipe import Products, Recipe

_KINDS: Final = {
    Grouping.STREAMS: KernelKind.STREAMED_MATMULS,
    Grouping.KERNEL: KernelKind.GROUPED_MATMUL,
    Grouping.FUSED: KernelKind.STREAMED_MATMULS,
}


@dataclass(frozen=True, slots=True)
class GroupedLinear:
    """Linear layers of `experts` on one rank: [tokens, inputs] to [tokens, outputs], tokens over all of them.

    formats: of the operands; bias: each expert adds one; grouping: how products are run.
    """

    name: str
    experts: int
    tokens: int
    inputs: int
    outputs: int
    formats: Products
    bias: bool = False
    grouping: Grouping = Grouping.STREAMS

    @property
    def parameters(self) -> int:
        """Elements of all experts' weights and biases."""
        return self.experts * self.outputs * (self.inputs + self.bias)

    @property
    def rows(self) -> int:
        """Tokens of one expert, rounded up."""
        return -(-self.tokens // self.experts)

    def forward(self, recipe: Recipe) -> tuple[Kernel, ...]:
        """The outputs of all experts."""
        shape = MatmulShape(self.rows, self.outputs, self.inputs, self.experts)
        return self._kernels(self.name, self.formats.forward, shape, recipe.activations.bytes)

    def input_gradient(self, recipe: Recipe) -> tuple[Kernel, ...]:
        """The gradients of the inputs."""
        shape = MatmulShape(self.rows, self.inputs, self.outputs, self.experts, Operands.NN)
        name = f"{self.name}.input_gradient"
        return self._kernels(name, self.formats.input_gradient, shape, recipe.activations.bytes)

    def weight_gradient(self, recipe: Recipe, how: Accumulation) -> tuple[Kernel, ...]:
        """The gradients of all weights, added to what is accumulated."""
        name, operands, gradients = (
            f"{self.name}.weight_gradient",
            self.formats.weight_gradient,
            recipe.weights.gradients,
        )
        shape = MatmulShape(self.outputs, self.inputs, self.rows, self.experts, Operands.TN)
        if how is Accumulation.FUSED:
            return self._kernels(name, operands, replace(shape, accumulated=gradients), 2 * gradients.bytes)
        sizes, made = (self.experts * self.outputs, self.inputs), recipe.activations
        summed = accumulate(f"{self.name}.accumulate", sizes, made=made, accumulated=gradients, how=how)
        return (*self._kernels(name, operands, shape, made.bytes), *summed)

    def _kernels(self, name: str, dtype: DType, shape: MatmulShape, result: Bytes) -> tuple[Kernel, ...]:
        """The kernel for the products of all experts, or one for each; of one expert, a library's like any other."""
        flops = 2.0 * self.tokens * self.inputs * self.outputs  # of whole tokens, however they are rounded
        kind = _KINDS.get(self.grouping)
        if kind is None or (self.experts == 1 and self.grouping is Grouping.STREAMS):
            each = replace(product(name, dtype, replace(shape, batch=1), result=result), flops=flops / self.experts)
            return (each,) * self.experts
        return (replace(product(name, dtype, shape, result=result), kind=kind, flops=flops),)
