"""Which operators does a layer have that predicts a further token (multi-token prediction, MTP)?

Layer k reads, for every token, a hidden state (of the stack behind its final norm, or of layer k - 1) and the
embedding of the token k places on. Both are normalised, put side by side, and projected from twice the hidden width to
it; a transformer layer of the stack's last kind and a norm follow. Its logits are those of the model's own matrix, with
a loss of their own (`layers.head_layer`), and the embedding is the model's own, too (`parallel.plan` says where it lies).

The projection is split by columns: what it reads is gathered where the sequence is split, its result is gathered over
the tensor-parallel ranks, and each takes its part of the sequence again, so that backward gathers first. The hidden
state's gradient is added to that of its logits. Kept are the inputs of the three norms and of the projection. To move
ids and labels by one token is left out: they are some bytes a token.

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

_INPUT_COUNT = 2  # activations that a layer reads: hidden states and embeddings


def mtp_operators(rank: RankContext, layer_operators: Iterable[Operator]) -> tuple[Operator, ...]:
    """The operators of a transformer layer as those of one that predicts a further token."""
    return (
        norm_operator(rank, "mtp.embedding_norm", forks=False),
        norm_operator(rank, "mtp.hidden_norm"),
        concat_operator(rank, "mtp.concat", _INPUT_COUNT),
        _projection_operator(rank),
        *layer_operators,
        norm_operator(rank, "mtp.norm", forks=False),
    )


def mtp_input_bytes(rank: RankContext) -> float:
    """Bytes of what such a layer reads."""
    return _INPUT_COUNT * rank.residual_bytes


def concat_operator(rank: RankContext, name: str, tensor_count: int) -> Operator:
    """So many activations put beside each other, and their gradients taken apart: a copy each way."""
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
