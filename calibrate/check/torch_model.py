"""The scenario's model as PyTorch modules.

A decoder-only transformer whose operators are those that `clustersim.model.layers` counts, one for one:
norm, one QKV matmul, rotary or learned positions, attention through SDPA, output matmul, residual, norm, one
matmul for gate and up, activation, down matmul, residual; final norm, logits, loss. The formulas between the
matmuls are those of `calibrate.kernels.formulas`, which are also what is measured. Every call is labelled
with the plan's kernel class (`operator_labels`), so that a profile can be summed by kernels.

The outputs of a matmul that a tensor-parallel rank holds are its own queries, keys and values (or gate and
up), concatenated: the unsharded matrix is that of all ranks, rank by rank, which only permutes heads.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop

from calibrate.check.fused_linear import FusedWgradLinear
from calibrate.check.moe import MoeLayer
from calibrate.check.operator_labels import ATTENTION, LOOKUP, MATMUL, POSITIONS, memory_bound_label, record_label
from calibrate.check.torch_dtypes import TRAINING_DTYPES
from calibrate.kernels import formulas
from clustersim.model import memory_bound as passes
from clustersim.model.attention_spec import FullAttention
from clustersim.model.layer_stack import DenseMlp, LayerSpec, MlpSpec, MlpType, MoeMlp
from clustersim.model.training import AttentionBackend as Core
from clustersim.model.training import FusedKernel, SelectiveRecompute, Training
from clustersim.model.transformer import Norm, PositionEncoding, TransformerModel
from clustersim.parallel.layer_partition import PipelineStage
from clustersim.parallel.plan import Plan

RotaryTables = tuple[Tensor, Tensor]
ROTARY_BASE = 10_000.0  # Su et al. 2021; the value does not affect the time


def _checkpointed(function: Callable[..., Tensor], *operands: Tensor, early_stop: bool) -> Tensor:
    """Run with activation checkpointing; early_stop: recompute only until backward has what it needs."""
    with set_checkpoint_early_stop(early_stop):
        result: Tensor = checkpoint(function, *operands, use_reentrant=False)
    return result


class NormLayer(nn.Module):
    """Layer norm with weight and bias, or RMS norm with a weight; shifted: the layer norm has a learned bias."""

    def __init__(self, norm_type: Norm, width: int, *, fused: bool, shifted: bool = True) -> None:
        super().__init__()
        self.norm_type, self.fused = norm_type, fused
        self.weight = nn.Parameter(torch.ones(width))
        if norm_type is Norm.LAYERNORM and shifted:
            self.bias = nn.Parameter(torch.zeros(width))
        elif norm_type is Norm.LAYERNORM:
            self.register_buffer("bias", torch.zeros(width), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        """Normalize the last dimension."""
        with record_label(memory_bound_label(passes.norm_spec(self.norm_type, fused=self.fused))):
            if self.norm_type is Norm.LAYERNORM:
                return formulas.layernorm(x, self.weight, self.bias)
            return formulas.rmsnorm(x, self.weight, fused=self.fused)


class SelfAttention(nn.Module):
    """QKV projection, attention, and output projection. rotary_tables: None without rotary positions."""

    def __init__(self, plan: Plan, spec: FullAttention, rotary_tables: RotaryTables | None) -> None:
        super().__init__()
        model, training, tp = plan.model, plan.training, plan.layout.tp
        self.model_spec, self.training_spec, self.spec, self.rotary_tables = model, training, spec, rotary_tables
        self.heads, self.kv_heads = spec.heads // tp, spec.kv_heads // tp
        width = (spec.heads + 2 * spec.kv_heads) * spec.head_dim
        self.qkv = FusedWgradLinear(model.hidden, width, bias=spec.qkv_bias, fused=training.is_fully_fused)
        self.out = FusedWgradLinear(
            spec.heads * spec.head_dim, model.hidden, bias=model.linear_bias, fused=training.is_fully_fused
        )
        if spec.qk_norm:
            is_fused = training.fuses(FusedKernel.NORM)
            self.query_norm = NormLayer(model.norm, spec.head_dim, fused=is_fused, shifted=False)
            self.key_norm = NormLayer(model.norm, spec.head_dim, fused=is_fused, shifted=False)

    def forward(self, x: Tensor) -> Tensor:
        """[batch, sequence, hidden] in and out."""
        projected = self.qkv(x).unflatten(-1, (-1, self.spec.head_dim))
        q, k, v = (operand.transpose(1, 2) for operand in self._split_and_rotate(projected))
        if isinstance(self.training_spec.recompute, SelectiveRecompute):
            result = _checkpointed(self._attend, q, k, v, early_stop=self.training_spec.early_stop)
        else:
            result = self._attend(q, k, v)
        output: Tensor = self.out(result.transpose(1, 2).flatten(2))
        return output

    def _split_and_rotate(self, projected: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values from [batch, sequence, all heads, head_dim], normalized and rotated by position."""
        heads, kv_heads = self.heads, self.kv_heads
        if self.rotary_tables is not None and self.training_spec.fuses(FusedKernel.ROTARY) and not self.spec.qk_norm:
            queries_and_keys, v = torch.split(projected, [heads + kv_heads, kv_heads], dim=2)
            q, k = torch.split(self._rotate(queries_and_keys), [heads, kv_heads], dim=2)
            return q, k, v
        q, k, v = torch.split(projected, [heads, kv_heads, kv_heads], dim=2)
        if self.spec.qk_norm:
            q, k = self.query_norm(q), self.key_norm(k)
        return (q, k, v) if self.rotary_tables is None else (self._rotate(q), self._rotate(k), v)

    def _rotate(self, x: Tensor) -> Tensor:
        if self.rotary_tables is None:
            return x
        is_fused = self.training_spec.fuses(FusedKernel.ROTARY)
        with record_label(memory_bound_label(passes.rotary_spec(fused=is_fused))):
            cos, sin = self.rotary_tables
            return formulas.rotary(x.transpose(1, 2), cos, sin, fused=is_fused).transpose(1, 2)

    def _attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if self.training_spec.attention is not Core.STANDARD:
            with record_label(ATTENTION):
                return formulas.attention(q, k, v, causal=True)
        return _unfused_attention(q, k, v, self.training_spec, dropout=self.model_spec.dropout)


def _unfused_attention(q: Tensor, k: Tensor, v: Tensor, training: Training, *, dropout: bool) -> Tensor:
    """Attention that writes its scores to memory; keys and values are repeated for grouped queries."""
    group_size = q.shape[1] // k.shape[1]
    if group_size > 1:
        k, v = k.repeat_interleave(group_size, 1), v.repeat_interleave(group_size, 1)
    with record_label(MATMUL):
        scores = q @ (k / k.shape[-1] ** 0.5).transpose(2, 3)
    with record_label(memory_bound_label(passes.softmax_spec(fused=training.fuses(FusedKernel.SOFTMAX)))):
        weights = formulas.softmax(scores, fused=training.fuses(FusedKernel.SOFTMAX))
    if dropout:
        with record_label(memory_bound_label(passes.SCORE_DROPOUT)):
            weights = formulas.dropout(weights)
    with record_label(MATMUL):
        return weights @ v


class FeedForward(nn.Module):
    """The dense MLP. With SwiGLU `up` computes gate and up in one matmul."""

    def __init__(self, model: TransformerModel, training: Training, spec: DenseMlp) -> None:
        super().__init__()
        self.mlp_type, self.fused = spec.form, training.fuses(FusedKernel.ACTIVATION)
        width = 2 * spec.ffn if spec.form is MlpType.SWIGLU else spec.ffn
        self.up = FusedWgradLinear(model.hidden, width, bias=model.linear_bias, fused=training.is_fully_fused)
        self.down = FusedWgradLinear(spec.ffn, model.hidden, bias=model.linear_bias, fused=training.is_fully_fused)

    def forward(self, x: Tensor) -> Tensor:
        """[batch, sequence, hidden] in and out."""
        hidden = self.up(x)
        with record_label(memory_bound_label(passes.activation_spec(self.mlp_type, fused=self.fused))):
            hidden = (
                formulas.swiglu(hidden, fused=self.fused) if self.mlp_type is MlpType.SWIGLU else formulas.gelu(hidden)
            )
        result: Tensor = self.down(hidden)
        return result


class MoeWithSharedExperts(nn.Module):
    """An MoE layer plus shared experts that every token passes."""

    def __init__(self, plan: Plan, moe: MoeMlp) -> None:
        super().__init__()
        self.fused = plan.training.fuses(FusedKernel.RESIDUAL)
        self.moe = MoeLayer(plan, moe)
        self.shared = FeedForward(plan.model, plan.training, DenseMlp(moe.shared, moe.form))

    def forward(self, x: Tensor) -> Tensor:
        """[batch, sequence, hidden] in and out."""
        routed_output, shared_output = self.moe(x), self.shared(x)
        with record_label(memory_bound_label(passes.residual_spec(dropout=False, fused=self.fused))):
            return formulas.residual_add(routed_output, shared_output)


class TransformerLayer(nn.Module):
    """One transformer layer. recompute: its forward is recomputed before its backward."""

    def __init__(self, plan: Plan, attention: SelfAttention, mlp: nn.Module, *, recompute: bool) -> None:
        super().__init__()
        model, training = plan.model, plan.training
        self.dropout, self.fused, self.recompute = model.dropout, training.fuses(FusedKernel.RESIDUAL), recompute
        self.early_stop = training.early_stop
        self.attention_norm = NormLayer(model.norm, model.hidden, fused=training.fuses(FusedKernel.NORM))
        self.attention = attention
        self.mlp_norm = NormLayer(model.norm, model.hidden, fused=training.fuses(FusedKernel.NORM))
        self.mlp = mlp

    def forward(self, x: Tensor) -> Tensor:
        """[batch, sequence, hidden] in and out; under sequence parallelism, a rank's shard of the sequence."""
        if not self.recompute:
            return self._forward_layer(x)
        return _checkpointed(self._forward_layer, x, early_stop=self.early_stop)

    def _forward_layer(self, x: Tensor) -> Tensor:
        x = self._add_residual(x, self.attention(self.attention_norm(x)))
        return self._add_residual(x, self.mlp(self.mlp_norm(x)))

    def _add_residual(self, x: Tensor, branch: Tensor) -> Tensor:
        with record_label(memory_bound_label(passes.residual_spec(dropout=self.dropout, fused=self.fused))):
            if self.dropout:
                return formulas.residual_dropout(x, branch, fused=self.fused)
            return formulas.residual_add(x, branch)


class TokenEmbedding(nn.Module):
    """Token embedding, and learned positions if the model has them."""

    def __init__(self, model: TransformerModel) -> None:
        super().__init__()
        self.dropout = model.dropout
        self.tokens = nn.Embedding(model.vocab, model.hidden)
        if model.positions is PositionEncoding.LEARNED:
            self.positions = nn.Parameter(torch.zeros(model.max_positions, model.hidden))

    def forward(self, tokens: Tensor) -> Tensor:
        """Tokens [batch, sequence] to [batch, sequence, hidden]."""
        with record_label(LOOKUP):
            x: Tensor = self.tokens(tokens)
        if hasattr(self, "positions"):
            with record_label(POSITIONS):
                x = x + self.positions[: x.shape[1]]
        if self.dropout:
            with record_label(memory_bound_label(passes.DROPOUT)):
                x = formulas.dropout(x)
        return x


class LmHead(nn.Module):
    """Final norm and logits."""

    def __init__(self, model: TransformerModel, training: Training) -> None:
        super().__init__()
        self.norm = NormLayer(model.norm, model.hidden, fused=training.fuses(FusedKernel.NORM))
        self.logits = FusedWgradLinear(model.hidden, model.vocab, bias=False, fused=training.is_fully_fused)

    def forward(self, x: Tensor) -> Tensor:
        """[batch, sequence, hidden] to [batch, sequence, vocabulary]."""
        result: Tensor = self.logits(self.norm(x))
        return result


class TransformerStage(nn.Module):
    """A pipeline stage of the model, or all of it, with embedding and head if the stage has them."""

    def __init__(
        self, embedding: TokenEmbedding | None, layers: Sequence[TransformerLayer], head: LmHead | None, loss: Any
    ) -> None:
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


def build_stage(plan: Plan, stage: PipelineStage) -> TransformerStage:
    """A stage on torch's default device and dtype, with unsharded matrices and one TP rank's heads."""
    model, training = plan.model, plan.training
    model_stage = TransformerStage(
        TokenEmbedding(model) if stage.has_embedding else None,
        list(_build_layers(plan, stage)),
        LmHead(model, training) if stage.has_head else None,
        lambda logits, targets: mean_loss(logits, targets, training),
    )
    tie_embeddings(model_stage, model)
    return model_stage


def _build_layers(plan: Plan, stage: PipelineStage) -> Iterator[TransformerLayer]:
    """A stage's layers; `select_supported` has rejected layers that lack attention or an MLP."""
    rotary_tables = {
        attention: _rotary_tables(plan, attention.head_dim) for attention in plan.model.distinct_attentions
    }
    for group, recompute, _ in plan.layer_runs(stage):
        match group.spec:
            case LayerSpec(FullAttention() as attention, DenseMlp() | MoeMlp() as mlp):
                for _ in range(group.count):
                    yield TransformerLayer(
                        plan,
                        SelfAttention(plan, attention, rotary_tables[attention]),
                        _build_mlp(plan, mlp),
                        recompute=recompute,
                    )


def _build_mlp(plan: Plan, mlp: MlpSpec) -> nn.Module:
    match mlp:
        case DenseMlp():
            return FeedForward(plan.model, plan.training, mlp)
        case MoeMlp(single_dense_mlp=DenseMlp() as dense):
            return FeedForward(plan.model, plan.training, dense)
        case MoeMlp(shared=0):
            return MoeLayer(plan, mlp)
    return MoeWithSharedExperts(plan, mlp)


def tie_embeddings(stage: TransformerStage, model: TransformerModel) -> None:
    """Share the embedding's weight with the logits, if the model ties them and the stage has both."""
    if model.tied_embeddings and stage.embedding is not None and stage.head is not None:
        stage.head.logits.weight = stage.embedding.tokens.weight


def mean_loss(logits: Tensor, targets: Tensor, training: Training) -> Tensor:
    """Mean loss of logits [batch, sequence, vocabulary] and targets [batch, sequence]."""
    with record_label(memory_bound_label(passes.loss_spec(training.loss))):
        return formulas.cross_entropy(logits.flatten(0, 1), targets.flatten(), training.loss)


def _rotary_tables(plan: Plan, head_dim: int) -> RotaryTables | None:
    """Cosines and sines [sequence, head_dim] of rotary positions, both halves equal; None for learned positions."""
    if plan.model.positions is not PositionEncoding.ROTARY:
        return None
    dtype = TRAINING_DTYPES[plan.training.recipe.activations]
    dimensions = torch.arange(0, head_dim, 2, dtype=torch.float32)
    half_angles = torch.outer(
        torch.arange(plan.training.sequence, dtype=torch.float32), ROTARY_BASE ** (-dimensions / head_dim)
    )
    angles = torch.cat((half_angles, half_angles), dim=-1)
    return angles.cos().to(dtype), angles.sin().to(dtype)
