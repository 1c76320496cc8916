"""What do a layer's operators have in common on one rank: linear layers, streaming kernels, norms, sums?

The bricks of which `layers` and `routed` make a layer's branches.
"""

from dataclasses import dataclass, replace

from clustersim.common.dtypes import DType
from clustersim.common.units import Bytes
from clustersim.model import memory_bound
from clustersim.model.kernels import Kernel, StreamShape
from clustersim.model.linear import Linear
from clustersim.model.memory_bound import Streaming
from clustersim.model.operators import Operator, Region, Shard
from clustersim.model.precision_recipe import Products
from clustersim.model.quantization import Operands, linear_casts
from clustersim.model.training import Training
from clustersim.model.transformer import Model, Norm, norm_parameters


@dataclass(frozen=True, slots=True)
class OnRank:
    """A model's dimensions on one rank."""

    model: Model
    training: Training
    shard: Shard

    @property
    def dtype(self) -> DType:
        """Format of activations."""
        return self.training.recipe.activations

    @property
    def products(self) -> Products:
        """Formats of the operands of products."""
        return self.training.recipe.products

    def saved(self, elements: int) -> Bytes:
        """Bytes of a linear layer's input as backward reads it."""
        return elements * self.training.recipe.saved.bytes

    def waits(self, products: Products) -> DType:
        """The format in which the gradient of a linear layer's output waits for the weights' gradient."""
        return self.dtype if self.training.recipe.casts is None else products.weight_gradient

    def shared(self, elements: int) -> Bytes:
        """Bytes of an input that several linear layers save once; each saves a copy of its own that it has cast."""
        return 0.0 if self.training.recipe.casts_inputs else self.saved(elements)

    @property
    def vocab(self) -> int:
        """Rows of the vocabulary on this rank."""
        return self.shard.rows(self.model.vocab)

    @property
    def residual(self) -> int:
        """Elements of the residual stream on this rank."""
        return self.shard.residual_tokens * self.model.hidden

    @property
    def input_bytes(self) -> Bytes:
        """Bytes of the residual stream on this rank."""
        return float(self.residual * self.dtype.bytes)


def linear_operator(rank: OnRank, linear: Linear, read: Bytes, *, behind_norm: bool = False) -> Operator:
    """A linear layer that keeps its input, of so many bytes. behind_norm: which a norm in the same layer makes."""
    recipe = rank.training.recipe
    operands = Operands.of(linear, rank.shard.residual_tokens, behind_norm=behind_norm)
    casts = linear_casts(recipe, linear.formats, operands)
    return Operator(
        linear.name,
        Region.SHARDED,
        (*casts.forward, *linear.forward(recipe)),
        (*casts.backward, *linear.input_gradient(recipe)),
        (*casts.weight_gradient, *linear.weight_gradient(recipe, rank.training.accumulation)),
        parameters=linear.parameters,
        kept=float(read),
        waiting=float(read + linear.tokens * linear.outputs * rank.waits(linear.formats).bytes),
        linear=linear,
        read=float(read),
        cast=casts.weights,
    )


def streamed(region: Region, name: str, dtype: DType, over: Streaming, shapes: tuple[StreamShape, ...]) -> Operator:
    """An operator that streams over some shapes, one kernel for each."""
    return Operator(
        name,
        region,
        tuple(over.forward_kernel(name, dtype, shape) for shape in shapes),
        tuple(kernel for shape in shapes for kernel in over.backward_kernels(name, dtype, shape)),
        kept=sum(over.kept.bytes(dtype, shape.elements) for shape in shapes),
        saves_late=over.saves_late,
    )


def residual_wide(rank: OnRank, name: str, over: Streaming) -> Operator:
    """An operator that streams over the residual stream."""
    shape = over.over(rank.shard.residual_tokens, rank.model.hidden)
    return streamed(Region.REPLICATED, name, rank.dtype, over, (shape,))


def residual_sum(rank: OnRank, name: str) -> Operator:
    """The sum of a branch with the residual stream."""
    over = memory_bound.residual(dropout=rank.model.dropout, fused=rank.training.fused)
    return residual_wide(rank, name, over)


def norm_operator(rank: OnRank, name: str, *, forks: bool = True) -> Operator:
    """A norm; where the residual forks before it, backward ends with the sum of both gradients."""
    made = residual_wide(rank, name, normed(rank))
    backward = made.input_gradient + ((gradient_sum(rank, name),) if forks else ())
    return replace(made, input_gradient=backward, parameters=norm_parameters(rank.model))


def normed(rank: OnRank) -> Streaming:
    """The passes of the model's norms."""
    twice = rank.training.overheads.norm_twice and rank.model.norm is Norm.LAYERNORM
    return memory_bound.norm(rank.model.norm, fused=rank.training.fused and not twice)


def fork(rank: OnRank, name: str) -> Operator:
    """Where the residual forks and no norm follows: backward sums both gradients."""
    return Operator(name, Region.REPLICATED, (), (gradient_sum(rank, name),))


def gradient_sum(rank: OnRank, name: str) -> Kernel:
    """The sum of the gradients of two branches."""
    summed = memory_bound.GRADIENT_SUM
    shape = summed.over(rank.shard.residual_tokens, rank.model.hidden)
    return summed.forward_kernel(f"{name}.gradient_sum", rank.dtype, shape)
