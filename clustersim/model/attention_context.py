"""What does attention's core hold where context-parallel ranks exchange keys, values or heads?

Gathered keys and values of the full sequence exist while the core runs, in backward with their gradients. Where
ranks exchange tokens for heads and there are more ranks than key and value heads, each saves a copy of one.
"""

from collections.abc import Iterable
from dataclasses import replace

from clustersim.common.units import Bytes
from clustersim.model.kernels import AttentionShape
from clustersim.model.operators import LayerShard, Operator


def context_operators(
    shard: LayerShard, operators: Iterable[Operator], shape: AttentionShape, kv_elements: int
) -> tuple[Operator, ...]:
    """The core's operators with what they hold; kv_elements: of keys and values of this rank's tokens."""
    first, *remaining = operators
    element_bytes = first.forward[-1].dtype.bytes
    if shard.gathers_keys:
        return replace(first, temporary_bytes=2 * _kv_elements(shape) * element_bytes), *remaining
    copied = max(0, _kv_elements(shape) - kv_elements) if shard.exchanging_ranks > 1 else 0
    return replace(first, saved_bytes=first.saved_bytes + copied * element_bytes), *remaining


def _kv_elements(shape: AttentionShape) -> Bytes:
    return shape.batch * shape.key * shape.kv_heads * (shape.head_dim + shape.value_head_dim)
