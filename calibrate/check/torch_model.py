"""What model does a scenario train, as PyTorch modules?

A decoder-only transformer whose operators are those that `clustersim.model.layers` counts, one for one: norm, one
product for queries, keys and values, rotary or learned positions, attention through SDPA, output product, residual,
norm, one product for gate and up, activation, product down, residual; final norm, logits, loss. The formulas between
the products are `calibrate.kernels.formulas`, which are also what is measured. Every call is labelled with what the
plan calls it (`labels`), so that a profile can be folded by kernels.

The outputs of a product that a tensor-parallel rank holds are its own queries, keys and values (or gate and up) one
behind the other: the whole matrix is that of all ranks, rank by rank, which permutes heads and nothing else.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop

from calibrate.check.fused_linear import Linear
from calibrate.check.moe import Mixture
from calibrate.check.operator_labels import ATTENTION, LOOKUP, POSITIONS, PRODUCT, labelled, streaming
from calibrate.check.torch_dtypes import TORCH
from calibrate.kernels import formulas
from clustersim.model import memory_bound as passes
from clustersim.model.layer_stack import DenseMlp, FullAttention, LayerSpec, MlpSpec, MlpType, MoeMlp
from clustersim.model.training import AttentionBackend as Core
from clustersim.model.training import SelectiveRecompute, Training
from clustersim.model.transformer import Norm, PositionEncoding, TransformerModel
from clustersim.parallel.layer_partition import PipelineStage
from clustersim.parallel.plan import Plan

Angles = tuple[Tensor, Tensor]
ROTARY_BASE = 10_000.0  # Su et al. 2021; the value changes no time


def _again(run: Callable[..., Tensor], *operands: Tensor, early_stop: bool) -> Tensor:
    """Run a part of the model, and again before its backward: to the end, or until backward has what it needs."""
    with set_checkpoint_early_stop(early_stop):
        result: Tensor = checkpoint(run, *operands, use_reentrant=False)
    return result


class NormLayer(nn.Module):
    """Layer norm with weight and bias, or RMS norm with a weight; shifted: whether a layer norm has a bias to learn."""

    def __init__(self, form: Norm, width: int, *, fused: bool, shifted: bool = True) -> None:
        super().__init__()
        self.form, self.fused = form, fused
        self.weight = nn.Parameter(torch.ones(width))
        if form is Norm.LAYERNORM and shifted:
            self.bias = nn.Parameter(torch.zeros(width))
        elif form is Norm.LAYERNORM:
            self.register_buffer("bias", torch.zeros(width), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        """Normalise the last dimension."""
        with labelled(streaming(passes.norm_spec(self.form, fused=self.fused))):
            if self.form is Norm.LAYERNORM:
                return formulas.layernorm(x, self.weight, self.bias)
            return formulas.rmsnorm(x, self.weight, fused=self.fused)


class Attention(nn.Module):
    """Queries, keys and values, attention, and its output. angles: of rotary positions, if they are."""

    def __init__(self, plan: Plan, spec: FullAttention, angles: Angles | None) -> None:
        super().__init__()
        model, training, tp = plan.model, plan.training, plan.layout.tp
        self.model, self.training_plan, self.spec, self.angles = model, training, spec, angles
        self.heads, self.kv_heads = spec.heads // tp, spec.kv_heads // tp
        width = (spec.heads + 2 * spec.kv_heads) * spec.head_dim
        self.qkv = Linear(model.hidden, width, bias=spec.qkv_bias, fused=training.fused)
        self.out = Linear(spec.heads * spec.head_dim, model.hidden, bias=model.linear_bias, fused=training.fused)
        if spec.qk_norm:
            normed = {"fused": training.fused, "shifted": False}
            self.query_norm = NormLayer(model.norm, spec.head_dim, **normed)
            self.key_norm = NormLayer(model.norm, spec.head_dim, **normed)

    def forward(self, x: Tensor) -> Tensor:
        """[batch, sequence, hidden] both ways."""
        made = self.qkv(x).unflatten(-1, (-1, self.spec.head_dim))
        q, k, v = (part.transpose(1, 2) for part in self._placed(made))
        if isinstance(self.training_plan.recompute, SelectiveRecompute):
            result = _again(self._core, q, k, v, early_stop=self.training_plan.early_stop)
        else:
            result = self._core(q, k, v)
        made_out: Tensor = self.out(result.transpose(1, 2).flatten(2))
        return made_out

    def _placed(self, made: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values of [batch, sequence, all heads, head_dim], normalised and turned by position."""
        heads, kv_heads = self.heads, self.kv_heads
        if self.angles is not None and self.training_plan.fused and not self.spec.qk_norm:
            both, v = torch.split(made, [heads + kv_heads, kv_heads], dim=2)
            q, k = torch.split(self._turned(both), [heads, kv_heads], dim=2)
            return q, k, v
        q, k, v = torch.split(made, [heads, kv_heads, kv_heads], dim=2)
        if self.spec.qk_norm:
            q, k = self.query_norm(q), self.key_norm(k)
        return (q, k, v) if self.angles is None else (self._turned(q), self._turned(k), v)

    def _turned(self, x: Tensor) -> Tensor:
        if self.angles is None:
            return x
        with labelled(streaming(passes.rotary_spec(fused=self.training_plan.fused))):
            cos, sin = self.angles
            return formulas.rotary(x.transpose(1, 2), cos, sin, fused=self.training_plan.fused).transpose(1, 2)

    def _core(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if self.training_plan.attention is not Core.STANDARD:
            with labelled(ATTENTION):
                return formulas.attention(q, k, v, causal=True)
        return _standard(q, k, v, self.training_plan, dropout=self.model.dropout)


def _standard(q: Tensor, k: Tensor, v: Tensor, training: Training, *, dropout: bool) -> Tensor:
    """Attention that writes its scores to memory; keys and values are repeated for the queries that share them."""
    shared = q.shape[1] // k.shape[1]
    if shared > 1:
        k, v = k.repeat_interleave(shared, 1), v.repeat_interleave(shared, 1)
    with labelled(PRODUCT):
        scores = q @ (k / k.shape[-1] ** 0.5).transpose(2, 3)
    with labelled(streaming(passes.softmax_spec(fused=training.fused))):
        weights = formulas.softmax(scores, fused=training.fused)
    if dropout:
        with labelled(streaming(passes.SCORE_DROPOUT)):
            weights = formulas.dropout(weights)
    with labelled(PRODUCT):
        return weights @ v


class FeedForward(nn.Module):
    """The MLP. With SwiGLU `up` makes gate and up in one product."""

    def __init__(self, model: TransformerModel, training: Training, spec: DenseMlp) -> None:
        super().__init__()
        self.form, self.fused = spec.form, training.fused
        width = 2 * spec.ffn if spec.form is MlpType.SWIGLU else spec.ffn
        self.up = Linear(model.hidden, width, bias=model.linear_bias, fused=training.fused)
        self.down = Linear(spec.ffn, model.hidden, bias=model.linear_bias, fused=training.fused)

    def forward(self, x: Tensor) -> Tensor:
        """[batch, sequence, hidden] both ways."""
        made = self.up(x)
        with labelled(streaming(passes.activation_spec(self.form, fused=self.fused))):
            made = formulas.swiglu(made, fused=self.fused) if self.form is MlpType.SWIGLU else formulas.gelu(made)
        result: Tensor = self.down(made)
        return result


class Beside(nn.Module):
    """A mixture, and shared experts that every token passes."""

    def __init__(self, plan: Plan, routed: MoeMlp) -> None:
        super().__init__()
        self.fused = plan.training.fused
        self.routed = Mixture(plan, routed)
        self.shared = FeedForward(plan.model, plan.training, DenseMlp(routed.shared, routed.form))

    def forward(self, x: Tensor) -> Tensor:
        """[batch, sequence, hidden] both ways."""
        made, shared = self.routed(x), self.shared(x)
        with labelled(streaming(passes.residual_spec(dropout=False, fused=self.fused))):
            return formulas.residual(made, shared)


class Layer(nn.Module):
    """One transformer layer. again: its forward is run again before its backward."""

    def __init__(self, plan: Plan, attention: Attention, mlp: nn.Module, *, again: bool) -> None:
        super().__init__()
        model, training = plan.model, plan.training
        self.dropout, self.fused, self.again = model.dropout, training.fused, again
        self.early_stop = training.early_stop
        self.attention_norm = NormLayer(model.norm, model.hidden, fused=training.fused)
        self.attention = attention
        self.mlp_norm = NormLayer(model.norm, model.hidden, fused=training.fused)
        self.mlp = mlp

    def forward(self, x: Tensor) -> Tensor:
        """[batch, sequence, hidden] both ways; the sequence is a rank's own part under sequence parallelism."""
        if not self.again:
            return self._run(x)
        return _again(self._run, x, early_stop=self.early_stop)

    def _run(self, x: Tensor) -> Tensor:
        x = self._joined(x, self.attention(self.attention_norm(x)))
        return self._joined(x, self.mlp(self.mlp_norm(x)))

    def _joined(self, x: Tensor, branch: Tensor) -> Tensor:
        with labelled(streaming(passes.residual_spec(dropout=self.dropout, fused=self.fused))):
            if self.dropout:
                return formulas.residual_dropout(x, branch, fused=self.fused)
            return formulas.residual(x, branch)


class Embedding(nn.Module):
    """Tokens, and learned positions if the model has them."""

    def __init__(self, model: TransformerModel) -> None:
        super().__init__()
        self.dropout = model.dropout
        self.tokens = nn.Embedding(model.vocab, model.hidden)
        if model.positions is PositionEncoding.LEARNED:
            self.positions = nn.Parameter(torch.zeros(model.max_positions, model.hidden))

    def forward(self, tokens: Tensor) -> Tensor:
        """Tokens [batch, sequence] to [batch, sequence, hidden]."""
        with labelled(LOOKUP):
            x: Tensor = self.tokens(tokens)
        if hasattr(self, "positions"):
            with labelled(POSITIONS):
                x = x + self.positions[: x.shape[1]]
        if self.dropout:
            with labelled(streaming(passes.DROPOUT)):
                x = formulas.dropout(x)
        return x


class Head(nn.Module):
    """Final norm and logits."""

    def __init__(self, model: TransformerModel, training: Training) -> None:
        super().__init__()
        self.norm = NormLayer(model.norm, model.hidden, fused=training.fused)
        self.logits = Linear(model.hidden, model.vocab, bias=False, fused=training.fused)

    def forward(self, x: Tensor) -> Tensor:
        """[batch, sequence, hidden] to [batch, sequence, vocabulary]."""
        result: Tensor = self.logits(self.norm(x))
        return result


class Transformer(nn.Module):
    """A stage of the model, or all of it: what comes before its layers and what after, if it has that."""

    def __init__(self, embedding: Embedding | None, layers: Sequence[Layer], head: Head | None, loss: Any) -> None:
        super().__init__()
        self.embedding, self.layers, self.head, self.loss = embedding, nn.ModuleList(layers), head, loss

    def forward(self, x: Tensor, targets: Tensor | None = None) -> Tensor:
        """Tokens [batch, sequence] or activations to activations, logits, or, with targets, the mean loss."""
        if self.embedding is not None:
            x = self.embedding(x)
        for layer in self.layers:
            x = layer(x)
        if self.head is not None:
            x = self.head(x)
        if targets is None:
            return x
        loss: Tensor = self.loss(x, targets)
        return loss


def build(plan: Plan, stage: PipelineStage) -> Transformer:
    """A stage in the default device and format of torch, matrices whole, heads those of one tensor-parallel rank."""
    model, training = plan.model, plan.training
    made = Transformer(
        Embedding(model) if stage.has_embedding else None,
        list(_layers(plan, stage)),
        Head(model, training) if stage.has_head else None,
        lambda logits, targets: loss(logits, targets, training),
    )
    tie(made, model)
    return made


def _layers(plan: Plan, stage: PipelineStage) -> Iterator[Layer]:
    """A stage's layers; `supported` has refused those that lack a part."""
    angles = {attention: _angles(plan, attention.head_dim) for attention in plan.model.distinct_attentions}
    for run, again, _ in plan.layer_runs(stage):
        match run.spec:
            case LayerSpec(FullAttention() as attention, DenseMlp() | MoeMlp() as mlp):
                for _ in range(run.count):
                    yield Layer(plan, Attention(plan, attention, angles[attention]), _mlp(plan, mlp), again=again)


def _mlp(plan: Plan, mlp: MlpSpec) -> nn.Module:
    match mlp:
        case DenseMlp():
            return FeedForward(plan.model, plan.training, mlp)
        case MoeMlp(single_dense_mlp=DenseMlp() as only):
            return FeedForward(plan.model, plan.training, only)
        case MoeMlp(shared=0):
            return Mixture(plan, mlp)
    return Beside(plan, mlp)


def tie(made: Transformer, model: TransformerModel) -> None:
    """Let the logits' matrix be the embedding's, where the model has them tied and the stage both."""
    if model.tied_embeddings and made.embedding is not None and made.head is not None:
        made.head.logits.weight = made.embedding.tokens.weight


def loss(logits: Tensor, targets: Tensor, training: Training) -> Tensor:
    """Mean loss of logits [batch, sequence, vocabulary] and targets [batch, sequence]."""
    with labelled(streaming(passes.loss_spec(training.loss))):
        return formulas.cross_entropy(logits.flatten(0, 1), targets.flatten(), training.loss)


def _angles(plan: Plan, head_dim: int) -> Angles | None:
    """Cosines and sines [sequence, head_dim] of rotary positions, both halves alike; None where they are learned."""
    if plan.model.positions is not PositionEncoding.ROTARY:
        return None
    dtype = TORCH[plan.training.recipe.activations]
    places = torch.arange(0, head_dim, 2, dtype=torch.float32)
    turns = torch.outer(torch.arange(plan.training.sequence, dtype=torch.float32), ROTARY_BASE ** (-places / head_dim))
    both = torch.cat((turns, turns), dim=-1)
    return both.cos().to(dtype), both.sin().to(dtype)
