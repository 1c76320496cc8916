"""What do a layer's operators have in common on one rank: linear layers, streaming kernels, norms, sums?

The bricks of which `layers` and `routed` make a layer's branches.
"""

from dataclasses import dataclass, replace

from clustersim.common.dtypes import DType
from clustersim.common.units import Bytes
from clustersim.model import memory_bound
from clustersim.model.kernels import Kernel, MemoryBoundShape
from clustersim.model.linear import LinearLayer
from clustersim.model.memory_bound import MemoryBoundSpec
from clustersim.model.operators import LayerShard, Operator, ParallelRegion
from clustersim.model.precision_recipe import MatmulFormats
from clustersim.model.quantization import LinearOperands, linear_casts
from clustersim.model.training import Training
from clustersim.model.transformer import Norm, TransformerModel, norm_parameter_count


@dataclass(frozen=True, slots=True)
class RankContext:
    """A model's dimensions on one rank."""

    model: TransformerModel
    training: Training
    shard: LayerShard

    @property
    def dtype(self) -> DType:
        """Format of activations."""
        return self.training.recipe.activations

    @property
    def matmul_formats(self) -> MatmulFormats:
        """Formats of the operands of products."""
        return self.training.recipe.matmul_formats

    def saved_input_bytes(self, elements: int) -> Bytes:
        """Bytes of a linear layer's input as backward reads it."""
        return elements * self.training.recipe.saved_input_format.bytes

    def deferred_gradient_dtype(self, formats: MatmulFormats) -> DType:
        """The format in which the gradient of a linear layer's output waits for the weights' gradient."""
        return self.dtype if self.training.recipe.casts is None else formats.weight_gradient

    def shared_input_bytes(self, elements: int) -> Bytes:
        """Bytes of an input that several linear layers save once; each saves a copy of its own that it has cast."""
        return 0.0 if self.training.recipe.casts_inputs else self.saved_input_bytes(elements)

    @property
    def vocab_rows(self) -> int:
        """Rows of the vocabulary on this rank."""
        return self.shard.vocab_rows(self.model.vocab)

    @property
    def residual_elements(self) -> int:
        """Elements of the residual stream on this rank."""
        return self.shard.residual_tokens * self.model.hidden

    @property
    def residual_bytes(self) -> Bytes:
        """Bytes of the residual stream on this rank."""
        return float(self.residual_elements * self.dtype.bytes)


def linear_operator(
    rank: RankContext, linear: LinearLayer, input_bytes: Bytes, *, after_norm: bool = False
) -> Operator:
    """A linear layer that keeps its input, of so many bytes. behind_norm: which a norm in the same layer makes."""
    recipe = rank.training.recipe
    operands = LinearOperands.from_linear(linear, rank.shard.residual_tokens, after_norm=after_norm)
    casts = linear_casts(recipe, linear.formats, operands)
    return Operator(
        linear.name,
        ParallelRegion.SHARDED,
        (*casts.forward, *linear.forward(recipe)),
        (*casts.backward, *linear.input_gradient(recipe)),
        (*casts.weight_gradient, *linear.weight_gradient(recipe, rank.training.accumulation)),
        parameter_count=linear.parameter_count,
        saved_bytes=float(input_bytes),
        deferred_wgrad_bytes=float(
            input_bytes + linear.tokens * linear.outputs * rank.deferred_gradient_dtype(linear.formats).bytes
        ),
        linear=linear,
        wgrad_input_bytes=float(input_bytes),
        cached_cast_elements=casts.cached_weight_elements,
    )


def memory_bound_operator(
    region: ParallelRegion, name: str, dtype: DType, spec: MemoryBoundSpec, shapes: tuple[MemoryBoundShape, ...]
) -> Operator:
    """An operator that streams over some shapes, one kernel for each."""
    return Operator(
        name,
        region,
        tuple(spec.forward_kernel(name, dtype, shape) for shape in shapes),
        tuple(kernel for shape in shapes for kernel in spec.backward_kernels(name, dtype, shape)),
        saved_bytes=sum(spec.saved.bytes(dtype, shape.elements) for shape in shapes),
        saves_outputs=spec.saves_outputs,
    )


def residual_stream_operator(rank: RankContext, name: str, spec: MemoryBoundSpec) -> Operator:
    """An operator that streams over the residual stream."""
    shape = spec.shape_for(rank.shard.residual_tokens, rank.model.hidden)
    return memory_bound_operator(ParallelRegion.REPLICATED, name, rank.dtype, spec, (shape,))


def residual_add_operator(rank: RankContext, name: str) -> Operator:
    """The sum of a branch with the residual stream."""
    spec = memory_bound.residual_spec(dropout=rank.model.dropout, fused=rank.training.fused)
    return residual_stream_operator(rank, name, spec)


def norm_operator(rank: RankContext, name: str, *, forks: bool = True) -> Operator:
    """A norm; where the residual forks before it, backward ends with the sum of both gradients."""
    operator = residual_stream_operator(rank, name, model_norm_spec(rank))
    backward = operator.input_gradient + ((gradient_sum_kernel(rank, name),) if forks else ())
    return replace(operator, input_gradient=backward, parameter_count=norm_parameter_count(rank.model))


def model_norm_spec(rank: RankContext) -> MemoryBoundSpec:
    """The passes of the model's norms."""
    has_second_pass = rank.training.overheads.norm_twice and rank.model.norm is Norm.LAYERNORM
    return memory_bound.norm_spec(rank.model.norm, fused=rank.training.fused and not has_second_pass)


def residual_fork_operator(rank: RankContext, name: str) -> Operator:
    """Where the residual forks and no norm follows: backward sums both gradients."""
    return Operator(name, ParallelRegion.REPLICATED, (), (gradient_sum_kernel(rank, name),))


def gradient_sum_kernel(rank: RankContext, name: str) -> Kernel:
    """The sum of the gradients of two branches."""
    spec = memory_bound.GRADIENT_SUM
    shape = spec.shape_for(rank.shard.residual_tokens, rank.model.hidden)
    return spec.forward_kernel(f"{name}.gradient_sum", rank.dtype, shape)
