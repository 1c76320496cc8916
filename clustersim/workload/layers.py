"""Which operators is a transformer layer made of on one rank, and the embedding before and the head after the layers?

Megatron's split: queries, keys, values and the first MLP matrix by columns, the attention output and the second MLP
matrix by rows, embedding and logits by vocabulary (rounded up where tp does not divide it); norms, residuals and
dropout whole on every rank, or by sequence under sequence parallelism. Collectives are not operators: whoever lowers
a layer puts them where the region changes. More tp than key/value heads: each rank holds a whole key/value head.

What is kept for backward is counted as Korthikanti et al. 2022 (arXiv:2205.05198) section 4 does, each tensor once,
by the operator that reads it: inputs of norms, of linear layers and of the activation, queries, keys and values
(after rotary positions, by `attention.qkv`), one byte per dropped element, FP32 logits; not the norms' statistics
(hidden times smaller). Under sequence parallelism the inputs of `attention.qkv`, `mlp.up` and `head.logits` are kept
split, which costs one more all-gather in backward (section 4.2.2).
"""

from dataclasses import dataclass, replace

from clustersim.dtypes import DType
from clustersim.units import Bytes
from clustersim.workload import streaming
from clustersim.workload.attention import Core, operators
from clustersim.workload.kernels import AttentionShape, Kernel, KernelKind, MatmulShape, Routine, StreamShape
from clustersim.workload.linear import Linear, activation_dtype
from clustersim.workload.operators import Layer, Operator, Region, Shard
from clustersim.workload.optimizer import gradient_norm, optimizer_step
from clustersim.workload.streaming import Streaming
from clustersim.workload.training import Training
from clustersim.workload.transformer import Mlp, Model, Positions, norm_parameters

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
class _Rank:
    """A model's dimensions on one rank."""

    model: Model
    training: Training
    shard: Shard

    @property
    def dtype(self) -> DType:
        return activation_dtype(self.training.precision)

    @property
    def operand(self) -> DType:
        return self.training.precision.compute

    @property
    def query_width(self) -> int:
        return self.model.heads // self.shard.tp * self.model.head_dim

    @property
    def kv_heads(self) -> int:
        return max(1, self.model.kv_heads // self.shard.tp)

    @property
    def kv_width(self) -> int:
        return self.kv_heads * self.model.head_dim

    @property
    def ffn(self) -> int:
        return self.model.ffn // self.shard.tp

    @property
    def up_width(self) -> int:
        return 2 * self.ffn if self.model.mlp is Mlp.SWIGLU else self.ffn

    @property
    def vocab(self) -> int:
        return self.shard.rows(self.model.vocab)

    @property
    def residual(self) -> int:
        """Elements of the residual stream on this rank."""
        return self.shard.residual_tokens * self.model.hidden

    @property
    def input_bytes(self) -> Bytes:
        return float(self.residual * self.dtype.bytes)


def layer(model: Model, training: Training, shard: Shard) -> Layer:
    """One transformer layer. Degrees must divide heads and ffn (the scenario door has checked)."""
    rank = _Rank(model, training, shard)
    return Layer((*_attention(rank), *_mlp(rank)), rank.input_bytes)


def embedding(model: Model, training: Training, shard: Shard) -> Layer:
    """Token lookup (each rank looks up its part of the vocabulary), learned positions, dropout."""
    rank = _Rank(model, training, shard)
    chosen = [_tokens(rank)]
    if model.positions is Positions.LEARNED:
        chosen.append(_positions(rank))
    if model.dropout:
        chosen.append(_residual_wide(rank, "embedding.dropout", streaming.DROPOUT))
    return Layer(tuple(chosen), float(shard.tokens * _TOKEN_ID_BYTES))


def head(model: Model, training: Training, shard: Shard) -> Layer:
    """Final norm, logits, loss. The logits' weight is counted here, tied or not; FP8 leaves the logits in BF16."""
    rank = _Rank(model, training, shard)
    logits = Linear("head.logits", shard.tokens, model.hidden, rank.vocab, rank.dtype)
    loss = streaming.loss(training.loss)
    made = _streamed(Region.SHARDED, "head.loss", rank.dtype, (loss, (loss.over(shard.tokens, rank.vocab),)))
    return Layer(
        (_norm(rank, "head.norm", forks=False), _linear(rank, logits, rank.input_bytes), made), rank.input_bytes
    )


def _attention(rank: _Rank) -> list[Operator]:
    model, shard = rank.model, rank.shard
    chosen = [_norm(rank, "attention.norm"), _qkv(rank)]
    if model.qk_norm:
        chosen.append(_qk_norm(rank))
    if model.positions is Positions.ROTARY:
        chosen.append(_rotary(rank))
    heads = model.heads // shard.tp
    shape = AttentionShape(shard.batch, shard.sequence, shard.keys, heads, rank.kv_heads, model.head_dim, causal=True)
    core = Core(shape, rank.dtype, dropout=model.dropout, fused=rank.training.fused)
    chosen += operators(core, rank.training.attention)
    bias_tokens = shard.residual_tokens if model.linear_bias else 0
    out = Linear("attention.out", shard.tokens, rank.query_width, model.hidden, rank.operand, bias_tokens)
    chosen.append(_linear(rank, out, shard.tokens * rank.query_width * rank.operand.bytes))
    chosen.append(_residual(rank, "attention.residual"))
    return chosen


def _mlp(rank: _Rank) -> list[Operator]:
    model, shard = rank.model, rank.shard
    up_bias = shard.tokens if model.linear_bias else 0
    down_bias = shard.residual_tokens if model.linear_bias else 0
    up = Linear("mlp.up", shard.tokens, model.hidden, rank.up_width, rank.operand, up_bias)
    down = Linear("mlp.down", shard.tokens, rank.ffn, model.hidden, rank.operand, down_bias)
    activation = streaming.activation(model.mlp, fused=rank.training.fused)
    return [
        _norm(rank, "mlp.norm"),
        _up(rank, up),
        _streamed(
            Region.SHARDED, "mlp.activation", rank.dtype, (activation, (activation.over(shard.tokens, rank.ffn),))
        ),
        _down(rank, down),
        _residual(rank, "mlp.residual"),
    ]


def _up(rank: _Rank, up: Linear) -> Operator:
    """The fifth product of a layer; with a gate, the sixth beside it."""
    gated = rank.model.mlp is Mlp.SWIGLU
    return _half_again(
        rank,
        _linear(rank, up, rank.residual * rank.operand.bytes),
        replace(up, outputs=rank.ffn if gated else 0, bias_tokens=0),
    )


def _down(rank: _Rank, down: Linear) -> Operator:
    """The last product of a layer: the seventh with a gate, else the sixth."""
    made = _linear(rank, down, rank.shard.tokens * rank.ffn * rank.operand.bytes)
    seventh = rank.model.mlp is Mlp.SWIGLU
    return _half_again(rank, made, replace(down, outputs=0 if seventh else down.outputs, bias_tokens=0))


def _half_again(rank: _Rank, made: Operator, again: Linear) -> Operator:
    """A linear layer of which selective recomputation by operations runs a part again and keeps the other outputs."""
    whole = made.forward[0].shape
    outputs = whole.n if isinstance(whole, MatmulShape) else 0
    kernels = again.forward(rank.training.precision) if again.outputs else ()
    return replace(made, again=kernels, results=float(again.tokens * (outputs - again.outputs) * rank.dtype.bytes))


def _qkv(rank: _Rank) -> Operator:
    tokens, width = rank.shard.tokens, rank.query_width + 2 * rank.kv_width
    bias_tokens = tokens if rank.model.qkv_bias else 0
    linear = Linear("attention.qkv", tokens, rank.model.hidden, width, rank.operand, bias_tokens)
    made = _linear(rank, linear, rank.residual * rank.operand.bytes)
    made = replace(made, kept=made.kept + tokens * width * rank.dtype.bytes)
    return _half_again(rank, made, replace(linear, outputs=rank.kv_width, bias_tokens=0))  # of q, k, v the second


def _qk_norm(rank: _Rank) -> Operator:
    over = streaming.norm(rank.model.norm, fused=rank.training.fused)
    shapes = tuple(over.over(rows, rank.model.head_dim) for rows in _heads(rank))
    made = _streamed(Region.SHARDED, "attention.qk_norm", rank.dtype, (over, shapes))
    return replace(made, parameters=2 * rank.model.head_dim)


def _rotary(rank: _Rank) -> Operator:
    over = streaming.rotary(fused=rank.training.fused)
    shapes = tuple(over.over(rows, rank.model.head_dim, table=rank.shard.sequence) for rows in _heads(rank))
    return _streamed(Region.SHARDED, "attention.rotary", rank.dtype, (over, shapes))


def _heads(rank: _Rank) -> tuple[int, ...]:
    """Heads of all tokens that one kernel works on: fused those of queries and keys, else each by themselves."""
    queries, keys = rank.shard.tokens * rank.query_width, rank.shard.tokens * rank.kv_width
    parts = (queries + keys,) if rank.training.fused else (queries, keys)
    return tuple(elements // rank.model.head_dim for elements in parts)


def _linear(rank: _Rank, linear: Linear, read: Bytes) -> Operator:
    """A linear layer that keeps its input, of so many bytes."""
    precision = rank.training.precision
    return Operator(
        linear.name,
        Region.SHARDED,
        linear.forward(precision),
        linear.input_gradient(precision),
        linear.weight_gradient(precision, fused=rank.training.fused),
        parameters=linear.parameters,
        kept=float(read),
        waiting=float(read + linear.tokens * linear.outputs * rank.dtype.bytes),
    )


def _streamed(region: Region, name: str, dtype: DType, over: tuple[Streaming, tuple[StreamShape, ...]]) -> Operator:
    """An operator that streams over some shapes, one kernel for each."""
    streams, shapes = over
    return Operator(
        name,
        region,
        tuple(streams.forward_kernel(name, dtype, shape) for shape in shapes),
        tuple(kernel for shape in shapes for kernel in streams.backward_kernels(name, dtype, shape)),
        kept=sum(streams.kept.bytes(dtype, shape.elements) for shape in shapes),
    )


def _residual_wide(rank: _Rank, name: str, over: Streaming) -> Operator:
    shape = over.over(rank.shard.residual_tokens, rank.model.hidden)
    return _streamed(Region.REPLICATED, name, rank.dtype, (over, (shape,)))


def _residual(rank: _Rank, name: str) -> Operator:
    over = streaming.residual(dropout=rank.model.dropout, fused=rank.training.fused)
    return _residual_wide(rank, name, over)


def _norm(rank: _Rank, name: str, *, forks: bool = True) -> Operator:
    """A norm; where the residual forks before it, backward ends with the sum of both gradients."""
    over = streaming.norm(rank.model.norm, fused=rank.training.fused)
    made = _residual_wide(rank, name, over)
    backward, summed = made.input_gradient, streaming.GRADIENT_SUM
    if forks:
        shape = summed.over(rank.shard.residual_tokens, rank.model.hidden)
        backward += (summed.forward_kernel(f"{name}.gradient_sum", rank.dtype, shape),)
    return replace(made, input_gradient=backward, parameters=norm_parameters(rank.model))


def _tokens(rank: _Rank) -> Operator:
    """Lookup; the weight gradient is dense as in PyTorch: zeros, the tokens' rows added, the whole accumulated."""
    tokens, hidden, width = rank.shard.tokens, rank.model.hidden, rank.dtype.bytes
    weights = rank.vocab * hidden
    rows = float(tokens * hidden * width)
    name, shape = "embedding.tokens", StreamShape(Routine.LOOKUP, tokens, hidden, fused=True, table=rank.vocab)
    formats = (rank.dtype, rank.training.precision.gradients)
    return Operator(
        name,
        Region.SHARDED,
        (_lookup(name, rank.dtype, 2 * rows + tokens * _TOKEN_ID_BYTES, shape),),
        weight_gradient=(
            _lookup(f"{name}.weight_gradient", rank.dtype, weights * width + 3 * rows, replace(shape, backward=True)),
            streaming.accumulate(f"{name}.accumulate", formats, rank.vocab, hidden),
        ),
        parameters=weights,
        kept=float(tokens * _TOKEN_ID_BYTES),
        waiting=float(tokens * _TOKEN_ID_BYTES) + rows,
    )


def _positions(rank: _Rank) -> Operator:
    """The table is added to each sequence; its gradient is the sum over sequences."""
    rows = float(rank.residual * rank.dtype.bytes)
    tokens, hidden, table = rank.shard.residual_tokens, rank.model.hidden, rank.model.max_positions
    gradients = rank.training.precision.gradients
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
