"""Operators of one use of a block that several layers share, on one rank.

Tensor parallelism splits the block as it does any attention and MLP, adapters by their outputs: the first matrix of an
adapter is on every rank, and gradients of its result are summed. Every rank holds the matrix behind the block.

Only the first use counts the block's parameters (later ones say how many they use again): backward reaches it last,
so gradients are complete there. Gradients of the other uses are added to, also where there is one microbatch.
"""

from dataclasses import replace

from clustersim.model import memory_bound
from clustersim.model.layer_stack import DenseMlp, MlpType
from clustersim.model.linear import LinearLayer
from clustersim.model.mixers.full_attention import full_attention_operators
from clustersim.model.mlp import mlp_operators
from clustersim.model.operators import (
    Operator,
    ParallelRegion,
    TpCollective,
    TpCollectives,
    TpCombine,
    assign_module,
    join_operators,
)
from clustersim.model.overheads import Accumulation
from clustersim.model.recompute_modules import RecomputeModule
from clustersim.model.sharded_layer import (
    RankContext,
    gradient_sum_kernel,
    linear_operator,
    norm_operator,
    replicated_linear,
    residual_add_operator,
)
from clustersim.model.shared_block_spec import SharedBlock
from clustersim.model.training import FusedKernel


def shared_block_operators(rank: RankContext, block: SharedBlock, *, after_norm: bool) -> list[Operator]:
    """The operators from the residual stream to the sum that the layer's other mixer reads; after_norm: not used."""
    del after_norm
    adding = _adding_rank(rank)
    wide = replace(adding, model=replace(rank.model, hidden=2 * rank.model.hidden))
    shared = [
        norm_operator(wide, "shared.norm", forks=False),
        *_attention_operators(adding, wide, block),
        norm_operator(adding, "shared.mlp.norm", forks=False),
        *_mlp_operators(adding, block),
    ]
    used = shared if block.holds_weights else [_reuse_weights(operator) for operator in shared]
    return [_concat_operator(rank), *used, _output_operator(rank), residual_add_operator(rank, "shared.add")]


def _adding_rank(rank: RankContext) -> RankContext:
    """The rank whose weight gradients are added to others', as those of several uses are."""
    if rank.training.accumulation is not Accumulation.ASSIGNED:
        return rank
    overheads = replace(rank.training.overheads, accumulation=Accumulation.ADDED)
    return replace(rank, training=replace(rank.training, overheads=overheads))


def _reuse_weights(operator: Operator) -> Operator:
    """An operator whose weights an earlier layer holds; adapters are its own."""
    if operator.name.endswith(("adapter_a", "adapter_b")):
        return operator
    return replace(
        operator,
        parameter_count=0,
        reused_parameters=operator.parameter_count,
        matrices=(),
        cached_cast_elements=0,
    )


def _concat_operator(rank: RankContext) -> Operator:
    """The residual stream next to the embedding; backward adds the gradients of both to what they have."""
    elements = 2 * rank.residual_elements
    forward = memory_bound.copy_kernel("shared.concat", rank.dtype, elements)
    backward = (gradient_sum_kernel(rank, "shared.concat"), gradient_sum_kernel(rank, "shared.embedding"))
    return Operator("shared.concat", ParallelRegion.REPLICATED, (forward,), backward)


def _attention_operators(rank: RankContext, wide: RankContext, block: SharedBlock) -> list[Operator]:
    """Attention whose input is twice as wide as the residual stream, and whose output is as wide."""
    (qkv, *inner) = full_attention_operators(wide, block.attention, after_norm=False)[:-1]
    out = full_attention_operators(rank, block.attention, after_norm=False)[-1]
    input_bytes = float(rank.shard.tokens * wide.model.hidden * rank.dtype.bytes)
    adapters = _adapters(rank, "attention.qkv", wide.model.hidden, block) if block.adapts_attention else []
    return [replace(qkv, region_input_bytes=input_bytes), *adapters, *inner, out]


def _mlp_operators(rank: RankContext, block: SharedBlock) -> list[Operator]:
    up, *others = mlp_operators(rank, DenseMlp(block.ffn, MlpType.SWIGLU), "shared.mlp")
    adapters = _adapters(rank, "shared.mlp.up", rank.model.hidden, block)
    return assign_module([up, *adapters, *others], RecomputeModule.MLP, rank.residual_bytes)


def _adapters(rank: RankContext, name: str, inputs: int, block: SharedBlock) -> list[Operator]:
    """Both matrices of the adapters next to a matrix, whose input the first one reads, too, and the sum."""
    tp, tokens = rank.shard.tp, rank.shard.tokens
    widths = block.attention_projections if name == "attention.qkv" else (2 * block.ffn,)
    first = [LinearLayer(f"{name}.adapter_a", tokens, inputs, block.adapter_rank, rank.matmul_formats) for _ in widths]
    second = [
        LinearLayer(f"{name}.adapter_b", tokens, block.adapter_rank, width // tp, rank.matmul_formats)
        for width in widths
    ]
    rank_bytes = float(tokens * block.adapter_rank * rank.dtype.bytes)
    first_operators = [linear_operator(rank, linear, 0.0) for linear in first]
    second_operators = [linear_operator(rank, linear, rank_bytes) for linear in second]
    a, b = (join_operators(operators, operators[0]) for operators in (first_operators, second_operators))
    spec = memory_bound.residual_spec(dropout=False, fused=rank.training.fuses(FusedKernel.RESIDUAL))
    sums = (spec.forward_kernel(f"{name}.adapter_sum", rank.dtype, spec.shape_for(tokens, w // tp)) for w in widths)
    gradient = memory_bound.GRADIENT_SUM
    input_sum = gradient.forward_kernel(f"{name}.gradient_sum", rank.dtype, gradient.shape_for(tokens, inputs))
    summed = TpCollective(TpCombine.SUM, len(widths) * rank_bytes)
    return [
        replace(a, input_gradient=(*a.input_gradient, *len(widths) * [input_sum])),
        replace(
            b,
            forward=(*b.forward, *sums),
            tp_collectives=TpCollectives(after_input_gradient=(summed,) if tp > 1 else ()),
        ),
    ]


def _output_operator(rank: RankContext) -> Operator:
    """The matrix of the layer's own behind the block."""
    sizes = rank.shard.residual_tokens, rank.model.hidden, rank.model.hidden
    linear = replace(replicated_linear(rank, "shared.out", sizes, bias=False), formats=rank.matmul_formats)
    return linear_operator(rank, linear, rank.saved_input_bytes(rank.residual_elements), is_replicated=True)
