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

from clustersim.model.attention import Core, operators
from clustersim.model.kernels import AttentionShape, Kernel, KernelKind, Routine, StreamShape
from clustersim.model.layer_stack import LatentAttention
from clustersim.model.linear import Linear
from clustersim.model.operators import Entry, Operator, Region
from clustersim.model.recompute_modules import Module, Within
from clustersim.model.sharded_layer import OnRank, gradient_sum, linear_operator, normed, streamed


def latent(rank: OnRank, own: LatentAttention) -> list[Operator]:
    """The operators of latent attention between its norm and the sum with the residual stream."""
    return [*_vectors(rank, own), *_heads(rank, own), *_core(rank, own), _out(rank, own)]


def _vectors(rank: OnRank, own: LatentAttention) -> list[Operator]:
    """The latent vectors of queries, if they have one, and of keys and values, each with its norm."""
    down = _down(rank, "attention.kv_down", own.kv_rank + own.rope)
    read = rank.shared(rank.residual)  # what makes the queries keeps it, too
    down = replace(down, kept=down.kept - read, waiting=down.waiting - read, read=down.read - read)
    down = replace(down, input_gradient=(*down.input_gradient, gradient_sum(rank, "attention.kv_down")))
    keys_values = [down, _norm(rank, "attention.kv_norm", own.kv_rank)]
    if own.query_rank is None:
        return keys_values
    queries = _down(rank, "attention.query_down", own.query_rank)
    return [queries, _norm(rank, "attention.query_norm", own.query_rank), *keys_values]


def _heads(rank: OnRank, own: LatentAttention) -> list[Operator]:
    """Queries, keys and values of this rank's heads, with their rotary positions."""
    tp = rank.shard.tp
    queries = _queries(rank, own)
    keys_values = _up(rank, "attention.kv_up", own.kv_rank, own.kv_width // tp)
    whole = _whole(rank, own.kv_rank + own.rope)  # the rotary key comes into the region, too
    kept = rank.shard.tokens * (own.query_width + own.heads * (own.head_dim + own.value_dim)) // tp * rank.dtype.bytes
    turned = replace(_rotary(rank, own), kept=float(kept))
    return [queries, replace(keys_values, entry=Entry.OTHER, entering=whole), turned]


def _queries(rank: OnRank, own: LatentAttention) -> Operator:
    """Queries of this rank's heads, from their latent vector or from the input itself."""
    name, width = "attention.query_up", own.query_width // rank.shard.tp
    if own.query_rank is not None:
        return _up(rank, name, own.query_rank, width)
    made = linear_operator(rank, _columns(rank, name, rank.model.hidden, width), _read(rank))
    return replace(made, linear=None, within=(Within(Module.LATENT_UP, made.read),), reads=Module.LAYERNORM)


def _rotary(rank: OnRank, own: LatentAttention) -> Operator:
    """Turn a part of each query in place; write keys with the rotary key, and values apart."""
    tokens, heads = rank.shard.tokens, own.heads // rank.shard.tp
    turned = 2 * heads * own.rope
    written = heads * (own.nope + own.value_dim) + own.rope + heads * (own.head_dim + own.value_dim)
    shape = StreamShape(Routine.ROTARY, tokens * heads, own.rope, fused=rank.training.fused, table=rank.shard.sequence)
    copies = 0 if rank.training.fused else 2 * heads * (2 * own.head_dim + own.value_dim)
    moved = float(tokens * (turned + written + copies) * rank.dtype.bytes)
    launches = 2 if rank.training.fused else 8
    forward = Kernel("attention.rotary", KernelKind.ROTARY, rank.dtype, 0.0, moved, shape, launches)
    back = replace(forward, name="attention.rotary.input_gradient", shape=replace(shape, backward=True))
    return Operator("attention.rotary", Region.SHARDED, (forward,), (back,), within=(Within(Module.LATENT_UP),))


def _core(rank: OnRank, own: LatentAttention) -> tuple[Operator, ...]:
    shard, heads = rank.shard, own.heads // rank.shard.tp
    shape = AttentionShape(
        *(shard.batch, shard.sequence, shard.keys, heads, heads, own.head_dim), causal=True, value_dim=own.value_dim
    )
    training = rank.training
    core = Core(
        *(shape, rank.dtype, rank.model.dropout, training.fused),
        overheads=training.overheads,
        narrow=training.recipe.attention,
    )
    return operators(core, rank.training.attention)


def _out(rank: OnRank, own: LatentAttention) -> Operator:
    tokens, width = rank.shard.tokens, own.heads * own.value_dim // rank.shard.tp
    out = Linear("attention.out", tokens, width, rank.model.hidden, rank.products, rows=True)
    return linear_operator(rank, out, rank.saved(tokens * width))


def _down(rank: OnRank, name: str, outputs: int) -> Operator:
    """A product on the rank's own tokens, whole on every tensor-parallel rank."""
    linear = Linear(name, rank.shard.residual_tokens, rank.model.hidden, outputs, rank.products)
    return replace(linear_operator(rank, linear, _read(rank)), region=Region.REPLICATED, linear=None)


def _up(rank: OnRank, name: str, inputs: int, outputs: int) -> Operator:
    """A product by heads, of a latent vector that comes into the sharded region."""
    read = rank.saved(rank.shard.residual_tokens * inputs)
    within_norm = rank.training.overheads.norm_in_linear
    made = linear_operator(rank, _columns(rank, name, inputs, outputs), read, behind_norm=within_norm)
    comes = 0.0 if within_norm else read
    return replace(made, linear=None, entering=_whole(rank, inputs), within=(Within(Module.LATENT_UP, comes),))


def _columns(rank: OnRank, name: str, inputs: int, outputs: int) -> Linear:
    return Linear(name, rank.shard.tokens, inputs, outputs, rank.products)


def _norm(rank: OnRank, name: str, width: int) -> Operator:
    """The norm of a latent vector, which is of the up projections' module where it is within their linear layers."""
    over = normed(rank)
    made = streamed(Region.REPLICATED, name, rank.dtype, over, (over.over(rank.shard.residual_tokens, width),))
    if rank.training.overheads.norm_in_linear:
        comes = float(rank.shard.residual_tokens * width * rank.dtype.bytes)
        made = replace(made, within=(Within(Module.LATENT_UP, comes),))
    return replace(made, parameters=width)


def _read(rank: OnRank) -> float:
    """Bytes of the input as backward reads it."""
    return float(rank.saved(rank.residual))


def _whole(rank: OnRank, width: int) -> float:
    """Bytes of all tokens' rows of so many elements, whole over tensor-parallel ranks."""
    return float(rank.shard.tokens * width * rank.dtype.bytes)
