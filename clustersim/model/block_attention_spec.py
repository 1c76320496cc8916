"""Mixture of block attention (MoBA): which keys does a query attend to? Those of its own block and of the best others.

Lu et al. 2025, arXiv:2502.13189: keys are cut into blocks; a query scores each block before its own by the product
with the block's mean key, and attends to the `topk` best blocks, its own among them, in which attention is causal.
Gates have no parameters and no gradient. Operators: `mixers.block_attention`.

Model FLOP: of attention 12 per query width and key that is attended to; the gate's scores 2 per width and block.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from clustersim.common.units import Flop
from clustersim.model.attention_spec import FullAttention, SelectedKeysAttention
from clustersim.model.lora import Projection
from clustersim.model.mixer import AttentionFlopConvention, ContextRule


@dataclass(frozen=True, slots=True)
class BlockAttention(SelectedKeysAttention):
    """Attention of each query to `topk` blocks of `chunk_size` keys, its own block among them."""

    label: ClassVar[str] = "block attention"
    context_rule: ClassVar[ContextRule] = ContextRule.NONE

    attention: FullAttention
    chunk_size: int
    topk: int

    @property
    def whole(self) -> FullAttention:
        """The same heads' attention to all keys."""
        return self.attention

    def earlier_blocks(self, sequence: int) -> float:
        """Blocks before its own that a query attends to, on average over a sequence."""
        blocks, rest = divmod(sequence, self.chunk_size)
        whole = sum(min(self.topk - 1, index) for index in range(blocks)) * self.chunk_size
        return (whole + rest * min(self.topk - 1, blocks)) / sequence

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
