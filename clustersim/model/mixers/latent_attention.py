"""Operators of multi-head latent attention (MLA) on one rank.

Down projections produce a token's latent vectors and the rotary key shared by all heads; each latent is
normalized. Up projections produce queries, keys and values of the heads from them. Tensor parallelism
splits the up projections by heads and replicates the down projections on every rank, on its part of the
sequence under sequence parallelism: so the input of the sharded region is a latent vector, not the
residual stream (Megatron-LM, megatron/core/transformer/ multi_latent_attention.py, whose down projections
are `duplicated`). Rotary positions are applied to a part of each query; the heads' keys are written
concatenated with the rotary key, and the values separately, in one kernel where it is fused
(`fused_apply_mla_rope_for_kv`); unfused, queries, keys and values are copied once more each.

Saved are the down projections' input once, the latent vectors before and after their norms, the queries,
the keys and the values, and the output projection's input. Reference: DeepSeek-AI 2024, arXiv:2405.04434,
section 2.1; arXiv:2412.19437, section 2.1.1.
"""

from dataclasses import replace

from clustersim.model.attention import AttentionCore
from clustersim.model.attention_context import core_operators
from clustersim.model.attention_spec import LatentAttention
from clustersim.model.kernels import AttentionShape, Kernel, KernelKind, MemoryBoundOp, MemoryBoundShape
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
from clustersim.model.training import FusedKernel


def latent_attention_operators(
    rank: RankContext,
    attention: LatentAttention,
    *,
    after_norm: bool,  # noqa: ARG001 - of the protocol
) -> list[Operator]:
    """The operators of MLA between its norm, which is never fused into them, and the residual add."""
    return [
        *latent_vector_operators(rank, attention),
        *head_operators(rank, attention),
        *latent_core_operators(rank, attention),
        output_operator(rank, attention),
    ]


def latent_vector_operators(rank: RankContext, attention: LatentAttention) -> list[Operator]:
    """Down projections and norms of the latent vectors: of queries, if they have one, and of keys and values."""
    kv_down = _down_projection(rank, "attention.kv_down", attention.kv_lora_rank + attention.qk_rope_head_dim)
    shared_bytes = rank.shared_input_bytes(rank.residual_elements)  # the query projection saves it, too
    kv_down = replace(
        kv_down,
        saved_bytes=kv_down.saved_bytes - shared_bytes,
        deferred_wgrad_bytes=kv_down.deferred_wgrad_bytes - shared_bytes,
        wgrad_input_bytes=kv_down.wgrad_input_bytes - shared_bytes,
    )
    kv_down = replace(kv_down, input_gradient=(*kv_down.input_gradient, gradient_sum_kernel(rank, "attention.kv_down")))
    keys_values = [kv_down, _latent_norm(rank, "attention.kv_norm", attention.kv_lora_rank)]
    if attention.q_lora_rank is None:
        return keys_values
    queries = _down_projection(rank, "attention.query_down", attention.q_lora_rank)
    return [queries, _latent_norm(rank, "attention.query_norm", attention.q_lora_rank), *keys_values]


def head_operators(rank: RankContext, attention: LatentAttention) -> list[Operator]:
    """Queries, keys and values of this rank's heads, with their rotary positions."""
    tp = rank.shard.tp
    queries = query_operator(rank, attention)
    keys_values = _up_projection(rank, "attention.kv_up", attention.kv_lora_rank, attention.up_width // tp)
    entering_bytes = full_bytes(
        rank, attention.kv_lora_rank + attention.qk_rope_head_dim
    )  # the rotary key enters the region, too
    saved_bytes = (
        rank.shard.tokens
        * (attention.query_width + attention.heads * (attention.head_dim + attention.v_head_dim))
        // tp
        * rank.dtype.bytes
    )
    rotary = replace(_rotary_operator(rank, attention), saved_bytes=float(saved_bytes))
    return [queries, replace(keys_values, region_input=RegionInput.OTHER, region_input_bytes=entering_bytes), rotary]


def query_operator(rank: RankContext, attention: LatentAttention) -> Operator:
    """Query projection of this rank's heads, from their latent vector or directly from the layer input."""
    name, width = "attention.query_up", attention.query_width // rank.shard.tp
    if attention.q_lora_rank is not None:
        return _up_projection(rank, name, attention.q_lora_rank, width)
    operator = linear_operator(rank, _up_linear(rank, name, rank.model.hidden, width), _saved_input_bytes(rank))
    return replace(
        operator,
        linear=None,
        memberships=(ModuleMembership(RecomputeModule.MLA_UP_PROJECTION, operator.wgrad_input_bytes),),
        reads_module=RecomputeModule.LAYERNORM,
    )


def _rotary_operator(rank: RankContext, attention: LatentAttention) -> Operator:
    """Rotate a part of each query in place; write keys with the rotary key, and values separately."""
    tokens, heads = rank.shard.tokens, attention.heads // rank.shard.tp
    is_fused = rank.training.fuses(FusedKernel.ROTARY)
    rotated_elements = 2 * heads * attention.qk_rope_head_dim
    written_elements = (
        heads * (attention.qk_nope_head_dim + attention.v_head_dim)
        + attention.qk_rope_head_dim
        + heads * (attention.head_dim + attention.v_head_dim)
    )
    shape = MemoryBoundShape(
        MemoryBoundOp.ROTARY,
        tokens * heads,
        attention.qk_rope_head_dim,
        fused=is_fused,
        table=rank.shard.sequence,
    )
    copied_elements = 0 if is_fused else 2 * heads * (2 * attention.head_dim + attention.v_head_dim)
    moved_bytes = float(tokens * (rotated_elements + written_elements + copied_elements) * rank.dtype.bytes)
    launches = 2 if is_fused else 8
    forward = Kernel("attention.rotary", KernelKind.ROTARY, rank.dtype, 0.0, moved_bytes, shape, launches)
    backward = replace(forward, name="attention.rotary.input_gradient", shape=replace(shape, backward=True))
    return Operator(
        "attention.rotary",
        ParallelRegion.SHARDED,
        (forward,),
        (backward,),
        memberships=(ModuleMembership(RecomputeModule.MLA_UP_PROJECTION),),
    )


def latent_core_operators(rank: RankContext, attention: LatentAttention) -> tuple[Operator, ...]:
    """Attention of this rank's heads to all keys."""
    shard, heads = rank.shard, attention.heads // rank.shard.tp
    shape = AttentionShape(
        *(shard.batch, shard.core_queries, shard.keys, shard.core_heads(heads), shard.core_heads(heads)),
        attention.head_dim,
        causal=True,
        value_dim=attention.v_head_dim,
        trailing=shard.consecutive,
        packed=shard.packed_keys(None),
    )
    training = rank.training
    core = AttentionCore(
        *(shape, rank.dtype, rank.model.dropout, training.fuses(FusedKernel.SOFTMAX)),
        overheads=training.overheads,
        low_precision=training.recipe.attention,
    )
    kv_elements = shard.tokens * attention.kv_width(shard.tp)
    return core_operators(rank, core, kv_elements)


def output_operator(rank: RankContext, attention: LatentAttention) -> Operator:
    """The row-parallel projection of this rank's heads back to the residual stream."""
    tokens, width = rank.shard.tokens, attention.heads * attention.v_head_dim // rank.shard.tp
    out = LinearLayer("attention.out", tokens, width, rank.model.hidden, rank.matmul_formats, row_parallel=True)
    return linear_operator(rank, out, rank.saved_input_bytes(tokens * width))


def _down_projection(rank: RankContext, name: str, outputs: int) -> Operator:
    """A projection of the rank's own tokens, replicated on every tensor-parallel rank."""
    linear = LinearLayer(name, rank.shard.residual_tokens, rank.model.hidden, outputs, rank.matmul_formats)
    return replace(
        linear_operator(rank, linear, _saved_input_bytes(rank)), region=ParallelRegion.REPLICATED, linear=None
    )


def _up_projection(rank: RankContext, name: str, inputs: int, outputs: int) -> Operator:
    """A projection split by heads, of a latent vector that enters the sharded region."""
    input_bytes = rank.saved_input_bytes(rank.shard.residual_tokens * inputs)
    after_norm = rank.training.overheads.norm_in_linear
    operator = linear_operator(rank, _up_linear(rank, name, inputs, outputs), input_bytes, after_norm=after_norm)
    module_input_bytes = 0.0 if after_norm else input_bytes
    return replace(
        operator,
        linear=None,
        region_input_bytes=full_bytes(rank, inputs),
        memberships=(ModuleMembership(RecomputeModule.MLA_UP_PROJECTION, module_input_bytes),),
    )


def _up_linear(rank: RankContext, name: str, inputs: int, outputs: int) -> LinearLayer:
    return LinearLayer(name, rank.shard.tokens, inputs, outputs, rank.matmul_formats)


def _latent_norm(rank: RankContext, name: str, width: int) -> Operator:
    """The norm of a latent vector; if fused into the up projections, it belongs to their module."""
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
    """Bytes of the layer input as saved for backward."""
    return float(rank.saved_input_bytes(rank.residual_elements))


def full_bytes(rank: RankContext, width: int) -> float:
    """Bytes of all tokens' rows of `width` elements, not split over tensor-parallel ranks."""
    return float(rank.shard.tokens * width * rank.dtype.bytes)
