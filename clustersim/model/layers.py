"""Which operators does a transformer layer have on one rank? With the embedding before and the head after them.

Megatron's tensor parallelism: queries, keys, values and the first MLP matrix are column-parallel, the
attention output and the second MLP matrix row-parallel, embedding and logits vocabulary-parallel (rounded
up where tp does not divide the vocabulary); norms, residuals and dropout are replicated, or split by
sequence under sequence parallelism. Collectives are not operators: lowering inserts them where the region
changes. With more tp ranks than key/value heads, each rank holds one full key/value head.

Saved activations are counted as in Korthikanti et al. 2022 (arXiv:2205.05198) section 4, each tensor
once, by the operator that reads it: inputs of norms, of linear layers and of the activation, queries,
keys and values (after rotary positions, by `attention.qkv`), one byte per dropped element, FP32 logits;
not the norms' statistics (smaller by a factor of hidden). Statistics of norms over all heads (OLMo 2) are
not exchanged between tensor-parallel ranks. In a parallel block both branches are one sharded region:
their outputs are summed before they leave it, as are the gradients of their common input. Under sequence
parallelism the inputs of `attention.qkv`, `mlp.up` and `head.logits` are saved split, which costs one
more all-gather in backward (section 4.2.2).
"""

from dataclasses import replace
from functools import lru_cache
from typing import Final

from clustersim.common.dtypes import DType
from clustersim.common.units import Bytes
from clustersim.model import memory_bound
from clustersim.model.frozen_layers import train_alone
from clustersim.model.kernels import Kernel, KernelKind, MemoryBoundOp, MemoryBoundShape
from clustersim.model.layer_stack import BlockForm, DenseMlp, LayerSpec, MoeMlp
from clustersim.model.linear import LinearLayer
from clustersim.model.linear_loss import RECOMPUTING_LOSSES, recomputing_loss_operators
from clustersim.model.lora_layers import apply_lora
from clustersim.model.memory_bound import MemoryBoundSpec
from clustersim.model.mixers.registry import registered_mixer
from clustersim.model.mlp import mlp_operators
from clustersim.model.moe_layer import moe_operators
from clustersim.model.mtp import concat_operator, mtp_input_bytes, mtp_operators
from clustersim.model.operators import (
    DENSE,
    INDEXER,
    LOW_PRECISION_LAYERS,
    MATRICES,
    LayerOperators,
    LayerShard,
    Operator,
    ParallelRegion,
    RegionInput,
    assign_module,
    mark_module_reader,
)
from clustersim.model.optimizer_kernels import gradient_norm_kernels, optimizer_step_kernels
from clustersim.model.overheads import Accumulation
from clustersim.model.precision_recipe import MatmulFormats
from clustersim.model.recompute_modules import ModuleMembership, RecomputeModule
from clustersim.model.sharded_layer import (
    RankContext,
    keep_gathered_inputs,
    linear_operator,
    memory_bound_operator,
    norm_operator,
    residual_add_operator,
    residual_fork_operator,
    residual_stream_operator,
)
from clustersim.model.training import FusedKernel, Training
from clustersim.model.transformer import PositionEncoding, TransformerModel

__all__ = [
    "LayerOperators",
    "LayerShard",
    "Operator",
    "ParallelRegion",
    "embedding_layer",
    "gradient_norm_kernels",
    "head_layer",
    "optimizer_step_kernels",
    "transformer_layer",
]

_TOKEN_ID_BYTES = 8  # torch.long


_CACHE_SIZE: Final = 256
"""Cached layers: the candidates of a layout search differ in few settings, and mostly not in their layers."""


@lru_cache(maxsize=_CACHE_SIZE)
def transformer_layer(
    model: TransformerModel, spec: LayerSpec, training: Training, shard: LayerShard
) -> LayerOperators:
    """The operators of one transformer layer. Degrees must divide heads and ffn (the scenario checks)."""
    rank = RankContext(model, training.high_precision if spec.high_precision else training, shard)
    operators = _layer_operators(rank, spec, _mixer_operators(rank, spec), _mlp_operators(rank, spec))
    input_bytes = rank.residual_bytes
    if spec.is_mtp:
        operators, input_bytes = mtp_operators(rank, operators), mtp_input_bytes(rank)
    if (group := _layer_group(rank.training)) != DENSE:
        operators = tuple(
            replace(operator, parameter_group=group) if operator.parameter_group == DENSE else operator
            for operator in operators
        )
    layer = LayerOperators(keep_gathered_inputs(rank, operators), input_bytes)
    return _as_trained(layer, RankContext(model, training, shard))


def _as_trained(layer: LayerOperators, rank: RankContext) -> LayerOperators:
    """The layer with adapters, or with gradients of indexers alone, if that is what is trained."""
    if rank.model.trains_indexer_only:
        return train_alone(layer, INDEXER)
    return apply_lora(layer, rank.training, rank.shard)


def _layer_group(training: Training) -> str:
    """Parameter group of the dense weights of layers, where it is not that of the ends."""
    if training.recipe.has_matrix_formats:
        return LOW_PRECISION_LAYERS
    return MATRICES if training.orthogonalizes_dense else DENSE


def _layer_operators(
    rank: RankContext, spec: LayerSpec, mixer: list[Operator], mlp: list[Operator]
) -> tuple[Operator, ...]:
    if spec.block.is_parallel and mixer and mlp:
        return (*_parallel_block(rank, spec.block, mixer, mlp),)
    starts_linear = spec.mixer is not None and registered_mixer(spec.mixer).starts_linear
    branches = {
        "mixer" if spec.attention is None else "attention": (mixer, starts_linear),
        "mlp": (mlp, isinstance(spec.mlp, DenseMlp)),
    }
    return tuple(
        operator
        for name, (branch, is_plain) in branches.items()
        if branch
        for operator in _add_residual(
            rank, spec.block, name, _add_norm(rank, spec.block, name, branch, starts_linear=is_plain)
        )
    )


def _add_residual(rank: RankContext, block: BlockForm, name: str, branch: list[Operator]) -> list[Operator]:
    """A residual branch, followed by its post-norm, if any, and the residual add."""
    post_norm = [norm_operator(rank, f"{name}.post_norm", forks=False)] if block.has_post_norm else []
    return [*branch, *post_norm, residual_add_operator(rank, f"{name}.residual")]


def _add_norm(
    rank: RankContext, block: BlockForm, name: str, branch: list[Operator], *, starts_linear: bool
) -> list[Operator]:
    """A residual branch and the norm before it.

    starts_linear: a linear layer is first, which the norm may be fused into.
    """
    if not block.has_pre_norm:
        return [residual_fork_operator(rank, f"{name}.fork"), *branch]
    if not (starts_linear and rank.training.overheads.norm_in_linear):
        return [_module_norm(rank, f"{name}.norm"), *mark_module_reader(branch, RecomputeModule.LAYERNORM)]
    first, *remaining = branch
    memberships = tuple(ModuleMembership(membership.module) for membership in first.memberships)
    norm = replace(norm_operator(rank, f"{name}.norm"), memberships=first.memberships)
    return [norm, replace(first, memberships=memberships), *remaining]


def _module_norm(rank: RankContext, name: str) -> Operator:
    """A norm before a branch, as a recomputable module."""
    (operator,) = assign_module([norm_operator(rank, name)], RecomputeModule.LAYERNORM, rank.residual_bytes)
    return operator


def _parallel_block(
    rank: RankContext, block: BlockForm, attention: list[Operator], mlp: list[Operator]
) -> list[Operator]:
    """A parallel block: attention and MLP read the same input; what both save of it is counted once."""
    (qkv, *attention_rest), (up, *mlp_rest) = (
        mark_module_reader(branch, RecomputeModule.LAYERNORM) for branch in (attention, mlp)
    )
    total = replace(_branch_sum(rank, "block.sum"), region=ParallelRegion.SHARDED)
    residual = residual_add_operator(rank, "block.residual")
    if block is BlockForm.PARALLEL_NORMS:
        attention_norm, mlp_norm = _module_norm(rank, "attention.norm"), _module_norm(rank, "mlp.norm")
        mlp_norm = replace(
            mlp_norm,
            saved_bytes=mlp_norm.saved_bytes - rank.residual_bytes,
            memberships=(ModuleMembership(RecomputeModule.LAYERNORM),),
        )
        return [
            attention_norm,
            mlp_norm,
            qkv,
            *attention_rest,
            replace(up, region_input=RegionInput.OTHER),
            *mlp_rest,
            total,
            residual,
        ]
    shared_bytes = rank.shared_input_bytes(rank.residual_elements)
    gradient_sum = _branch_sum(rank, "block.gradient_sum").forward
    qkv = replace(qkv, input_gradient=(*qkv.input_gradient, *gradient_sum))
    memberships = tuple(
        ModuleMembership(membership.module) for membership in up.memberships
    )  # which is the input of the MLP's module, too
    up = replace(
        up,
        region_input=RegionInput.SAME,
        saved_bytes=up.saved_bytes - shared_bytes,
        deferred_wgrad_bytes=up.deferred_wgrad_bytes - shared_bytes,
        wgrad_input_bytes=up.wgrad_input_bytes - shared_bytes,
        memberships=memberships,
    )
    return [_module_norm(rank, "block.norm"), qkv, *attention_rest, up, *mlp_rest, total, residual]


def _branch_sum(rank: RankContext, name: str) -> Operator:
    """The sum of both branches' outputs for all tokens of this rank; the gradient passes unchanged."""
    spec = memory_bound.residual_spec(dropout=False, fused=rank.training.fuses(FusedKernel.RESIDUAL))
    return memory_bound_operator(
        ParallelRegion.REPLICATED, name, rank.dtype, spec, (spec.shape_for(rank.shard.tokens, rank.model.hidden),)
    )


@lru_cache(maxsize=_CACHE_SIZE)
def embedding_layer(model: TransformerModel, training: Training, shard: LayerShard) -> LayerOperators:
    """Token lookup (each rank looks up its part of the vocabulary), learned positions, norm, dropout."""
    rank = RankContext(model, training, shard)
    operators = [_token_embedding(rank)]
    if model.positions is PositionEncoding.LEARNED:
        operators.append(_position_embedding(rank))
    if model.embedding_norm:
        operators.append(norm_operator(rank, "embedding.norm", forks=False))
    if model.dropout:
        operators.append(residual_stream_operator(rank, "embedding.dropout", memory_bound.DROPOUT))
    return _as_trained(LayerOperators(tuple(operators), float(shard.tokens * _TOKEN_ID_BYTES)), rank)


@lru_cache(maxsize=_CACHE_SIZE)
def head_layer(model: TransformerModel, training: Training, shard: LayerShard) -> LayerOperators:
    """Final norm, logits, loss.

    The logits' weight is counted here, tied or not; with FP8 the logits stay in BF16.
    Each multi-token prediction (MTP) layer has logits and a loss too, with the same weight; the hidden states
    of all are concatenated (Megatron-LM, megatron/core/transformer/multi_token_prediction.py,
    `process_mtp_loss`). The final norm is counted here, too, which Megatron-LM runs with the last layer of
    the stack.
    """
    rank, mtp_count = RankContext(model, training, shard), model.mtp_layers
    operators = [norm_operator(rank, "head.norm", forks=False)]
    if mtp_count:
        operators.append(concat_operator(rank, "head.concat", 1 + mtp_count))
    first_logits, *remaining = _logits_and_loss(rank)
    operators += [first_logits, *remaining]
    # backward runs the first one last, which completes the weight gradient
    mtp_logits = replace(first_logits, parameter_count=0, region_input=RegionInput.OTHER, linear=None)
    operators += mtp_count * [mtp_logits, *remaining]
    return _as_trained(LayerOperators(keep_gathered_inputs(rank, operators), rank.residual_bytes), rank)


def _logits_and_loss(rank: RankContext) -> list[Operator]:
    """Logits and loss of one hidden state per token."""
    model, training, shard = rank.model, rank.training, rank.shard
    bias_tokens = shard.tokens if model.head_bias else 0
    logits = LinearLayer(
        "head.logits", shard.tokens, model.hidden, rank.vocab_rows, MatmulFormats.uniform(rank.dtype), bias_tokens
    )
    if training.loss in RECOMPUTING_LOSSES:
        return recomputing_loss_operators(rank, logits)
    operators = [linear_operator(rank, logits, rank.residual_bytes)]
    if model.final_logit_softcapping:
        softcap = memory_bound.softcap_spec(fused=training.fuses(FusedKernel.ACTIVATION))
        operators.append(_logits_operator(rank, "head.softcap", softcap))
    return [*operators, _logits_operator(rank, "head.loss", memory_bound.loss_spec(training.loss))]


def _logits_operator(rank: RankContext, name: str, op_spec: MemoryBoundSpec) -> Operator:
    return memory_bound_operator(
        ParallelRegion.SHARDED, name, rank.dtype, op_spec, (op_spec.shape_for(rank.shard.tokens, rank.vocab_rows),)
    )


def _mlp_operators(rank: RankContext, spec: LayerSpec) -> list[Operator]:
    match spec.mlp:
        case DenseMlp() as mlp:
            return assign_module(
                mlp_operators(rank, mlp, after_norm=_has_fused_norm(rank, spec)),
                RecomputeModule.MLP,
                rank.residual_bytes,
            )
        case MoeMlp(single_dense_mlp=DenseMlp() as mlp):
            return assign_module(
                mlp_operators(rank, mlp, after_norm=_has_fused_norm(rank, spec)),
                RecomputeModule.MLP,
                rank.residual_bytes,
            )
        case MoeMlp() as moe:
            return assign_module(moe_operators(rank, moe), RecomputeModule.MOE, rank.residual_bytes)
    return []


def _mixer_operators(rank: RankContext, spec: LayerSpec) -> list[Operator]:
    if spec.mixer is None:
        return []
    return registered_mixer(spec.mixer).operators(rank, spec.mixer, after_norm=_has_fused_norm(rank, spec))


def _has_fused_norm(rank: RankContext, spec: LayerSpec) -> bool:
    """Whether a norm is fused into the first linear layer of a mixer that starts with one, or of a dense MLP."""
    return spec.block.has_pre_norm and not spec.block.is_parallel and rank.training.overheads.norm_in_linear


def _token_embedding(rank: RankContext) -> Operator:
    """Token lookup; its weight gradient is dense as in PyTorch: zeros, rows added, the table accumulated."""
    if rank.training.overheads.embedding_matmul:
        return _embedding_matmul(rank)
    tokens, hidden, width = rank.shard.tokens, rank.model.hidden, rank.dtype.bytes
    weights = rank.vocab_rows * hidden
    row_bytes = float(tokens * hidden * width)
    name, shape = (
        "embedding.tokens",
        MemoryBoundShape(MemoryBoundOp.LOOKUP, tokens, hidden, fused=True, table=rank.vocab_rows),
    )
    gradients, accumulation = rank.training.recipe.weight_formats.gradients, rank.training.accumulation
    gradient_accumulation = (
        Accumulation.ADDED if accumulation is Accumulation.FUSED else accumulation
    )  # no matmul produces it
    accumulate = memory_bound.accumulate_kernels(
        f"{name}.accumulate",
        (rank.vocab_rows, hidden),
        gradient_dtype=rank.dtype,
        accumulator_dtype=gradients,
        accumulation=gradient_accumulation,
    )
    return Operator(
        name,
        ParallelRegion.SHARDED,
        (_lookup_kernel(name, rank.dtype, 2 * row_bytes + tokens * _TOKEN_ID_BYTES, shape),),
        weight_gradient=(
            _lookup_kernel(
                f"{name}.weight_gradient", rank.dtype, weights * width + 3 * row_bytes, replace(shape, backward=True)
            ),
            *accumulate,
        ),
        parameter_count=weights,
        saved_bytes=float(tokens * _TOKEN_ID_BYTES),
        deferred_wgrad_bytes=float(tokens * _TOKEN_ID_BYTES) + row_bytes,
    )


def _embedding_matmul(rank: RankContext) -> Operator:
    """Token lookup as a matmul of one-hot rows, which are written for forward and again for the weight gradient."""
    tokens, name = rank.shard.tokens, "embedding.tokens"
    linear = LinearLayer(name, tokens, rank.vocab_rows, rank.model.hidden, MatmulFormats.uniform(rank.dtype))
    recipe, accumulation = rank.training.recipe, rank.training.accumulation
    shape = MemoryBoundShape(MemoryBoundOp.LOOKUP, tokens, rank.vocab_rows, fused=True, table=rank.vocab_rows)
    token_bytes = float(tokens * _TOKEN_ID_BYTES)
    one_hot_bytes = float(tokens * rank.vocab_rows * rank.dtype.bytes) + token_bytes
    return Operator(
        name,
        ParallelRegion.SHARDED,
        (_lookup_kernel(f"{name}.one_hot", rank.dtype, one_hot_bytes, shape), *linear.forward(recipe)),
        weight_gradient=(
            _lookup_kernel(f"{name}.one_hot", rank.dtype, one_hot_bytes, shape),
            *linear.weight_gradient(recipe, accumulation),
        ),
        parameter_count=linear.parameter_count,
        saved_bytes=token_bytes,
        deferred_wgrad_bytes=token_bytes + float(tokens * rank.model.hidden * rank.dtype.bytes),
    )


def _position_embedding(rank: RankContext) -> Operator:
    """The position table is added to each sequence; its gradient is the sum over sequences."""
    row_bytes = float(rank.residual_elements * rank.dtype.bytes)
    tokens, hidden, table = rank.shard.residual_tokens, rank.model.hidden, rank.model.position_table_rows
    gradients = rank.training.recipe.weight_formats.gradients
    shape = MemoryBoundShape(MemoryBoundOp.POSITIONS, tokens, hidden, fused=True, table=table, formats=(gradients,))
    gradient_bytes = row_bytes + 2.0 * table * hidden * gradients.bytes
    name, backward = "embedding.positions", replace(shape, backward=True)
    return Operator(
        name,
        ParallelRegion.REPLICATED,
        (_lookup_kernel(name, rank.dtype, 3 * row_bytes, shape),),
        weight_gradient=(_lookup_kernel(f"{name}.weight_gradient", rank.dtype, gradient_bytes, backward),),
        parameter_count=table * hidden,
    )


def _lookup_kernel(name: str, dtype: DType, moved_bytes: Bytes, shape: MemoryBoundShape) -> Kernel:
    return Kernel(name, KernelKind.EMBEDDING, dtype, flops=0.0, bytes=moved_bytes, shape=shape)
