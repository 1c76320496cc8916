"""Cross-attention: queries of the sequence attend to the keys and values of another one of fixed length.

Vaswani et al. 2017 (arXiv:1706.03762), section 3.2.3. Its operators are in `mixers.cross_attention`.
"""

from dataclasses import dataclass
from typing import ClassVar

from clustersim.common.units import Flop
from clustersim.model.mixer import AttentionFlopConvention, ContextRule, Mixer, ShardedSize


@dataclass(frozen=True, slots=True)
class CrossAttention(Mixer):
    """Attention to `keys` tokens of width `key_hidden`.

    qkv_bias: queries, keys and values have biases; qk_norm: queries and keys of all heads are normalized.
    """

    label: ClassVar[str] = "cross-attention"
    context_rule: ClassVar[ContextRule] = ContextRule.ALL_KEYS
    is_attention: ClassVar[bool] = True

    heads: int
    head_dim: int
    keys: int
    key_hidden: int
    qkv_bias: bool = False
    qk_norm: bool = False

    @property
    def width(self) -> int:
        """Dimensions of all heads' queries, keys or values."""
        return self.heads * self.head_dim

    def matrix_elements(self, hidden: int) -> int:
        """Queries and output, which a token of the sequence passes."""
        return 2 * hidden * self.width

    def parameter_count(self, hidden: int, *, linear_bias: bool) -> int:
        """Matrices, biases and the norms of queries and keys."""
        matrices = self.matrix_elements(hidden) + 2 * self.key_hidden * self.width
        biases = (3 * self.width if self.qkv_bias else 0) + (hidden if linear_bias else 0)
        return matrices + biases + (2 * self.width if self.qk_norm else 0)

    def mixing_flops(self, sequence: int, convention: AttentionFlopConvention) -> Flop:  # noqa: ARG002 - no mask
        """Twelve per query width and key; and keys and values, whose tokens the sequence's share."""
        keys_values = 6.0 * self.keys * 2 * self.key_hidden * self.width / sequence
        return 12.0 * self.width * self.keys + keys_values

    @property
    def sharded_sizes(self) -> tuple[ShardedSize, ...]:
        """Heads."""
        return (ShardedSize("heads", self.heads),)
