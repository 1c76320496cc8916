"""Operators of multi-head and grouped-query attention on one rank.

Queries, keys and values are one column-parallel projection, the output is row-parallel; norms of queries and
keys and rotary positions are between the projection and the core (`model.attention`). With
`overheads.gathers_normed_heads` tensor-parallel ranks gather normalized queries and keys, whose heads are not the
first dimension, so that a copy follows, and rotate the heads of all; the core and backward keep to a rank's own.
"""

from dataclasses import dataclass, replace

from clustersim.model import memory_bound
from clustersim.model.attention import AttentionCore
from clustersim.model.attention_context import core_operators
from clustersim.model.attention_spec import FullAttention, QkNorm
from clustersim.model.kernels import AttentionShape
from clustersim.model.linear import LinearLayer
from clustersim.model.lora import Projection
from clustersim.model.mixers.blocks import gate_spec
from clustersim.model.mlp import recompute_alternate
from clustersim.model.operators import Operator, ParallelRegion, TpCollective, TpCollectives, TpCombine
from clustersim.model.sharded_layer import RankContext, linear_operator, memory_bound_operator, model_norm_spec
from clustersim.model.training import FusedKernel
from clustersim.model.transformer import PositionEncoding


@dataclass(frozen=True, slots=True)
class _LocalHeads:
    """Attention heads and widths of one rank."""

    attention: FullAttention
    tp: int

    @property
    def heads(self) -> int:
        return self.attention.heads // self.tp

    @property
    def head_dim(self) -> int:
        return self.attention.head_dim

    @property
    def query_width(self) -> int:
        return self.heads * self.head_dim

    @property
    def gate_width(self) -> int:
        return self.attention.gate_width // self.tp

    @property
    def kv_heads(self) -> int:
        return max(1, self.attention.kv_heads // self.tp)

    @property
    def kv_width(self) -> int:
        return self.kv_heads * self.head_dim

    def window(self, keys: int) -> int | None:
        """The window, if it excludes any of `keys` keys."""
        window = self.attention.window
        return None if window is None or window >= keys else window


def full_attention_operators(rank: RankContext, attention: FullAttention, *, after_norm: bool) -> list[Operator]:
    """The operators between the norm and the residual add; after_norm: the norm is fused into the first one."""
    return [
        *operators_before_core(rank, attention, after_norm=after_norm),
        *_core_operators(rank, _LocalHeads(attention, rank.shard.tp)),
        *operators_after_core(rank, attention),
    ]


def operators_before_core(rank: RankContext, attention: FullAttention, *, after_norm: bool) -> list[Operator]:
    """Queries, keys and values, their norms and positions."""
    local = _LocalHeads(attention, rank.shard.tp)
    operators = [_qkv_operator(rank, local, after_norm=after_norm)]
    gathers_heads = attention.qk_norm is not None and rank.training.overheads.gathers_normed_heads and local.tp > 1
    rotated = _LocalHeads(attention, 1) if gathers_heads else local
    if attention.qk_norm is not None:
        norm = _qk_norm_operator(rank, local, attention.qk_norm)
        operators.append(replace(norm, tp_collectives=_head_gathers(rank, rotated)) if gathers_heads else norm)
    if rank.model.positions is PositionEncoding.ROTARY and attention.rotary_percent > 0:
        rotary = _rotary_operator(rank, local)
        operators.append(_with_all_heads(rank, rotary, rotated) if gathers_heads else rotary)
    return operators


def _head_gathers(rank: RankContext, heads: _LocalHeads) -> TpCollectives:
    """The all-gathers of normalized queries and keys of all heads; gradients are of a rank's own heads."""
    widths = {"queries": heads.query_width, "keys": heads.kv_width}
    token_bytes = float(rank.shard.tokens * rank.dtype.bytes)
    gathers = (TpCollective(TpCombine.GATHER, width * token_bytes, name) for name, width in widths.items())
    return TpCollectives(after_forward=tuple(gathers))


def _with_all_heads(rank: RankContext, rotary: Operator, heads: _LocalHeads) -> Operator:
    """Rotary positions whose forward runs over all heads, behind the copies of what was gathered."""
    widths = (heads.query_width, heads.kv_width)
    copies = (
        memory_bound.copy_kernel("attention.rotary.gathered", rank.dtype, rank.shard.tokens * width) for width in widths
    )
    return replace(rotary, forward=(*copies, *_rotary_operator(rank, heads).forward))


def _core_operators(rank: RankContext, local: _LocalHeads) -> tuple[Operator, ...]:
    shard = rank.shard
    shape = AttentionShape(
        *(shard.batch, shard.core_queries, shard.keys, shard.core_heads(local.heads), shard.core_heads(local.kv_heads)),
        local.head_dim,
        causal=local.attention.causal,
        window=local.window(shard.keys),
        trailing=shard.consecutive,
        packed=shard.packed_keys(local.window(shard.keys)),
    )
    core = AttentionCore(
        *(shape, rank.dtype, rank.model.dropout, rank.training.fuses(FusedKernel.SOFTMAX)),
        *(local.attention.attn_logit_softcapping, rank.training.overheads, local.attention.attention_sinks),
        rank.training.recipe.attention,
    )
    kv_elements = shard.tokens * 2 * local.kv_width
    return core_operators(rank, core, kv_elements)


def operators_after_core(rank: RankContext, attention: FullAttention) -> list[Operator]:
    """The output gate, if there is one, and the output projection."""
    model, shard, local = rank.model, rank.shard, _LocalHeads(attention, rank.shard.tp)
    gate = [_output_gate_operator(rank, local)] if attention.attention_output_gate else []
    out = LinearLayer(
        *("attention.out", shard.tokens, local.query_width, model.hidden, rank.matmul_formats),
        bias_tokens=shard.residual_tokens if model.linear_bias else 0,
        projections=((Projection.O, model.hidden),),
        row_parallel=True,
    )
    operator = linear_operator(rank, out, rank.saved_input_bytes(shard.tokens * local.query_width))
    return [*gate, recompute_alternate(rank, operator, replace(out, bias_tokens=0))]


def _qkv_operator(rank: RankContext, local: _LocalHeads, *, after_norm: bool) -> Operator:
    tokens, width = rank.shard.tokens, local.query_width + 2 * local.kv_width + local.gate_width
    bias_tokens = tokens if local.attention.qkv_bias else 0
    adds_bias = bias_tokens and rank.training.overheads.bias_adds
    queries = (Projection.Q, local.query_width + local.gate_width)
    projections = (queries, (Projection.K, local.kv_width), (Projection.V, local.kv_width))
    linear = LinearLayer(
        "attention.qkv", tokens, rank.model.hidden, width, rank.matmul_formats, bias_tokens, projections
    )
    operator = linear_operator(rank, linear, rank.saved_input_bytes(rank.residual_elements), after_norm=after_norm)
    operator = replace(operator, saved_bytes=operator.saved_bytes + tokens * width * rank.dtype.bytes)
    if adds_bias:
        bias = memory_bound.BIAS_ADD.shape_for(tokens, width)
        kernel = memory_bound.BIAS_ADD.forward_kernel("attention.qkv.bias", rank.dtype, bias)
        operator = replace(operator, forward=(*operator.forward, kernel))
    return recompute_alternate(
        rank, operator, replace(linear, outputs=local.kv_width, bias_tokens=0)
    )  # the second of q, k, v


def _output_gate_operator(rank: RankContext, local: _LocalHeads) -> Operator:
    """The output times the gate's sigmoid; the gate is saved with queries, keys and values."""
    spec = gate_spec(rank)
    shape = spec.shape_for(rank.shard.tokens, local.query_width)
    operator = memory_bound_operator(ParallelRegion.SHARDED, "attention.output_gate", rank.dtype, spec, (shape,))
    return replace(operator, saved_bytes=operator.saved_bytes - float(shape.elements * rank.dtype.bytes))


def _qk_norm_operator(rank: RankContext, local: _LocalHeads, form: QkNorm) -> Operator:
    spec, tokens = model_norm_spec(rank), rank.shard.tokens
    if form is QkNorm.ALL_HEADS:
        shapes = tuple(spec.shape_for(tokens, width) for width in (local.query_width, local.kv_width))
    else:
        head_rows = _head_rows(rank, local, fused=rank.training.fuses(FusedKernel.NORM))
        shapes = tuple(spec.shape_for(rows, local.head_dim) for rows in head_rows)
    operator = memory_bound_operator(ParallelRegion.SHARDED, "attention.qk_norm", rank.dtype, spec, shapes)
    return replace(
        operator, parameter_count=local.query_width + local.kv_width if form is QkNorm.ALL_HEADS else 2 * local.head_dim
    )


def _rotary_operator(rank: RankContext, local: _LocalHeads) -> Operator:
    """Fused kernels pass full heads; the unfused formula rotates a part of each head and copies the remainder."""
    is_complex = _rotates_complex(rank, local.attention)
    is_one_kernel = rank.training.fuses(FusedKernel.ROTARY) and not is_complex
    spec = memory_bound.rotary_spec(fused=rank.training.fuses(FusedKernel.ROTARY), is_complex=is_complex)
    head_rows = _head_rows(rank, local, fused=is_one_kernel)
    rotated_dim = local.head_dim if is_one_kernel else max(1, round(local.head_dim * local.attention.rotary_percent))
    shapes = tuple(spec.shape_for(rows, rotated_dim, table=rank.shard.sequence) for rows in head_rows)
    operator = memory_bound_operator(ParallelRegion.SHARDED, "attention.rotary", rank.dtype, spec, shapes)
    if rank.training.overheads.keeps_combined_qkv:
        rotated_bytes = rank.shard.tokens * (local.query_width + local.kv_width) * rank.dtype.bytes
        operator = replace(operator, saved_bytes=operator.saved_bytes + rotated_bytes)
    if rotated_dim == local.head_dim:
        return operator
    name, elements = "attention.rotary.pass_through", sum(head_rows) * local.head_dim
    copies = (memory_bound.copy_kernel(name, rank.dtype, elements),)
    return replace(operator, forward=operator.forward + copies, input_gradient=copies + operator.input_gradient)


def _rotates_complex(rank: RankContext, attention: FullAttention) -> bool:
    """Whether rotary positions are a product of complex numbers.

    torchtitan's models with norms of queries and keys (Qwen3) or attention sinks (gpt-oss) rotate halves instead.
    """
    is_other = attention.qk_norm is not None or attention.attention_sinks
    return rank.training.overheads.complex_rotary and not is_other


def _head_rows(rank: RankContext, local: _LocalHeads, *, fused: bool) -> tuple[int, ...]:
    """Rows (tokens x heads) per rotary or norm kernel: queries and keys in one if fused, else separate."""
    query_rows, key_rows = rank.shard.tokens * local.heads, rank.shard.tokens * local.kv_heads
    return (query_rows + key_rows,) if fused else (query_rows, key_rows)
