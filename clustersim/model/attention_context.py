"""How does attention's core run, and what does it hold, where context-parallel ranks exchange keys, values or heads?

Gathered keys and values of the full sequence exist while the core runs, in backward with their gradients. Where
ranks exchange tokens for heads and there are more ranks than key and value heads, each saves a copy of one. A ring
whose blocks are kernels of their own is in `model.ring_attention`.
"""

from dataclasses import replace

from clustersim.common.units import Bytes
from clustersim.model.attention import AttentionCore, attention_operators
from clustersim.model.kernels import AttentionShape
from clustersim.model.operators import Operator
from clustersim.model.ring_attention import split_into_blocks
from clustersim.model.sharded_layer import RankContext
from clustersim.model.training import FusedKernel


def core_operators(rank: RankContext, core: AttentionCore, kv_elements: int) -> tuple[Operator, ...]:
    """The core's operators with what they hold; kv_elements: of keys and values of this rank's tokens."""
    shard, shape = rank.shard, core.shape
    operators = attention_operators(core, rank.training.attention)
    if shard.ring_blocks > 1 and shape.window is None and shape.causal:
        core = replace(core, shape=replace(shape, kv_heads=shape.heads)) if shard.repeats_kv else core
        compiled = rank.training.fuses(FusedKernel.RESIDUAL)
        *padding, whole = operators
        operators = (*padding, split_into_blocks(core, whole, shard.ring_blocks, compiled=compiled))
    first, *remaining = operators
    element_bytes = first.forward[-1].dtype.bytes
    if shard.gathers_keys:
        gradients = shard.ring_blocks == 1  # a ring of blocks has those of its own tokens alone
        gathered = first.temporary_bytes + (1 + gradients) * _kv_elements(core.shape) * element_bytes
        return replace(first, temporary_bytes=gathered), *remaining
    copied = max(0, _kv_elements(shape) - kv_elements) if shard.exchanging_ranks > 1 else 0
    return replace(first, saved_bytes=first.saved_bytes + copied * element_bytes), *remaining


def _kv_elements(shape: AttentionShape) -> Bytes:
    return shape.batch * shape.key * shape.kv_heads * (shape.head_dim + shape.value_head_dim)
