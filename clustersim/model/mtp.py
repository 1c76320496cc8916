"""Operators of a multi-token prediction (MTP) layer.

MTP layer k reads, for every token, a hidden state (of the stack after its final norm, or of MTP layer k -
1) and the embedding of the token k positions ahead. Both are normalized, concatenated, and projected from
twice the hidden width to the hidden width; a transformer layer like the last of the stack and a norm
follow. Its logits use the model's own output matrix, with a separate loss (`layers.head_layer`), and its
embedding is the model's own (`parallel.plan` says on which stage it lies).

The projection is column-parallel: its input is all-gathered under sequence parallelism, its output is
all-gathered over the tensor-parallel ranks, and each rank takes its part of the sequence again, so that
backward starts with an all-gather. The hidden state's gradient is added to that of its logits. Saved are
the inputs of the three norms and of the projection. Shifting ids and labels by one token is left out: a
few bytes per token.

References: DeepSeek-AI 2024, arXiv:2412.19437, section 2.2; Gloeckle et al. 2024, arXiv:2404.19737;
NVIDIA/Megatron-LM, megatron/core/transformer/multi_token_prediction.py (`_concat_embeddings`,
`_proj_and_transformer_layer`).
"""

from collections.abc import Iterable
from dataclasses import replace

from clustersim.model import memory_bound
from clustersim.model.linear import LinearLayer
from clustersim.model.operators import Operator, ParallelRegion, RegionInput, TpCollective, TpCollectives, TpCombine
from clustersim.model.sharded_layer import RankContext, linear_operator, norm_operator

_INPUT_COUNT = 2  # input tensors of an MTP layer: hidden states and embeddings


def mtp_operators(rank: RankContext, layer_operators: Iterable[Operator]) -> tuple[Operator, ...]:
    """The operators of an MTP layer around those of its transformer layer."""
    return (
        norm_operator(rank, "mtp.embedding_norm", forks=False),
        norm_operator(rank, "mtp.hidden_norm"),
        concat_operator(rank, "mtp.concat", _INPUT_COUNT),
        _projection_operator(rank),
        *layer_operators,
        norm_operator(rank, "mtp.norm", forks=False),
    )


def mtp_input_bytes(rank: RankContext) -> float:
    """Bytes of the inputs of an MTP layer: hidden states and embeddings."""
    return _INPUT_COUNT * rank.residual_bytes


def concat_operator(rank: RankContext, name: str, tensor_count: int) -> Operator:
    """Concatenation of `tensor_count` activations as wide as the residual stream; backward splits the gradient."""
    forward = memory_bound.copy_kernel(name, rank.dtype, tensor_count * rank.residual_elements)
    return Operator(name, ParallelRegion.REPLICATED, (forward,), (replace(forward, name=f"{name}.input_gradient"),))


def _projection_operator(rank: RankContext) -> Operator:
    hidden, shard = rank.model.hidden, rank.shard
    linear = LinearLayer("mtp.projection", shard.tokens, _INPUT_COUNT * hidden, hidden // shard.tp, rank.matmul_formats)
    operator = linear_operator(rank, linear, rank.saved_input_bytes(_INPUT_COUNT * rank.residual_elements))
    full_bytes = float(shard.tokens * hidden * rank.dtype.bytes)
    output_gather = (TpCollective(TpCombine.GATHER, full_bytes, "projection"),) if shard.tp > 1 else ()
    gradient_gather = (
        (TpCollective(TpCombine.GATHER, full_bytes, "projection gradient"),)
        if shard.tp > 1 and shard.sequence_parallel
        else ()
    )
    return replace(
        operator,
        region=ParallelRegion.REPLICATED,
        region_input=RegionInput.OTHER,
        region_input_bytes=_INPUT_COUNT * full_bytes,
        tp_collectives=TpCollectives(after_forward=output_gather, before_backward=gradient_gather),
        linear=None,
    )
