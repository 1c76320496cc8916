"""Which operators is latent attention (MLA) made of on one rank?

Down projections make the latent vectors of a token, and the one rotary key of all heads; each is normalised. Up
projections make queries, keys and values of the heads from them. Tensor parallelism splits the up projections by heads
and runs the down projections whole on every rank, on its part of the sequence under sequence parallelism: so what comes
into a sharded region is a latent vector, not the residual stream (Megatron-LM, megatron/core/transformer/
multi_latent_attention.py, whose down projections are `duplicated`). Rotary positions turn a part of each query; the
heads' keys are written with the rotary key beside the rest, and the values apart, in one kernel where it is fused
(`fused_apply_mla_rope_for_kv`); written out, queries, keys and values are copied once more each.

What is kept: the down projections' input once, the latent vectors before and behind their norms, the queries, the
keys and the values, and the output projection's input.
Reference: DeepSeek-AI 2024, arXiv:2405.04434, section 2.1; arXiv:2412.19437, section 2.1.1.
"""

from dataclasses import replace

from clustersim.model.attention import AttentionCore, attention_operators
from clustersim.model.kernels import AttentionShape, Kernel, KernelKind, MemoryBoundOp, MemoryBoundShape
from clustersim.model.layer_stack import LatentAttention
from clustersim.model.linear import LinearLayer
from clustersim.model.operators import Operator, ParallelRegion, RegionInput
from clustersim.model.recompute_modules import ModuleMembership, RecomputeModule
from clustersim.model.sharded_layer import (
    RankContext,
    gradient_sum_kernel,
    linear_operator,
    memory_bound_operator,
    model_norm_spec,
)


def mla_operators(rank: RankContext, attention: LatentAttention) -> list[Operator]:
    """The operators of latent attention between its norm and the sum with the residual stream."""
    return [
        *_latent_operators(rank, attention),
        *_head_operators(rank, attention),
        *_core_operators(rank, attention),
        _output_operator(rank, attention),
    ]


def _latent_operators(rank: RankContext, attention: LatentAttention) -> list[Operator]:
    """The latent vectors of queries, if they have one, and of keys and values, each with its norm."""
    kv_down = _down_projection(rank, "attention.kv_down", attention.kv_rank + attention.rope)
    shared_bytes = rank.shared_input_bytes(rank.residual_elements)  # what makes the queries keeps it, too
    kv_down = replace(
        kv_down,
        saved_bytes=kv_down.saved_bytes - shared_bytes,
        deferred_wgrad_bytes=kv_down.deferred_wgrad_bytes - shared_bytes,
        wgrad_input_bytes=kv_down.wgrad_input_bytes - shared_bytes,
    )
    kv_down = replace(kv_down, input_gradient=(*kv_down.input_gradient, gradient_sum_kernel(rank, "attention.kv_down")))
    keys_values = [kv_down, _latent_norm(rank, "attention.kv_norm", attention.kv_rank)]
    if attention.query_rank is None:
        return keys_values
    queries = _down_projection(rank, "attention.query_down", attention.query_rank)
    return [queries, _latent_norm(rank, "attention.query_norm", attention.query_rank), *keys_values]


def _head_operators(rank: RankContext, attention: LatentAttention) -> list[Operator]:
    """Queries, keys and values of this rank's heads, with their rotary positions."""
    tp = rank.shard.tp
    queries = _query_operator(rank, attention)
    keys_values = _up_projection(rank, "attention.kv_up", attention.kv_rank, attention.kv_width // tp)
    full_bytes = _full_bytes(rank, attention.kv_rank + attention.rope)  # the rotary key comes into the region, too
    saved_bytes = (
        rank.shard.tokens
        * (attention.query_width + attention.heads * (attention.head_dim + attention.value_dim))
        // tp
        * rank.dtype.bytes
    )
    rotary = replace(_rotary_operator(rank, attention), saved_bytes=float(saved_bytes))
    return [queries, replace(keys_values, region_input=RegionInput.OTHER, region_input_bytes=full_bytes), rotary]


def _query_operator(rank: RankContext, attention: LatentAttention) -> Operator:
    """Queries of this rank's heads, from their latent vector or from the input itself."""
    name, width = "attention.query_up", attention.query_width // rank.shard.tp
    if attention.query_rank is not None:
        return _up_projection(rank, name, attention.query_rank, width)
    operator = linear_operator(rank, _up_linear(rank, name, rank.model.hidden, width), _saved_input_bytes(rank))
    return replace(
        operator,
        linear=None,
        memberships=(ModuleMembership(RecomputeModule.MLA_UP_PROJECTION, operator.wgrad_input_bytes),),
        reads_module=RecomputeModule.LAYERNORM,
    )


def _rotary_operator(rank: RankContext, attention: LatentAttention) -> Operator:
    """Turn a part of each query in place; write keys with the rotary key, and values apart."""
    tokens, heads = rank.shard.tokens, attention.heads // rank.shard.tp
    rotated_elements = 2 * heads * attention.rope
    written_elements = (
        heads * (attention.nope + attention.value_dim)
        + attention.rope
        + heads * (attention.head_dim + attention.value_dim)
    )
    shape = MemoryBoundShape(
        MemoryBoundOp.ROTARY, tokens * heads, attention.rope, fused=rank.training.fused, table=rank.shard.sequence
    )
    copied_elements = 0 if rank.training.fused else 2 * heads * (2 * attention.head_dim + attention.value_dim)
    moved_bytes = float(tokens * (rotated_elements + written_elements + copied_elements) * rank.dtype.bytes)
    launches = 2 if rank.training.fused else 8
    forward = Kernel("attention.rotary", KernelKind.ROTARY, rank.dtype, 0.0, moved_bytes, shape, launches)
    backward = replace(forward, name="attention.rotary.input_gradient", shape=replace(shape, backward=True))
    return Operator(
        "attention.rotary",
        ParallelRegion.SHARDED,
        (forward,),
        (backward,),
        memberships=(ModuleMembership(RecomputeModule.MLA_UP_PROJECTION),),
    )


def _core_operators(rank: RankContext, attention: LatentAttention) -> tuple[Operator, ...]:
    shard, heads = rank.shard, attention.heads // rank.shard.tp
    shape = AttentionShape(
        *(shard.batch, shard.sequence, shard.keys, heads, heads, attention.head_dim),
        causal=True,
        value_dim=attention.value_dim,
    )
    training = rank.training
    core = AttentionCore(
        *(shape, rank.dtype, rank.model.dropout, training.fused),
        overheads=training.overheads,
        low_precision=training.recipe.attention,
    )
    return attention_operators(core, rank.training.attention)


def _output_operator(rank: RankContext, attention: LatentAttention) -> Operator:
    tokens, width = rank.shard.tokens, attention.heads * attention.value_dim // rank.shard.tp
    out = LinearLayer("attention.out", tokens, width, rank.model.hidden, rank.matmul_formats, row_parallel=True)
    return linear_operator(rank, out, rank.saved_input_bytes(tokens * width))


def _down_projection(rank: RankContext, name: str, outputs: int) -> Operator:
    """A product on the rank's own tokens, whole on every tensor-parallel rank."""
    linear = LinearLayer(name, rank.shard.residual_tokens, rank.model.hidden, outputs, rank.matmul_formats)
    return replace(
        linear_operator(rank, linear, _saved_input_bytes(rank)), region=ParallelRegion.REPLICATED, linear=None
    )


def _up_projection(rank: RankContext, name: str, inputs: int, outputs: int) -> Operator:
    """A product by heads, of a latent vector that comes into the sharded region."""
    input_bytes = rank.saved_input_bytes(rank.shard.residual_tokens * inputs)
    after_norm = rank.training.overheads.norm_in_linear
    operator = linear_operator(rank, _up_linear(rank, name, inputs, outputs), input_bytes, after_norm=after_norm)
    module_input_bytes = 0.0 if after_norm else input_bytes
    return replace(
        operator,
        linear=None,
        region_input_bytes=_full_bytes(rank, inputs),
        memberships=(ModuleMembership(RecomputeModule.MLA_UP_PROJECTION, module_input_bytes),),
    )


def _up_linear(rank: RankContext, name: str, inputs: int, outputs: int) -> LinearLayer:
    return LinearLayer(name, rank.shard.tokens, inputs, outputs, rank.matmul_formats)


def _latent_norm(rank: RankContext, name: str, width: int) -> Operator:
    """The norm of a latent vector, which is of the up projections' module where it is within their linear layers."""
    spec = model_norm_spec(rank)
    operator = memory_bound_operator(
        ParallelRegion.REPLICATED, name, rank.dtype, spec, (spec.shape_for(rank.shard.residual_tokens, width),)
    )
    if rank.training.overheads.norm_in_linear:
        module_input_bytes = float(rank.shard.residual_tokens * width * rank.dtype.bytes)
        operator = replace(
            operator, memberships=(ModuleMembership(RecomputeModule.MLA_UP_PROJECTION, module_input_bytes),)
        )
    return replace(operator, parameter_count=width)


def _saved_input_bytes(rank: RankContext) -> float:
    """Bytes of the input as backward reads it."""
    return float(rank.saved_input_bytes(rank.residual_elements))


def _full_bytes(rank: RankContext, width: int) -> float:
    """Bytes of all tokens' rows of so many elements, whole over tensor-parallel ranks."""
    return float(rank.shard.tokens * width * rank.dtype.bytes)
