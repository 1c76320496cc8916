"""Which operators on one rank has a model of images before its first layer, and behind its last one?

The patches' matrix, class tokens and heads are small, and frameworks hold them on every tensor-parallel rank
(Megatron-LM, megatron/core/models/vision/clip_vit_model.py, `conv1`). The convolution that cuts patches is one matmul,
whose weight gradient is the only one: pixels have none. Class tokens are concatenated with the patches. A classifier
reads a view of one token of each sample; the pooling attention's query is the same for all samples.
"""

from dataclasses import replace
from typing import Final

from clustersim.model import memory_bound
from clustersim.model.attention import AttentionCore, attention_operators
from clustersim.model.conditioning_layers import patch_head_operators
from clustersim.model.gradient_flow import GradientFlow
from clustersim.model.kernels import AttentionShape
from clustersim.model.layer_stack import DenseMlp, MlpType
from clustersim.model.model_ends import AttentionPool, Classifier, ModelHead, PatchEmbedding, PatchHead, Projector
from clustersim.model.operators import Operator, ParallelRegion
from clustersim.model.sharded_layer import (
    RankContext,
    linear_operator,
    memory_bound_operator,
    model_norm_spec,
    replicated_linear,
    residual_stream_operator,
)
from clustersim.model.training import FusedKernel
from clustersim.model.transformer import norm_parameter_count

_INTERPOLATED_ROWS: Final = 4  # bilinear


def patch_operators(rank: RankContext, patches: PatchEmbedding) -> list[Operator]:
    """The matrix that maps patches to tokens, and the concatenation with the class tokens."""
    tokens = rank.shard.residual_tokens * patches.patches // rank.model.sample_tokens
    linear = replicated_linear(
        rank, "embedding.patches", (tokens, patches.patch_elements, rank.model.hidden), bias=patches.bias
    )
    input_bytes = rank.saved_input_bytes(tokens * patches.patch_elements)
    operators = [replace(linear_operator(rank, linear, input_bytes, is_replicated=True), input_gradient=())]
    if patches.class_tokens:
        operators.append(_class_tokens(rank, patches.class_tokens))
    if patches.position_rows:
        operators.append(_interpolated_positions(rank, patches.position_rows))
    return operators


def head_operators(rank: RankContext, head: ModelHead) -> list[Operator]:
    """What follows the final norm, other than logits over a vocabulary."""
    match head:
        case Classifier(classes):
            return _classifier_operators(rank, classes)
        case AttentionPool():
            return _pool_operators(rank, head)
        case PatchHead():
            return patch_head_operators(rank, head)
        case Projector():
            operators = _projector_operators(rank, head)
            norm = residual_stream_operator(rank, "projector.norm", model_norm_spec(rank))
            return [*operators, *(head.copies * [norm, *operators])]
    return []


def _projector_operators(rank: RankContext, projector: Projector) -> list[Operator]:
    """Column- and row-parallel matrices with GELU between them, and the copy of their result among the text's tokens.

    An odd matrix at the end is held by every tensor-parallel rank. Nothing before it needs a gradient where the encoder
    is frozen.
    """
    tokens = rank.shard.batch * projector.projected_tokens(rank.shard.sequence)
    operators: list[Operator] = []
    sizes = projector.sizes(rank.model.hidden)
    for index, (inputs, outputs) in enumerate(sizes):
        is_row, is_last = index % 2 == 1, index == len(sizes) - 1
        is_split = is_row or not is_last
        operators.append(_projector_linear(rank, f"projector.{index}", (tokens, inputs, outputs), is_split, is_row))
        if not is_last:
            spec = memory_bound.activation_spec(MlpType.GELU, fused=rank.training.fuses(FusedKernel.ACTIVATION))
            region = ParallelRegion.REPLICATED if is_row else ParallelRegion.SHARDED
            shape = spec.shape_for(tokens, outputs if is_row else outputs // rank.shard.tp)
            operators.append(memory_bound_operator(region, "projector.activation", rank.dtype, spec, (shape,)))
    if rank.model.gradients.layers is GradientFlow.NONE and rank.model.gradients.head is not GradientFlow.NONE:
        operators[0] = replace(operators[0], input_gradient=())
    return [*operators, _merge_operator(rank, tokens * projector.widths[-1])]


def _projector_linear(
    rank: RankContext, name: str, sizes: tuple[int, int, int], is_split: bool, is_row: bool
) -> Operator:
    """A matrix of the projector. sizes: tokens, inputs, outputs; is_split: tensor-parallel ranks share it."""
    tokens, inputs, outputs = sizes
    tp = rank.shard.tp if is_split else 1
    local_inputs, local_outputs = (inputs // tp, outputs) if is_row else (inputs, outputs // tp)
    sizes = tokens, local_inputs, local_outputs
    linear = replace(replicated_linear(rank, name, sizes, bias=True), row_parallel=is_row)
    input_bytes = rank.saved_input_bytes(tokens * local_inputs)
    operator = linear_operator(rank, linear, input_bytes, is_replicated=not is_split)
    return operator if not is_split else replace(operator, region_input_bytes=float(tokens * inputs * rank.dtype.bytes))


def _merge_operator(rank: RankContext, elements: int) -> Operator:
    """Projected tokens written to their places among the text's; backward reads their gradients from there."""
    copy = memory_bound.copy_kernel("projector.merge", rank.dtype, elements)
    back = replace(copy, name="projector.merge.input_gradient")
    return Operator(copy.name, ParallelRegion.REPLICATED, (copy,), (back,))


def _class_tokens(rank: RankContext, count: int) -> Operator:
    """The concatenation of class tokens and patches; backward reads views of the gradient."""
    kernel = memory_bound.copy_kernel("embedding.class_tokens", rank.dtype, rank.residual_elements)
    parameters = count * rank.model.hidden
    return Operator(kernel.name, ParallelRegion.REPLICATED, (kernel,), parameter_count=parameters)


def _interpolated_positions(rank: RankContext, rows: int) -> Operator:
    """Four rows of a table of positions for each token, their weighted sum, and its sum with the token."""
    spec = memory_bound.residual_spec(dropout=False, fused=False)
    shape = spec.shape_for(rank.shard.residual_tokens, rank.model.hidden)
    kernels = tuple(
        spec.forward_kernel(f"embedding.interpolated_positions.{corner}", rank.dtype, shape)
        for corner in range(_INTERPOLATED_ROWS)
    )
    gradient = memory_bound.copy_kernel(
        "embedding.interpolated_positions.weight_gradient", rank.dtype, _INTERPOLATED_ROWS * rank.residual_elements
    )
    parameters = rows * rank.model.hidden
    name = "embedding.interpolated_positions"
    return Operator(name, ParallelRegion.REPLICATED, kernels, weight_gradient=(gradient,), parameter_count=parameters)


def _classifier_operators(rank: RankContext, classes: int) -> list[Operator]:
    samples = rank.shard.batch
    linear = replicated_linear(rank, "head.classes", (samples, rank.model.hidden, classes), bias=True)
    loss = memory_bound.loss_spec(rank.training.loss)
    shape = loss.shape_for(samples, classes)
    input_bytes = rank.saved_input_bytes(samples * rank.model.hidden)
    return [
        linear_operator(rank, linear, input_bytes, is_replicated=True),
        memory_bound_operator(ParallelRegion.REPLICATED, "head.loss", rank.dtype, loss, (shape,)),
    ]


def _pool_operators(rank: RankContext, pool: AttentionPool) -> list[Operator]:
    """Keys and values of all tokens; attention of one query per sample; output, norm, MLP and residual add."""
    shard, hidden = rank.shard, rank.model.hidden
    tokens = shard.residual_tokens
    key_values = replicated_linear(rank, "pool.kv", (tokens, hidden, 2 * hidden), bias=True)
    kv_operator = linear_operator(rank, key_values, rank.saved_input_bytes(tokens * hidden), is_replicated=True)
    kv_bytes = float(tokens * 2 * hidden * rank.dtype.bytes)
    query = replicated_linear(rank, "pool.query", (shard.batch, hidden, hidden), bias=True)
    query_operator = replace(
        linear_operator(rank, query, rank.saved_input_bytes(shard.batch * hidden), is_replicated=True),
        parameter_count=query.parameter_count + hidden,  # and the learned query
    )
    shape = AttentionShape(*(shard.batch, 1, shard.keys, pool.heads, pool.heads, hidden // pool.heads), causal=False)
    core = AttentionCore(shape, rank.dtype, rank.model.dropout, rank.training.fuses(FusedKernel.SOFTMAX))
    return [
        query_operator,
        replace(kv_operator, saved_bytes=kv_operator.saved_bytes + kv_bytes),
        *(
            replace(operator, region=ParallelRegion.REPLICATED)
            for operator in attention_operators(core, rank.training.attention)
        ),
        _pool_linear(rank, "pool.out", (hidden, hidden)),
        _pool_norm(rank),
        *_pool_mlp(rank, DenseMlp(pool.ffn, MlpType.GELU)),
    ]


def _pool_norm(rank: RankContext) -> Operator:
    spec = memory_bound.norm_spec(rank.model.norm, fused=rank.training.fuses(FusedKernel.NORM))
    shape = spec.shape_for(rank.shard.batch, rank.model.hidden)
    operator = memory_bound_operator(ParallelRegion.REPLICATED, "pool.norm", rank.dtype, spec, (shape,))
    return replace(operator, parameter_count=norm_parameter_count(rank.model))


def _pool_mlp(rank: RankContext, mlp: DenseMlp) -> list[Operator]:
    activation = memory_bound.activation_spec(mlp.form, fused=rank.training.fuses(FusedKernel.ACTIVATION))
    residual = memory_bound.residual_spec(dropout=False, fused=rank.training.fuses(FusedKernel.RESIDUAL))
    hidden, samples = rank.model.hidden, rank.shard.batch
    passes = [
        memory_bound_operator(ParallelRegion.REPLICATED, name, rank.dtype, spec, (spec.shape_for(samples, width),))
        for name, spec, width in (("pool.activation", activation, mlp.ffn), ("pool.residual", residual, hidden))
    ]
    up, down = (
        _pool_linear(rank, name, sizes)
        for name, sizes in (("pool.up", (hidden, mlp.ffn)), ("pool.down", (mlp.ffn, hidden)))
    )
    return [up, passes[0], down, passes[1]]


def _pool_linear(rank: RankContext, name: str, sizes: tuple[int, int]) -> Operator:
    """A matrix [inputs, outputs] that the pooled token of each sample passes."""
    linear = replicated_linear(rank, name, (rank.shard.batch, *sizes), bias=True)
    input_bytes = rank.saved_input_bytes(rank.shard.batch * sizes[0])
    return linear_operator(rank, linear, input_bytes, is_replicated=True)
