"""Which matrices does an operator have, for optimizers that are not elementwise?

A matrix [outputs, inputs] as one rank holds it. Fused projections (queries, keys and values; gate and up) are
matrices of their own, as in the models that were trained with Muon; Megatron-LM splits queries, keys and values alone
(`orthogonalize` in megatron/core/optimizer/emerging_optimizers.py), so that gate and up are one matrix twice as wide
there (`Overheads.joins_gate`). Tensor-parallel ranks share the outputs of column-parallel layers and the inputs of
row-parallel ones.
"""

from dataclasses import dataclass, replace

from clustersim.model.linear import LinearLayer
from clustersim.model.lora import Projection


@dataclass(frozen=True, slots=True, order=True)
class WeightMatrix:
    """A matrix [outputs, inputs] on one rank, of which there are `count` equal ones.

    shares_inputs: tensor-parallel ranks share its inputs, else its outputs.
    """

    outputs: int
    inputs: int
    count: int = 1
    shares_inputs: bool = False

    @property
    def elements(self) -> int:
        """Elements of one of the matrices."""
        return self.outputs * self.inputs

    @property
    def single(self) -> "WeightMatrix":
        """One of the matrices."""
        return replace(self, count=1)

    def gathered(self, ranks: int) -> "WeightMatrix":
        """The matrix that `ranks` tensor-parallel ranks share."""
        if self.shares_inputs:
            return replace(self, inputs=self.inputs * ranks)
        return replace(self, outputs=self.outputs * ranks)


def linear_matrices(linear: LinearLayer, *, joins_gate: bool) -> tuple[WeightMatrix, ...]:
    """The matrices of a linear layer. joins_gate: gate and up are one."""
    is_joined = joins_gate and any(projection is Projection.GATE for projection, _ in linear.projections)
    widths = [linear.outputs] if is_joined else [width for _, width in linear.projections] or [linear.outputs]
    return tuple(WeightMatrix(width, linear.inputs, shares_inputs=linear.row_parallel) for width in widths)
