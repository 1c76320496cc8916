"""Mixture of block attention (MoBA): which keys does a query attend to? Those of its own block and of the best others.

Lu et al. 2025, arXiv:2502.13189: keys are cut into blocks; a query scores each block before its own by the product
with the block's mean key, and attends to the `topk` best blocks, its own among them, in which attention is causal.
Gates have no parameters and no gradient.

Model FLOP: of attention 12 per query width and key that is attended to; the gate's scores 2 per width and block.

Operators are those of its authors' code (MoonshotAI/MoBA, moba/moba_efficient.py): keys and values are repeated for the
query heads that share them, stacked, those of all blocks but the last gathered and ordered by head (three copies);
their means are scored in FP32 by a batched matmul; masks, `topk`, and the selected pairs of query and block follow in
passes over the scores. Flash attention runs twice: causal within each block, and of copies of the queries that selected
a block to all of its keys. Both results are summed in FP32 by their statistics. Backward gathers output and gradient
for the copies, runs both kernels' backwards and adds up what copies are of.

Saved besides queries, keys and values as projected: the repeated keys and values, their copies by head, the copies of
queries, and where they belong. Context parallelism is not modelled; packed documents are taken to be cut where blocks
are, whichever has fewer keys.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Final

from clustersim.common.dtypes import DType
from clustersim.common.units import Bytes, Flop
from clustersim.model.attention import AttentionCore, attention_operators
from clustersim.model.attention_spec import FullAttention, SelectedKeysAttention
from clustersim.model.kernels import (
    AttentionShape,
    Kernel,
    KernelKind,
    MatmulShape,
    MemoryBoundOp,
    MemoryBoundShape,
    PackedKeys,
)
from clustersim.model.linear import matmul_kernel
from clustersim.model.lora import Projection
from clustersim.model.mixer import AttentionFlopConvention, ContextRule
from clustersim.model.mixers.full_attention import operators_after_core, operators_before_core
from clustersim.model.operators import Operator, ParallelRegion, assign_module
from clustersim.model.recompute_modules import RecomputeModule
from clustersim.model.sharded_layer import RankContext
from clustersim.model.training import AttentionBackend

_FP32, _INDEX_BYTES = 4, 8
_SCORE_BYTES: Final = 36  # of a gate's score: masked (8), ordered and selected (12), four masks (8), found (8)
_MERGED_OWN_BYTES: Final = 28  # of an output element: zeros (4), weighted (6), added (12), converted back (6)
_MERGED_COPY_BYTES: Final = 18  # of a copy's: weighted (6), added at its place (12)


@dataclass(frozen=True, slots=True)
class BlockAttention(SelectedKeysAttention):
    """Attention of each query to `topk` blocks of `chunk_size` keys, its own block among them."""

    label: ClassVar[str] = "block attention"
    context_rule: ClassVar[ContextRule] = ContextRule.NONE

    attention: FullAttention
    chunk_size: int
    topk: int

    @property
    def unselected(self) -> FullAttention:
        """The same heads' attention to all keys."""
        return self.attention

    def earlier_blocks(self, sequence: int) -> float:
        """Blocks before its own that a query attends to, on average over a sequence."""
        blocks, rest = divmod(sequence, self.chunk_size)
        full_blocks = sum(min(self.topk - 1, index) for index in range(blocks)) * self.chunk_size
        return (full_blocks + rest * min(self.topk - 1, blocks)) / sequence

    def own_keys(self, sequence: int) -> float:
        """Keys of its own block that a query attends to, on average over a sequence."""
        blocks, rest = divmod(sequence, self.chunk_size)
        return (blocks * self.chunk_size * (self.chunk_size + 1) + rest * (rest + 1)) / 2 / sequence

    def matrix_elements(self, hidden: int) -> int:
        """Those of the attention."""
        return self.attention.matrix_elements(hidden)

    def parameter_count(self, hidden: int, *, linear_bias: bool) -> int:
        """Those of the attention: gates have none."""
        return self.attention.parameter_count(hidden, linear_bias=linear_bias)

    def mixing_flops(self, sequence: int, convention: AttentionFlopConvention) -> Flop:
        """Attention to the selected blocks, causal or whole ones, and the gate's scores of all blocks."""
        blocks = -(-sequence // self.chunk_size)
        if convention is AttentionFlopConvention.FULL:
            keys, scored = float(min(sequence, self.topk * self.chunk_size)), blocks - 1.0
        else:
            keys = self.own_keys(sequence) + self.chunk_size * self.earlier_blocks(sequence)
            scored = replace(self, topk=blocks).earlier_blocks(sequence)
        return self.attention.query_width * (12.0 * keys + 2.0 * scored)

    def projection_sizes(self, hidden: int) -> Mapping[Projection, tuple[int, int]]:
        """Those of the attention."""
        return self.attention.projection_sizes(hidden)

    def with_changes(self, changes: Mapping[str, Any]) -> "BlockAttention":
        """The attention with other values of its fields."""
        return replace(self, attention=self.attention.with_changes(changes))


@dataclass(frozen=True, slots=True)
class _BlockRank:
    """Sizes on one rank."""

    rank: RankContext
    mixer: BlockAttention

    @property
    def heads(self) -> int:
        return self.mixer.heads // self.rank.shard.tp

    @property
    def elements(self) -> int:
        """Of the queries, and of keys or values that are repeated for them."""
        return self.rank.shard.tokens * self.heads * self.mixer.head_dim

    @property
    def earlier(self) -> float:
        """Blocks before its own that a query attends to."""
        return self.mixer.earlier_blocks(self.rank.shard.keys)

    @property
    def copies(self) -> float:
        """Elements of the copies of queries, one for each block before their own."""
        return self.elements * self.earlier

    @property
    def scored_blocks(self) -> int:
        return -(-self.rank.shard.keys // self.mixer.chunk_size) - 1

    def copy_kernel(self, name: str, moved_bytes: Bytes, *, launches: int) -> Kernel:
        """A few copies of elements, of this many bytes read and written."""
        shape = MemoryBoundShape(MemoryBoundOp.COPY, self.elements, 1, fused=True)
        return Kernel(name, KernelKind.COPY, self.rank.dtype, 0.0, float(moved_bytes), shape, launches)


def block_attention_operators(rank: RankContext, mixer: BlockAttention, *, after_norm: bool) -> list[Operator]:
    """The operators between the norm and the residual add."""
    local = _BlockRank(rank, mixer)
    before = operators_before_core(rank, mixer.attention, after_norm=after_norm)
    in_blocks = attention_operators(_own_core(local), AttentionBackend.FLASH)
    if local.earlier == 0:
        return [*before, *in_blocks, *operators_after_core(rank, mixer.attention)]
    core = (
        _arrange_operator(local),
        _gate_operator(local),
        *in_blocks,
        *_copies_operators(local),
        _merge_operator(local),
    )
    return [
        *before,
        *assign_module(
            (replace(operator, memberships=()) for operator in core),
            RecomputeModule.CORE_ATTENTION,
        ),
        *operators_after_core(rank, mixer.attention),
    ]


def _core(local: _BlockRank, shape: AttentionShape) -> AttentionCore:
    return AttentionCore(shape, local.rank.dtype, local.rank.model.dropout, fused=True)


def _own_core(local: _BlockRank) -> AttentionCore:
    """Causal attention within blocks, or within documents that are shorter."""
    shard, mixer = local.rank.shard, local.mixer
    longest = min(mixer.chunk_size, shard.keys)
    block_keys = PackedKeys(mixer.own_keys(shard.keys), float(longest), longest)
    packed = shard.packed_keys(None)
    keys = block_keys if packed is None or packed.mean > block_keys.mean else packed
    sizes = shard.batch, shard.sequence, shard.keys, local.heads, local.heads, mixer.head_dim
    return _core(local, AttentionShape(*sizes, causal=True, packed=keys))


def _copies_operators(local: _BlockRank) -> tuple[Operator, ...]:
    """Attention of the copies of queries to whole blocks, without a mask: one head for each block and head."""
    shard, mixer = local.rank.shard, local.mixer
    pairs = max(1, local.scored_blocks * local.heads * shard.batch)
    queries = max(1, round(shard.tokens * local.heads * local.earlier / pairs))
    shape = AttentionShape(pairs, queries, mixer.chunk_size, 1, 1, mixer.head_dim, causal=False)
    return tuple(
        replace(operator, name="attention.blocks", saved_bytes=0.0)  # statistics of the sum are saved, not its own
        for operator in attention_operators(_core(local, shape), AttentionBackend.FLASH)
    )


def _arrange_operator(local: _BlockRank) -> Operator:
    """Copies of keys and values: repeated and stacked, gathered, ordered by head; of queries by head and selection."""
    width = local.rank.dtype.bytes
    keys_values = 2 * local.elements * width
    copied = 3 * 2 * keys_values + 2 * (local.elements + local.copies) * width
    forward = local.copy_kernel("attention.arrange", copied, launches=8)
    backward_copied = copied + (local.elements + local.copies) * width  # sums at the places that copies are of
    backward = local.copy_kernel("attention.arrange.input_gradient", backward_copied, launches=10)
    is_repeated = local.mixer.kv_heads < local.mixer.heads
    saved = (keys_values if is_repeated else 0) + keys_values + local.copies * width
    saved += local.copies / local.mixer.head_dim * _INDEX_BYTES
    return Operator("attention.arrange", ParallelRegion.SHARDED, (forward,), (backward,), saved_bytes=float(saved))


def _gate_operator(local: _BlockRank) -> Operator:
    """Mean keys of blocks, their scores in FP32 and the selection; nothing of it has a gradient."""
    shard, head_dim, width = local.rank.shard, local.mixer.head_dim, local.rank.dtype.bytes
    shape = MatmulShape(local.scored_blocks, shard.sequence, head_dim, batch=shard.batch * local.heads)
    scores = matmul_kernel("attention.gate", DType.FP32, shape, result_bytes=_FP32)
    means = local.copy_kernel("attention.gate.means", local.elements * (width + width + _FP32), launches=3)
    score_count = shard.tokens * local.heads * local.scored_blocks
    selection = local.copy_kernel("attention.gate.selection", score_count * _SCORE_BYTES, launches=9)
    return Operator("attention.gate", ParallelRegion.SHARDED, (means, scores, selection))


def _merge_operator(local: _BlockRank) -> Operator:
    """The sum of both results by their statistics; backward gathers output and gradient for the copies."""
    merged = local.elements * _MERGED_OWN_BYTES + local.copies * _MERGED_COPY_BYTES
    forward = local.copy_kernel("attention.merge", merged, launches=12)
    gathered = 2 * 2 * local.copies * local.rank.dtype.bytes
    backward = local.copy_kernel("attention.merge.input_gradient", gathered, launches=3)
    return Operator("attention.merge", ParallelRegion.SHARDED, (forward,), (backward,), saves_outputs=True)
