"""Which operators does a layer have that predicts a further token (multi-token prediction, MTP)?

Layer k reads, for every token, a hidden state (of the stack behind its final norm, or of layer k - 1) and the
embedding of the token k places on. Both are normalised, put side by side, and projected from twice the hidden width to
it; a transformer layer of the stack's last kind and a norm follow. Its logits are those of the model's own matrix, with
a loss of their own (`layers.head`), and the embedding is the model's own, too (`parallel.plan` says where it lies).

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
from clustersim.model.linear import Linear
from clustersim.model.operators import Entry, Joining, Joint, Joints, Operator, Region
from clustersim.model.sharded_layer import OnRank, linear_operator, norm_operator

_READ = 2  # activations that a layer reads: hidden states and embeddings


def ahead(rank: OnRank, layer: Iterable[Operator]) -> tuple[Operator, ...]:
    """The operators of a transformer layer as those of one that predicts a further token."""
    return (
        norm_operator(rank, "mtp.embedding_norm", forks=False),
        norm_operator(rank, "mtp.hidden_norm"),
        copied(rank, "mtp.concat", _READ),
        _projection(rank),
        *layer,
        norm_operator(rank, "mtp.norm", forks=False),
    )


def read_bytes(rank: OnRank) -> float:
    """Bytes of what such a layer reads."""
    return _READ * rank.input_bytes


def copied(rank: OnRank, name: str, many: int) -> Operator:
    """So many activations put beside each other, and their gradients taken apart: a copy each way."""
    forward = memory_bound.copy(name, rank.dtype, many * rank.residual)
    return Operator(name, Region.REPLICATED, (forward,), (replace(forward, name=f"{name}.input_gradient"),))


def _projection(rank: OnRank) -> Operator:
    hidden, shard = rank.model.hidden, rank.shard
    linear = Linear("mtp.projection", shard.tokens, _READ * hidden, hidden // shard.tp, rank.products)
    made = linear_operator(rank, linear, rank.saved(_READ * rank.residual))
    whole = float(shard.tokens * hidden * rank.dtype.bytes)
    columns = (Joint(Joining.GATHERED, whole, "projection"),) if shard.tp > 1 else ()
    sequence = (
        (Joint(Joining.GATHERED, whole, "projection gradient"),) if shard.tp > 1 and shard.sequence_parallel else ()
    )
    return replace(
        made,
        region=Region.REPLICATED,
        entry=Entry.OTHER,
        entering=_READ * whole,
        joints=Joints(result=columns, entering=sequence),
        linear=None,
    )
