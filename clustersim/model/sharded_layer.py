"""Building blocks of a layer's operators on one rank: linear layers, norms, residual adds and others."""

from collections.abc import Iterable
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
from clustersim.model.shape_padding import PaddingCopies, padded_linear, padding_copies
from clustersim.model.training import FusedKernel, NoRecompute, Training
from clustersim.model.transformer import Norm, TransformerModel, norm_parameter_count
from clustersim.model.weight_matrices import linear_matrices


@dataclass(frozen=True, slots=True)
class RankContext:
    """Model, training settings and shard of one rank, and the dimensions that follow from them."""

    model: TransformerModel
    training: Training
    shard: LayerShard

    @property
    def dtype(self) -> DType:
        """Activation format."""
        return self.training.recipe.activations

    @property
    def matmul_formats(self) -> MatmulFormats:
        """Operand formats of matmuls."""
        return self.training.recipe.matmul_formats

    def saved_input_bytes(self, elements: int) -> Bytes:
        """Bytes of a linear layer's input as saved for backward."""
        is_recomputed = not isinstance(self.training.recompute, NoRecompute)
        return elements * self.training.recipe.saved_input_format(is_recomputed=is_recomputed).bytes

    def deferred_gradient_dtype(self, formats: MatmulFormats) -> DType:
        """Format in which a linear layer's output gradient is held until the (deferred) weight gradient."""
        return self.dtype if self.training.recipe.casts is None else formats.weight_gradient

    def shared_input_bytes(self, elements: int) -> Bytes:
        """Bytes of an input that several linear layers save once; 0 where each saves its own quantized copy."""
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
    def residual_dtype(self) -> DType:
        """Format of the residual stream and of norms."""
        return DType.FP32 if self.training.overheads.autocast else self.dtype

    @property
    def residual_bytes(self) -> Bytes:
        """Bytes of the residual stream on this rank."""
        return float(self.residual_elements * self.residual_dtype.bytes)

    def autocast_kernels(self, name: str, elements: int) -> tuple[Kernel, ...]:
        """The cast of elements between FP32 and the activation format, where the framework casts by operation."""
        if not self.training.overheads.autocast:
            return ()
        copy = memory_bound.copy_kernel(f"{name}.autocast", self.dtype, elements)
        return (replace(copy, bytes=float(elements * (DType.FP32.bytes + self.dtype.bytes))),)


def replicated_linear(rank: RankContext, name: str, sizes: tuple[int, int, int], *, bias: bool) -> LinearLayer:
    """A matrix that every tensor-parallel rank holds, in the activation format. sizes: tokens, inputs, outputs."""
    return LinearLayer(name, *sizes, MatmulFormats.uniform(rank.dtype), sizes[0] if bias else 0)


def linear_operator(
    rank: RankContext,
    linear: LinearLayer,
    input_bytes: Bytes,
    *,
    after_norm: bool = False,
    is_replicated: bool = False,
) -> Operator:
    """The operator of a linear layer that saves its input, of `input_bytes`.

    after_norm: a norm is fused into the layer; is_replicated: every tensor-parallel rank holds all of it.
    """
    recipe = rank.training.recipe
    operands = LinearOperands.from_linear(linear, rank.shard.residual_tokens, after_norm=after_norm)
    casts = linear_casts(recipe, linear.formats, operands)
    copies, matmuls = PaddingCopies(), linear
    if rank.training.overheads.shape_padding:
        copies, matmuls = padding_copies(linear, rank.dtype), padded_linear(linear, rank.dtype)
    return Operator(
        linear.name,
        ParallelRegion.REPLICATED if is_replicated else ParallelRegion.SHARDED,
        (
            *rank.autocast_kernels(linear.name, linear.parameter_count),
            *casts.forward,
            *copies.forward,
            *matmuls.forward(recipe),
        ),
        (*casts.backward, *copies.input_gradient, *matmuls.input_gradient(recipe), *casts.input_gradient_scaling),
        (
            *casts.weight_gradient,
            *copies.weight_gradient,
            *matmuls.weight_gradient(recipe, rank.training.accumulation),
            *casts.weight_gradient_scaling,
        ),
        parameter_count=linear.parameter_count,
        saved_bytes=float(input_bytes),
        deferred_wgrad_bytes=float(
            input_bytes + linear.tokens * linear.outputs * rank.deferred_gradient_dtype(linear.formats).bytes
        ),
        linear=linear,
        wgrad_input_bytes=float(input_bytes),
        cached_cast_elements=casts.cached_weight_elements,
        matrices=linear_matrices(linear, joins_gate=rank.training.overheads.joins_gate),
    )


def keep_gathered_inputs(rank: RankContext, operators: Iterable[Operator]) -> tuple[Operator, ...]:
    """Operators whose column-parallel layers save their inputs gathered, where the framework does so.

    An input that an earlier operator saves (`saved_bytes` without it) is not saved twice.
    """
    shard = rank.shard
    if not (rank.training.overheads.keeps_gathered_inputs and shard.sequence_parallel and shard.tp > 1):
        return tuple(operators)
    per_linear = rank.training.overheads.gathers_per_linear and not rank.training.fuses_casts
    return tuple(_with_gathered_input(operator, shard.tp, per_linear=per_linear) for operator in operators)


def _with_gathered_input(operator: Operator, tp: int, *, per_linear: bool) -> Operator:
    """per_linear: each of its linear layers saves a gathered input of its own."""
    if operator.region is not ParallelRegion.SHARDED or operator.linear is None or operator.linear.row_parallel:
        return operator
    copies = max(1, len(operator.linear.projections)) if per_linear else 1
    extra_bytes = (copies * tp - 1) * min(operator.wgrad_input_bytes, operator.saved_bytes)
    return replace(
        operator,
        saved_bytes=operator.saved_bytes + extra_bytes,
        deferred_wgrad_bytes=operator.deferred_wgrad_bytes + extra_bytes,
        wgrad_input_bytes=operator.wgrad_input_bytes + extra_bytes,
        saves_full_input=True,
    )


def memory_bound_operator(
    region: ParallelRegion, name: str, dtype: DType, spec: MemoryBoundSpec, shapes: tuple[MemoryBoundShape, ...]
) -> Operator:
    """A memory-bound operator over some shapes, one kernel per shape."""
    return Operator(
        name,
        region,
        tuple(spec.forward_kernel(name, dtype, shape) for shape in shapes),
        tuple(kernel for shape in shapes for kernel in spec.backward_kernels(name, dtype, shape)),
        saved_bytes=sum(spec.saved.bytes(dtype, shape.elements) for shape in shapes),
        saves_outputs=spec.saves_outputs,
    )


def residual_stream_operator(rank: RankContext, name: str, spec: MemoryBoundSpec) -> Operator:
    """A memory-bound operator over the residual stream."""
    shape = spec.shape_for(rank.shard.residual_tokens, rank.model.hidden)
    return memory_bound_operator(ParallelRegion.REPLICATED, name, rank.residual_dtype, spec, (shape,))


def residual_add_operator(rank: RankContext, name: str) -> Operator:
    """The residual add of a branch."""
    spec = memory_bound.residual_spec(dropout=rank.model.dropout, fused=rank.training.fuses(FusedKernel.RESIDUAL))
    return residual_stream_operator(rank, name, spec)


def norm_operator(rank: RankContext, name: str, *, forks: bool = True) -> Operator:
    """A norm. forks: the residual stream forks before it, so backward ends with the sum of both gradients."""
    operator = _with_casts(rank, residual_stream_operator(rank, name, model_norm_spec(rank)))
    gradient_sum = (gradient_sum_kernel(rank, name),) if forks else ()
    parameter_count = norm_parameter_count(rank.model)
    return replace(operator, input_gradient=(*operator.input_gradient, *gradient_sum), parameter_count=parameter_count)


def _with_casts(rank: RankContext, operator: Operator) -> Operator:
    """A norm with the casts of what the next matrix reads, and of its gradient, where the framework casts."""
    casts = rank.autocast_kernels(operator.name, rank.residual_elements)
    if not (casts and rank.training.fuses_casts):
        forward, backward = (*operator.forward, *casts), (*casts, *operator.input_gradient)
        return replace(operator, forward=forward, input_gradient=backward)
    saving = float(rank.residual_elements * (rank.residual_dtype.bytes - rank.dtype.bytes))  # narrow at that end
    narrow = [
        (replace(first, bytes=first.bytes - saving), *rest)
        for first, *rest in (operator.forward, operator.input_gradient)
    ]
    return replace(operator, forward=narrow[0], input_gradient=narrow[1])


def model_norm_spec(rank: RankContext) -> MemoryBoundSpec:
    """Memory passes of the model's norms."""
    has_second_pass = rank.training.overheads.norm_weight_grad_kernel and rank.model.norm is Norm.LAYERNORM
    is_fused = rank.training.fuses(FusedKernel.NORM) and not has_second_pass
    spec = memory_bound.norm_spec(rank.model.norm, fused=is_fused)
    return memory_bound.norm_of_fp32_copy(spec) if is_fused and rank.training.overheads.norm_fp32_copy else spec


def residual_fork_operator(rank: RankContext, name: str) -> Operator:
    """A residual fork that no norm follows: backward sums both gradients."""
    return Operator(name, ParallelRegion.REPLICATED, (), (gradient_sum_kernel(rank, name),))


def gradient_sum_kernel(rank: RankContext, name: str) -> Kernel:
    """The kernel that sums the gradients of two branches."""
    spec = memory_bound.GRADIENT_SUM
    shape = spec.shape_for(rank.shard.residual_tokens, rank.model.hidden)
    return spec.forward_kernel(f"{name}.gradient_sum", rank.residual_dtype, shape)
