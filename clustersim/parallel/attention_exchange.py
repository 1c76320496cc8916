"""What do context-parallel ranks exchange for attention, with keys and values, and in how many kernels does it run?"""

from clustersim.common.dtypes import DType
from clustersim.model.attention_spec import SoftmaxAttention
from clustersim.model.mixer import ContextRule
from clustersim.model.operators import LayerShard
from clustersim.model.overheads import RingAttention
from clustersim.model.training import AttentionBackend, Training
from clustersim.parallel.context_parallel import BLOCK_RING_KINDS, ContextParallel
from clustersim.parallel.layout import Layout


def ring_blocks(layout: Layout, training: Training) -> int:
    """Blocks of keys for each of which flash attention runs a kernel of its own; 1: one kernel for all."""
    is_flash = training.attention is not AttentionBackend.STANDARD and training.recipe.attention is None
    has_blocks = training.overheads.ring_attention is RingAttention.BLOCKS and layout.cp_kind in BLOCK_RING_KINDS
    return layout.cp if is_flash and has_blocks else 1


def attention_exchange(
    attention: SoftmaxAttention, layout: Layout, shard: LayerShard, activations: DType
) -> ContextParallel | None:
    """What context-parallel ranks exchange for attention; None: no keys and values. activations: their format."""
    if attention.context_rule is not ContextRule.KV_RING:
        return None
    widths = attention.exchanged_widths(layout.tp, layout.exchanging_ranks)
    heads, outputs = (float(shard.tokens * width * activations.bytes) for width in widths)
    by_blocks = shard.ring_blocks > 1 and attention.attends_to_all(shard.keys)
    repeats = shard.repeats_kv and layout.exchanging_ranks == 1
    kv_width = (
        attention.repeated_kv_width(layout.tp) if repeats else attention.kv_width(layout.tp * layout.exchanging_ranks)
    )
    kv_bytes = float(shard.batch * shard.keys * kv_width * activations.bytes)
    return ContextParallel(
        *(layout.cp_kind, layout.cp, layout.inner_ranks, activations, kv_bytes, heads, outputs), by_blocks
    )
