"""Operators of a dense MLP on one rank.

The first matrix (with a gate, the first two as one matmul) is column-parallel, the last row-parallel,
with the activation between them.
"""

from dataclasses import replace

from clustersim.model import memory_bound
from clustersim.model.kernels import KernelKind, MatmulShape, MemoryBoundShape
from clustersim.model.layer_stack import DenseMlp, MlpType
from clustersim.model.linear import LinearLayer
from clustersim.model.lora import Projection
from clustersim.model.operators import Operator, ParallelRegion
from clustersim.model.quantization import recast_kernel
from clustersim.model.sharded_layer import RankContext, linear_operator, memory_bound_operator
from clustersim.model.training import FusedKernel, SelectiveOpRecompute


def mlp_operators(rank: RankContext, spec: DenseMlp, name: str = "mlp", *, after_norm: bool = False) -> list[Operator]:
    """The operators of a dense MLP, whose names start with `name`.

    after_norm: a norm is fused into its first linear layer.
    """
    shard, ffn = rank.shard, spec.ffn // rank.shard.tp
    activation = memory_bound.activation_spec(spec.form, fused=rank.training.fuses(FusedKernel.ACTIVATION))
    shapes = (activation.shape_for(shard.tokens, ffn),)
    operator = memory_bound_operator(ParallelRegion.SHARDED, f"{name}.activation", rank.dtype, activation, shapes)
    if rank.training.overheads.activation_in_place:
        operator = replace(operator, overwritten_bytes=operator.saved_bytes)
    return [
        _up_projection(rank, spec.form, ffn, name, after_norm=after_norm),
        operator,
        _down_projection(rank, spec.form, ffn, name),
    ]


def _up_projection(rank: RankContext, form: MlpType, ffn: int, name: str, *, after_norm: bool) -> Operator:
    """The fifth matmul of a layer; with a gate, also the sixth, fused with it."""
    gated, tokens = form is MlpType.SWIGLU, rank.shard.tokens
    bias_tokens = tokens if rank.model.linear_bias else 0
    projections = (*(((Projection.GATE, ffn),) if gated else ()), (Projection.UP, ffn))
    up = LinearLayer(
        f"{name}.up",
        tokens,
        rank.model.hidden,
        2 * ffn if gated else ffn,
        rank.matmul_formats,
        bias_tokens,
        projections,
    )
    operator = linear_operator(rank, up, rank.saved_input_bytes(rank.residual_elements), after_norm=after_norm)
    operator = recompute_alternate(rank, operator, replace(up, outputs=ffn if gated else 0, bias_tokens=0))
    if not (bias_tokens and rank.training.overheads.activation_bias_adds):
        return operator
    bias = memory_bound.BIAS_ADD.shape_for(tokens, up.outputs)
    kernel = memory_bound.BIAS_ADD.forward_kernel(f"{name}.up.bias", rank.dtype, bias)
    return replace(operator, forward=(*operator.forward, kernel))


def _down_projection(rank: RankContext, form: MlpType, ffn: int, name: str) -> Operator:
    """The last matmul of a layer: the seventh with a gate, else the sixth."""
    tokens = rank.shard.tokens
    bias_tokens = rank.shard.residual_tokens if rank.model.linear_bias else 0
    projections = ((Projection.DOWN, rank.model.hidden),)
    down = LinearLayer(
        f"{name}.down", tokens, ffn, rank.model.hidden, rank.matmul_formats, bias_tokens, projections, True
    )
    operator = linear_operator(rank, down, rank.saved_input_bytes(tokens * ffn))
    is_saved = form is MlpType.SWIGLU
    return recompute_alternate(rank, operator, replace(down, outputs=0 if is_saved else down.outputs, bias_tokens=0))


def recompute_alternate(rank: RankContext, operator: Operator, recomputed: LinearLayer) -> Operator:
    """A linear layer under SelectiveOpRecompute, which recomputes every second matmul of a layer.

    recomputed: the slice of its outputs that is recomputed (0 outputs: none, also where backward does not read
    them); the other outputs are saved. Low-precision matmuls are all recomputed if the recipe says so
    (`recomputes_all_matmuls`); casts of saved matmuls are run again where they are not compiled, but for the largest
    elements, which are saved.
    """
    recipe, shape = rank.training.recipe, operator.forward[-1].shape
    outputs = shape.n if isinstance(shape, MatmulShape) else 0
    casts = tuple(kernel for kernel in operator.forward if kernel.kind is KernelKind.CAST)
    is_eager = recipe.casts is not None and recipe.casts.eager
    if casts and recipe.recomputes_all_matmuls:
        return replace(
            operator,
            recompute_override=None if recomputed.outputs else casts,
            saved_output_bytes=0.0,
            saves_outputs=isinstance(rank.training.recompute, SelectiveOpRecompute),
        )
    matmuls = recomputed.forward(recipe) if recomputed.outputs else ()
    saved_elements = recomputed.tokens * (outputs - recomputed.outputs)
    if is_eager:
        absolutes_saved = rank.training.overheads.saves_absolute_values
        shapes = (cast.shape for cast in casts if absolutes_saved)
        saved_elements += sum(shape.elements for shape in shapes if isinstance(shape, MemoryBoundShape))
        casts = tuple(recast_kernel(cast, absolutes_saved=absolutes_saved) for cast in casts)
    return replace(
        operator,
        recompute_override=(*casts, *matmuls) if matmuls or is_eager else (),
        saved_output_bytes=float(saved_elements * rank.dtype.bytes),
        saves_outputs=bool(casts) and is_eager and isinstance(rank.training.recompute, SelectiveOpRecompute),
    )
