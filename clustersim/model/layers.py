"""Which operators is a transformer layer made of on one rank, and the embedding before and the head after the layers?

Megatron's split: queries, keys, values and the first MLP matrix by columns, the attention output and the second MLP
matrix by rows, embedding and logits by vocabulary (rounded up where tp does not divide it); norms, residuals and
dropout whole on every rank, or by sequence under sequence parallelism. Collectives are not operators: whoever lowers
a layer puts them where the region changes. More tp than key/value heads: each rank holds a whole key/value head.

What is kept for backward is counted as Korthikanti et al. 2022 (arXiv:2205.05198) section 4 does, each tensor once,
by the operator that reads it: inputs of norms, of linear layers and of the activation, queries, keys and values
(after rotary positions, by `attention.qkv`), one byte per dropped element, FP32 logits; not the norms' statistics
(hidden times smaller); nor are statistics of norms over all heads (OLMo 2) exchanged between tensor-parallel ranks.
In a parallel block both branches are one sharded region: their outputs are summed before they leave it, as are the
gradients of what they both read. Under sequence parallelism the inputs of `attention.qkv`, `mlp.up` and `head.logits`
are kept split, which costs one more all-gather in backward (section 4.2.2).
"""

from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Final

from clustersim.common.dtypes import DType
from clustersim.common.units import Bytes
from clustersim.model import memory_bound
from clustersim.model.attention import Core, operators
from clustersim.model.kernels import AttentionShape, Kernel, KernelKind, Routine, StreamShape
from clustersim.model.layer_stack import (
    BlockForm,
    DenseMlp,
    FullAttention,
    LatentAttention,
    LayerSpec,
    QkNorm,
    RoutedMlp,
)
from clustersim.model.linear import Linear
from clustersim.model.lora import Projection
from clustersim.model.lora_layers import adapted
from clustersim.model.memory_bound import Streaming
from clustersim.model.mla import latent
from clustersim.model.mlp import dense, half_again
from clustersim.model.moe_layer import mixture
from clustersim.model.mtp import ahead, copied, read_bytes
from clustersim.model.operators import DENSE, NARROWED, Entry, Layer, Operator, Region, Shard, reading, within
from clustersim.model.optimizer_kernels import gradient_norm, optimizer_step
from clustersim.model.overheads import Accumulation
from clustersim.model.precision_recipe import Products
from clustersim.model.recompute_modules import Module, Within
from clustersim.model.sharded_layer import (
    OnRank,
    fork,
    linear_operator,
    norm_operator,
    normed,
    residual_sum,
    residual_wide,
    streamed,
)
from clustersim.model.training import Training
from clustersim.model.transformer import Model, Positions

__all__ = [
    "Layer",
    "Operator",
    "Region",
    "Shard",
    "embedding",
    "gradient_norm",
    "head",
    "layer",
    "optimizer_step",
]

_TOKEN_ID_BYTES = 8  # torch.long


@dataclass(frozen=True, slots=True)
class _Heads:
    """Attention's dimensions on one rank."""

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
    def kv_heads(self) -> int:
        return max(1, self.attention.kv_heads // self.tp)

    @property
    def kv_width(self) -> int:
        return self.kv_heads * self.head_dim

    def window(self, keys: int) -> int | None:
        """The window, where it leaves something out of so many keys."""
        window = self.attention.window
        return None if window is None or window >= keys else window


_REMEMBERED: Final = 256
"""Layers of so many plans: those of the candidates of a search differ in few things, and mostly not in their layers."""


@lru_cache(maxsize=_REMEMBERED)
def layer(model: Model, spec: LayerSpec, training: Training, shard: Shard) -> Layer:
    """One transformer layer. Degrees must divide heads and ffn (the scenario door has checked)."""
    rank = OnRank(model, training.wide if spec.wide else training, shard)
    attention = _attended(rank, spec)
    mlp = _mlp(rank, spec)
    made, read = _operators(rank, spec, attention, mlp), rank.input_bytes
    if spec.ahead:
        made, read = ahead(rank, made), read_bytes(rank)
    if rank.training.recipe.apart:
        made = tuple(replace(operator, group=NARROWED) if operator.group == DENSE else operator for operator in made)
    return adapted(Layer(made, read), training, shard)


def _operators(rank: OnRank, spec: LayerSpec, attention: list[Operator], mlp: list[Operator]) -> tuple[Operator, ...]:
    if spec.block.parallel and attention and mlp:
        return (*_beside(rank, spec.block, attention, mlp),)
    branches = {
        "attention": (attention, isinstance(spec.attention, FullAttention)),
        "mlp": (mlp, isinstance(spec.mlp, DenseMlp)),
    }
    return tuple(
        operator
        for name, (made, plain) in branches.items()
        if made
        for operator in _joined(rank, spec.block, name, _normed(rank, spec.block, name, made, plain=plain))
    )


def _joined(rank: OnRank, block: BlockForm, name: str, made: list[Operator]) -> list[Operator]:
    """A branch of the residual stream, with its norms and its sum with it."""
    after = [norm_operator(rank, f"{name}.post_norm", forks=False)] if block.after else []
    return [*made, *after, residual_sum(rank, f"{name}.residual")]


def _normed(rank: OnRank, block: BlockForm, name: str, made: list[Operator], *, plain: bool) -> list[Operator]:
    """A branch and the norm before it. plain: a linear layer is first, within which the norm may be."""
    if not block.before:
        return [fork(rank, f"{name}.fork"), *made]
    if not (plain and rank.training.overheads.norm_in_linear):
        return [_norm_module(rank, f"{name}.norm"), *reading(made, Module.LAYERNORM)]
    first, *others = made
    beside = tuple(Within(item.module) for item in first.within)
    norm = replace(norm_operator(rank, f"{name}.norm"), within=first.within)
    return [norm, replace(first, within=beside), *others]


def _norm_module(rank: OnRank, name: str) -> Operator:
    """A norm before a branch, which is a module."""
    (made,) = within([norm_operator(rank, name)], Module.LAYERNORM, rank.input_bytes)
    return made


def _beside(rank: OnRank, block: BlockForm, attention: list[Operator], mlp: list[Operator]) -> list[Operator]:
    """Attention and MLP that read the same input; what both keep of it is counted once."""
    (qkv, *rest), (up, *others) = (reading(branch, Module.LAYERNORM) for branch in (attention, mlp))
    total = replace(_summed(rank, "block.sum"), region=Region.SHARDED)
    residual = residual_sum(rank, "block.residual")
    if block is BlockForm.PARALLEL_NORMS:
        first, second = _norm_module(rank, "attention.norm"), _norm_module(rank, "mlp.norm")
        second = replace(second, kept=second.kept - rank.input_bytes, within=(Within(Module.LAYERNORM),))
        return [first, second, qkv, *rest, replace(up, entry=Entry.OTHER), *others, total, residual]
    read = rank.shared(rank.residual)
    both = _summed(rank, "block.gradient_sum").forward
    qkv = replace(qkv, input_gradient=(*qkv.input_gradient, *both))
    shared = tuple(Within(item.module) for item in up.within)  # the input of the MLP's module, too
    up = replace(
        up, entry=Entry.SAME, kept=up.kept - read, waiting=up.waiting - read, read=up.read - read, within=shared
    )
    return [_norm_module(rank, "block.norm"), qkv, *rest, up, *others, total, residual]


def _summed(rank: OnRank, name: str) -> Operator:
    """Both branches' results for all tokens of this rank; the gradient passes unchanged."""
    over = memory_bound.residual(dropout=False, fused=rank.training.fused)
    return streamed(Region.REPLICATED, name, rank.dtype, over, (over.over(rank.shard.tokens, rank.model.hidden),))


@lru_cache(maxsize=_REMEMBERED)
def embedding(model: Model, training: Training, shard: Shard) -> Layer:
    """Token lookup (each rank looks up its part of the vocabulary), learned positions, norm, dropout."""
    rank = OnRank(model, training, shard)
    chosen = [_tokens(rank)]
    if model.positions is Positions.LEARNED:
        chosen.append(_positions(rank))
    if model.embedding_norm:
        chosen.append(norm_operator(rank, "embedding.norm", forks=False))
    if model.dropout:
        chosen.append(residual_wide(rank, "embedding.dropout", memory_bound.DROPOUT))
    return adapted(Layer(tuple(chosen), float(shard.tokens * _TOKEN_ID_BYTES)), training, shard)


@lru_cache(maxsize=_REMEMBERED)
def head(model: Model, training: Training, shard: Shard) -> Layer:
    """Final norm, logits, loss. The logits' weight is counted here, tied or not; FP8 leaves the logits in BF16.

    Layers that predict further tokens have logits and a loss each, of the same weight; hidden states of all are put
    behind each other (Megatron-LM, megatron/core/transformer/multi_token_prediction.py, `process_mtp_loss`). The final
    norm counts here, too, which Megatron-LM runs with the last layer of the stack.
    """
    rank, further = OnRank(model, training, shard), model.mtp_layers
    made = [norm_operator(rank, "head.norm", forks=False)]
    if further:
        made.append(copied(rank, "head.concat", 1 + further))
    first, *others = _predicted(rank)
    made += [first, *others]
    # backward runs the first last, with which the gradient of the weight is complete
    again = replace(first, parameters=0, entry=Entry.OTHER, linear=None)
    made += further * [again, *others]
    return adapted(Layer(tuple(made), rank.input_bytes), training, shard)


def _predicted(rank: OnRank) -> list[Operator]:
    """Logits and loss of one hidden state for each token."""
    model, training, shard = rank.model, rank.training, rank.shard
    bias_tokens = shard.tokens if model.head_bias else 0
    logits = Linear("head.logits", shard.tokens, model.hidden, rank.vocab, Products.all_in(rank.dtype), bias_tokens)
    made = [linear_operator(rank, logits, rank.input_bytes)]
    if model.logit_softcap:
        made.append(_over_logits(rank, "head.softcap", memory_bound.softcap(fused=training.fused)))
    return [*made, _over_logits(rank, "head.loss", memory_bound.loss(training.loss))]


def _over_logits(rank: OnRank, name: str, over: Streaming) -> Operator:
    return streamed(Region.SHARDED, name, rank.dtype, over, (over.over(rank.shard.tokens, rank.vocab),))


def _mlp(rank: OnRank, spec: LayerSpec) -> list[Operator]:
    match spec.mlp:
        case DenseMlp() as mlp:
            return within(dense(rank, mlp, behind_norm=_norm_inside(rank, spec)), Module.MLP, rank.input_bytes)
        case RoutedMlp(alone=DenseMlp() as mlp):
            return within(dense(rank, mlp, behind_norm=_norm_inside(rank, spec)), Module.MLP, rank.input_bytes)
        case RoutedMlp() as routed:
            return within(mixture(rank, routed), Module.MIXTURE, rank.input_bytes)
    return []


def _attended(rank: OnRank, spec: LayerSpec) -> list[Operator]:
    match spec.attention:
        case FullAttention() as attention:
            return _attention(rank, _Heads(attention, rank.shard.tp), behind_norm=_norm_inside(rank, spec))
        case LatentAttention() as attention:
            return latent(rank, attention)
    return []


def _attention(rank: OnRank, own: _Heads, *, behind_norm: bool) -> list[Operator]:
    model, shard = rank.model, rank.shard
    chosen = [_qkv(rank, own, behind_norm=behind_norm)]
    if own.attention.qk_norm is not None:
        chosen.append(_qk_norm(rank, own, own.attention.qk_norm))
    if model.positions is Positions.ROTARY and own.attention.rotary > 0:
        chosen.append(_rotary(rank, own))
    shape = AttentionShape(
        *(shard.batch, shard.sequence, shard.keys, own.heads, own.kv_heads, own.head_dim),
        causal=True,
        window=own.window(shard.keys),
    )
    core = Core(
        *(shape, rank.dtype, model.dropout, rank.training.fused, own.attention.softcap),
        *(rank.training.overheads, own.attention.sinks, rank.training.recipe.attention),
    )
    chosen += operators(core, rank.training.attention)
    bias_tokens = shard.residual_tokens if model.linear_bias else 0
    parts = ((Projection.O, model.hidden),)
    out = Linear("attention.out", shard.tokens, own.query_width, model.hidden, rank.products, bias_tokens, parts, True)
    chosen.append(linear_operator(rank, out, rank.saved(shard.tokens * own.query_width)))
    return chosen


def _qkv(rank: OnRank, own: _Heads, *, behind_norm: bool) -> Operator:
    tokens, width = rank.shard.tokens, own.query_width + 2 * own.kv_width
    bias_tokens = tokens if own.attention.qkv_bias else 0
    added = bias_tokens and rank.training.overheads.bias_adds
    parts = ((Projection.Q, own.query_width), (Projection.K, own.kv_width), (Projection.V, own.kv_width))
    linear = Linear("attention.qkv", tokens, rank.model.hidden, width, rank.products, bias_tokens, parts)
    made = linear_operator(rank, linear, rank.saved(rank.residual), behind_norm=behind_norm)
    made = replace(made, kept=made.kept + tokens * width * rank.dtype.bytes)
    if added:
        bias = memory_bound.BIAS_ADD.over(tokens, width)
        kernel = memory_bound.BIAS_ADD.forward_kernel("attention.qkv.bias", rank.dtype, bias)
        made = replace(made, forward=(*made.forward, kernel))
    return half_again(rank, made, replace(linear, outputs=own.kv_width, bias_tokens=0))  # of q, k, v the second


def _norm_inside(rank: OnRank, spec: LayerSpec) -> bool:
    """Whether a norm is within the first linear layer of plain attention or of a dense MLP."""
    return spec.block.before and not spec.block.parallel and rank.training.overheads.norm_in_linear


def _qk_norm(rank: OnRank, own: _Heads, form: QkNorm) -> Operator:
    over, tokens = normed(rank), rank.shard.tokens
    if form is QkNorm.WHOLE:
        shapes = tuple(over.over(tokens, width) for width in (own.query_width, own.kv_width))
    else:
        shapes = tuple(over.over(rows, own.head_dim) for rows in _heads(rank, own))
    made = streamed(Region.SHARDED, "attention.qk_norm", rank.dtype, over, shapes)
    return replace(made, parameters=own.query_width + own.kv_width if form is QkNorm.WHOLE else 2 * own.head_dim)


def _rotary(rank: OnRank, own: _Heads) -> Operator:
    """Fused kernels pass whole heads; the formula as written turns a part of each and puts it beside the rest."""
    over, heads = memory_bound.rotary(fused=rank.training.fused), _heads(rank, own)
    turned = own.head_dim if rank.training.fused else max(1, round(own.head_dim * own.attention.rotary))
    shapes = tuple(over.over(rows, turned, table=rank.shard.sequence) for rows in heads)
    made = streamed(Region.SHARDED, "attention.rotary", rank.dtype, over, shapes)
    if turned == own.head_dim:
        return made
    name, elements = "attention.rotary.beside", sum(heads) * own.head_dim
    beside = (memory_bound.copy(name, rank.dtype, elements),)
    return replace(made, forward=made.forward + beside, input_gradient=beside + made.input_gradient)


def _heads(rank: OnRank, own: _Heads) -> tuple[int, ...]:
    """Heads of all tokens that one kernel works on: fused those of queries and keys, else each by themselves."""
    queries, keys = rank.shard.tokens * own.heads, rank.shard.tokens * own.kv_heads
    return (queries + keys,) if rank.training.fused else (queries, keys)


def _tokens(rank: OnRank) -> Operator:
    """Lookup; the weight gradient is dense as in PyTorch: zeros, the tokens' rows added, the whole accumulated."""
    tokens, hidden, width = rank.shard.tokens, rank.model.hidden, rank.dtype.bytes
    weights = rank.vocab * hidden
    rows = float(tokens * hidden * width)
    name, shape = "embedding.tokens", StreamShape(Routine.LOOKUP, tokens, hidden, fused=True, table=rank.vocab)
    gradients, how = rank.training.recipe.weights.gradients, rank.training.accumulation
    added = Accumulation.ADDED if how is Accumulation.FUSED else how  # no product makes it
    summed = memory_bound.accumulate(
        f"{name}.accumulate", (rank.vocab, hidden), made=rank.dtype, accumulated=gradients, how=added
    )
    return Operator(
        name,
        Region.SHARDED,
        (_lookup(name, rank.dtype, 2 * rows + tokens * _TOKEN_ID_BYTES, shape),),
        weight_gradient=(
            _lookup(f"{name}.weight_gradient", rank.dtype, weights * width + 3 * rows, replace(shape, backward=True)),
            *summed,
        ),
        parameters=weights,
        kept=float(tokens * _TOKEN_ID_BYTES),
        waiting=float(tokens * _TOKEN_ID_BYTES) + rows,
    )


def _positions(rank: OnRank) -> Operator:
    """The table is added to each sequence; its gradient is the sum over sequences."""
    rows = float(rank.residual * rank.dtype.bytes)
    tokens, hidden, table = rank.shard.residual_tokens, rank.model.hidden, rank.model.position_rows
    gradients = rank.training.recipe.weights.gradients
    shape = StreamShape(Routine.POSITIONS, tokens, hidden, fused=True, table=table, formats=(gradients,))
    gradient = rows + 2.0 * table * hidden * gradients.bytes
    name, back = "embedding.positions", replace(shape, backward=True)
    return Operator(
        name,
        Region.REPLICATED,
        (_lookup(name, rank.dtype, 3 * rows, shape),),
        weight_gradient=(_lookup(f"{name}.weight_gradient", rank.dtype, gradient, back),),
        parameters=table * hidden,
    )


def _lookup(name: str, dtype: DType, moved: Bytes, shape: StreamShape) -> Kernel:
    return Kernel(name, KernelKind.EMBEDDING, dtype, flops=0.0, bytes=moved, shape=shape)
