"""Operators of cross-attention on one rank.

Keys and values come from a text's tokens, of which every context-parallel rank has all. One projection makes them, from
another input than the queries', which enters the sharded region for it.
"""

from dataclasses import replace

from clustersim.model import memory_bound
from clustersim.model.attention import AttentionCore, attention_operators
from clustersim.model.cross_attention_spec import CrossAttention
from clustersim.model.kernels import AttentionShape
from clustersim.model.linear import LinearLayer
from clustersim.model.operators import Operator, ParallelRegion, RegionInput
from clustersim.model.sharded_layer import RankContext, linear_operator, memory_bound_operator
from clustersim.model.training import FusedKernel
from clustersim.model.transformer import Norm


def cross_attention_operators(rank: RankContext, attention: CrossAttention, *, after_norm: bool) -> list[Operator]:
    """The operators between the norm and the residual add; after_norm: the norm is fused into the first one."""
    shard, heads, width = rank.shard, attention.heads // rank.shard.tp, attention.width // rank.shard.tp
    key_tokens = shard.batch * attention.keys
    query = _column(rank, attention, "cross_attention.query", (shard.tokens, rank.model.hidden, width))
    query_operator = linear_operator(rank, query, rank.saved_input_bytes(rank.residual_elements), after_norm=after_norm)
    query_bytes = float(shard.tokens * width * rank.dtype.bytes)
    operators = [
        replace(query_operator, saved_bytes=query_operator.saved_bytes + query_bytes),
        _keys_values(rank, attention, key_tokens, width),
    ]
    if attention.qk_norm:
        operators.append(_qk_norm(rank, (shard.tokens, key_tokens), width))
    shape = AttentionShape(
        *(shard.batch, shard.sequence, attention.keys, heads, heads, attention.head_dim), causal=False
    )
    core = AttentionCore(
        *(shape, rank.dtype, rank.model.dropout, rank.training.fuses(FusedKernel.SOFTMAX)),
        overheads=rank.training.overheads,
    )
    bias_tokens = shard.residual_tokens if rank.model.linear_bias else 0
    out = LinearLayer(
        *("cross_attention.out", shard.tokens, width, rank.model.hidden, rank.matmul_formats, bias_tokens),
        row_parallel=True,
    )
    return [
        *operators,
        *_core_operators(rank, core),
        linear_operator(rank, out, rank.saved_input_bytes(shard.tokens * width)),
    ]


def _core_operators(rank: RankContext, core: AttentionCore) -> list[Operator]:
    """The core; no keys or values travel to it between context-parallel ranks, as they do to that of a sequence."""
    operators = attention_operators(core, rank.training.attention)
    is_split = rank.shard.sequence != rank.shard.keys
    return [replace(operator, memberships=()) if is_split else operator for operator in operators]


def _keys_values(rank: RankContext, attention: CrossAttention, tokens: int, width: int) -> Operator:
    """Keys and values of a text's tokens, which enter the region for it; their input, all layers', is saved once."""
    linear = _column(rank, attention, "cross_attention.kv", (tokens, attention.key_hidden, 2 * width))
    operator = linear_operator(rank, linear, 0.0)
    return replace(
        operator,
        saved_bytes=float(tokens * 2 * width * rank.dtype.bytes),
        region_input=RegionInput.OTHER,
        region_input_bytes=float(tokens * attention.key_hidden * rank.dtype.bytes),
        saves_full_input=True,
    )


def _column(rank: RankContext, attention: CrossAttention, name: str, sizes: tuple[int, int, int]) -> LinearLayer:
    """A column-parallel matrix. sizes: tokens, inputs, outputs."""
    return LinearLayer(name, *sizes, rank.matmul_formats, sizes[0] if attention.qkv_bias else 0)


def _qk_norm(rank: RankContext, tokens: tuple[int, int], width: int) -> Operator:
    """RMSNorms of queries and keys over all heads of this rank."""
    spec = memory_bound.norm_spec(Norm.RMSNORM, fused=rank.training.fuses(FusedKernel.NORM))
    shapes = tuple(spec.shape_for(rows, width) for rows in tokens)
    operator = memory_bound_operator(ParallelRegion.SHARDED, "cross_attention.qk_norm", rank.dtype, spec, shapes)
    return replace(operator, parameter_count=2 * width)
