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
from clustersim.model.conditioning_layers import conditioning_operators
from clustersim.model.frozen_layers import apply_gradient_flow, train_alone
from clustersim.model.gradient_flow import GradientFlow
from clustersim.model.kernels import Kernel, KernelKind, MemoryBoundOp, MemoryBoundShape
from clustersim.model.layer_blocks import LayerBranches, block_operators, join_streams
from clustersim.model.layer_stack import DenseMlp, LayerSpec, MoeMlp
from clustersim.model.linear import LinearLayer
from clustersim.model.linear_loss import LOSSES_BY_PART, loss_operators_by_part
from clustersim.model.lora_layers import apply_lora
from clustersim.model.memory_bound import MemoryBoundSpec
from clustersim.model.mixers.registry import registered_mixer
from clustersim.model.mlp import mlp_operators
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
    TpCollective,
    TpCollectives,
    TpCombine,
    assign_module,
    label_layer,
)
from clustersim.model.optimizer_kernels import gradient_norm_kernels, optimizer_step_kernels
from clustersim.model.overheads import Accumulation
from clustersim.model.precision_recipe import MatmulFormats
from clustersim.model.recompute_modules import RecomputeModule
from clustersim.model.sharded_layer import (
    RankContext,
    keep_gathered_inputs,
    linear_operator,
    memory_bound_operator,
    norm_operator,
    residual_add_operator,
    residual_stream_operator,
)
from clustersim.model.tiled_mlp import tiled_mlp_operators
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
_SHIFT_PASSES: Final = (5, 8)  # shift (2) and a sum (3); backward: 3 and 2, and a sum of gradients


_CACHE_SIZE: Final = 256
"""Cached layers: the candidates of a layout search differ in few settings, and mostly not in their layers."""


@lru_cache(maxsize=_CACHE_SIZE)
def transformer_layer(
    model: TransformerModel, spec: LayerSpec, training: Training, shard: LayerShard
) -> LayerOperators:
    """The operators of one transformer layer. Degrees must divide heads and ffn (the scenario checks)."""
    rank = RankContext(model, training.high_precision if spec.high_precision else training, shard)
    operators = _all_operators(rank, spec)
    input_bytes = rank.residual_bytes
    if spec.is_mtp:
        operators, input_bytes = mtp_operators(rank, operators), mtp_input_bytes(rank)
    if (group := _layer_group(rank.training)) != DENSE:
        operators = tuple(
            replace(operator, parameter_group=group) if operator.parameter_group == DENSE else operator
            for operator in operators
        )
    layer = LayerOperators(keep_gathered_inputs(rank, operators), input_bytes)
    return _finish_layer(rank, layer, model.gradients.layers)


def _all_operators(rank: RankContext, spec: LayerSpec) -> tuple[Operator, ...]:
    """The operators of a layer; of a double-stream block those of both streams, around one attention core."""
    if not spec.stream_tokens:
        return block_operators(rank, spec, _branch_operators(rank, spec))
    shard = rank.shard
    own_tokens = spec.stream_tokens * shard.sequence // shard.keys
    lengths = shard.sequence, own_tokens, shard.sequence - own_tokens
    ranks = (replace(rank, shard=replace(shard, sequence=length)) for length in lengths)
    single = replace(spec, stream_tokens=0)
    return join_streams(*(_all_operators(stream_rank, single) for stream_rank in ranks))


def _branch_operators(rank: RankContext, spec: LayerSpec) -> LayerBranches:
    cross, shared = (
        [] if mixer is None else registered_mixer(mixer).operators(rank, mixer, after_norm=False)
        for mixer in (spec.cross, spec.shared)
    )
    return LayerBranches(shared, _mixer_operators(rank, spec), cross, _mlp_operators(rank, spec))


def _finish_layer(rank: RankContext, layer: LayerOperators, flow: GradientFlow) -> LayerOperators:
    """The layer as it is trained: with adapters, frozen weights or indexers alone, and with its tower's name."""
    if rank.model.trains_indexer_only:
        trained = train_alone(layer, INDEXER)
    else:
        trained = apply_gradient_flow(apply_lora(layer, rank.training, rank.shard), flow)
    return label_layer(trained, rank.model.label) if rank.model.label else trained


def _layer_group(training: Training) -> str:
    """Parameter group of the dense weights of layers, where it is not that of the ends."""
    if training.recipe.has_matrix_formats:
        return LOW_PRECISION_LAYERS
    return MATRICES if training.orthogonalizes_dense else DENSE


@lru_cache(maxsize=_CACHE_SIZE)
def embedding_layer(model: TransformerModel, training: Training, shard: LayerShard) -> LayerOperators:
    """Token lookup (each rank looks up its part of the vocabulary) or patches, learned positions, norm, dropout."""
    rank = RankContext(model, training, shard)
    operators = _input_operators(rank)
    if model.conditioning is not None:
        operators += conditioning_operators(rank, model.conditioning)
    if model.positions is PositionEncoding.LEARNED:
        operators.append(_position_embedding(rank))
    if model.positions is PositionEncoding.SINUSOIDAL:
        operators.append(residual_add_operator(rank, "embedding.positions"))
    if model.embedding_norm:
        operators.append(norm_operator(rank, "embedding.norm", forks=False))
    if model.dropout:
        operators.append(residual_stream_operator(rank, "embedding.dropout", memory_bound.DROPOUT))
    return _finish_layer(rank, LayerOperators(tuple(operators), _sample_bytes(rank)), model.gradients.embedding)


def _sample_bytes(rank: RankContext) -> Bytes:
    """Bytes of a microbatch's token ids, or of its samples' values in FP32."""
    patches = rank.model.patches
    if patches is None:
        return float(rank.shard.tokens * _TOKEN_ID_BYTES)
    return float(rank.shard.batch * patches.patches * patches.patch_elements * DType.FP32.bytes)


@lru_cache(maxsize=_CACHE_SIZE)
def head_layer(model: TransformerModel, training: Training, shard: LayerShard) -> LayerOperators:
    """Final norm, logits, loss; or the final norm and another head.

    The logits' weight is counted here, tied or not; with FP8 the logits stay in BF16.
    Each multi-token prediction (MTP) layer has logits and a loss too, with the same weight; the hidden states
    of all are concatenated (Megatron-LM, megatron/core/transformer/multi_token_prediction.py,
    `process_mtp_loss`). The final norm is counted here, too, which Megatron-LM runs with the last layer of
    the stack.
    """
    rank, mtp_count = RankContext(model, training, shard), model.mtp_layers
    norm = norm_operator(rank, "head.norm", forks=False)
    operators = [replace(norm, parameter_count=model.head.norm_copies * norm.parameter_count)]
    if not model.has_vocabulary_loss:
        from clustersim.model.patch_layers import head_operators

        operators += head_operators(rank, model.head)
        return _finish_layer(rank, LayerOperators(tuple(operators), rank.residual_bytes), model.gradients.head)
    if mtp_count:
        operators.append(concat_operator(rank, "head.concat", 1 + mtp_count))
    first_logits, *remaining = _logits_and_loss(rank)
    operators += [first_logits, *remaining]
    # backward runs the first one last, which completes the weight gradient
    mtp_logits = replace(first_logits, parameter_count=0, region_input=RegionInput.OTHER, linear=None)
    operators += mtp_count * [mtp_logits, *remaining]
    head = LayerOperators(keep_gathered_inputs(rank, operators), rank.residual_bytes)
    return _finish_layer(rank, head, model.gradients.head)


def _logits_and_loss(rank: RankContext) -> list[Operator]:
    """Logits and loss of one hidden state per token."""
    model, training, shard = rank.model, rank.training, rank.shard
    bias_tokens = shard.tokens if model.head_bias else 0
    logits = LinearLayer(
        "head.logits", shard.tokens, model.hidden, rank.vocab_rows, MatmulFormats.uniform(rank.dtype), bias_tokens
    )
    if training.loss in LOSSES_BY_PART:
        return loss_operators_by_part(rank, logits)
    operators = [_gathered_logits(rank, linear_operator(rank, logits, rank.residual_bytes))]
    if model.final_logit_softcapping:
        softcap = memory_bound.softcap_spec(fused=training.fuses(FusedKernel.ACTIVATION))
        operators.append(_logits_operator(rank, "head.softcap", softcap))
    loss = memory_bound.loss_spec(training.loss, is_sharded=shard.tp > 1 and not _gathers_logits(rank))
    operators.append(_logits_operator(rank, "head.loss", loss))
    z_loss = memory_bound.z_loss_spec(training.loss) if training.z_loss else None
    operators += [] if z_loss is None else [_logits_operator(rank, "head.z_loss", z_loss)]
    metric = _logits_operator(rank, "head.metric", memory_bound.METRIC)
    return [*operators, *training.overheads.cross_entropy_metrics * [metric]]


def _gathers_logits(rank: RankContext) -> bool:
    return rank.shard.tp > 1 and rank.training.overheads.gathers_logits


def _gathered_logits(rank: RankContext, logits: Operator) -> Operator:
    """The logits, with their all-gather and the copy that puts the ranks' columns together, where they are gathered.

    Backward takes the rank's columns of the gradient, a view.
    """
    if not _gathers_logits(rank):
        return logits
    elements = rank.shard.tokens * rank.model.vocab
    gather = TpCollective(TpCombine.GATHER, float(elements * rank.dtype.bytes), "logits")
    copy = memory_bound.copy_kernel("head.logits.copy", rank.dtype, elements)
    return replace(logits, forward=(*logits.forward, copy), tp_collectives=TpCollectives(after_forward=(gather,)))


def _logits_operator(rank: RankContext, name: str, op_spec: MemoryBoundSpec) -> Operator:
    rows = rank.model.vocab if _gathers_logits(rank) else rank.vocab_rows
    return memory_bound_operator(
        ParallelRegion.SHARDED, name, rank.dtype, op_spec, (op_spec.shape_for(rank.shard.tokens, rows),)
    )


def _mlp_operators(rank: RankContext, spec: LayerSpec) -> list[Operator]:
    tiling = rank.training.tiled_mlp
    match spec.mlp:
        case DenseMlp(token_shift=False) as mlp if tiling is not None:
            return assign_module(tiled_mlp_operators(rank, mlp, tiling), RecomputeModule.MLP, rank.residual_bytes)
        case DenseMlp(token_shift=True) as mlp:
            from clustersim.model.mixers.rwkv7 import token_mix

            mixed = token_mix(rank, "mlp.token_shift", 1, _SHIFT_PASSES)
            return assign_module([mixed, *mlp_operators(rank, mlp)], RecomputeModule.MLP, rank.residual_bytes)
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
            from clustersim.model.moe_layer import moe_operators

            return assign_module(moe_operators(rank, moe), RecomputeModule.MOE, rank.residual_bytes)
    return []


def _mixer_operators(rank: RankContext, spec: LayerSpec) -> list[Operator]:
    if spec.mixer is None:
        return []
    return registered_mixer(spec.mixer).operators(rank, spec.mixer, after_norm=_has_fused_norm(rank, spec))


def _has_fused_norm(rank: RankContext, spec: LayerSpec) -> bool:
    """Whether a norm is fused into the first linear layer of a mixer that starts with one, or of a dense MLP."""
    is_plain = spec.block.has_pre_norm and not spec.block.is_parallel and spec.modulation is None
    return is_plain and rank.training.overheads.norm_in_linear


def _input_operators(rank: RankContext) -> list[Operator]:
    if rank.model.patches is None:
        return [_token_embedding(rank)]
    from clustersim.model.patch_layers import patch_operators

    return patch_operators(rank, rank.model.patches)


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
