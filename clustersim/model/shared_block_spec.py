"""A transformer block whose weights several layers share, each with adapters of its own (Zamba 2).

Glorioso et al. 2024, arXiv:2411.15242, section 2; transformers, models/zamba2/modeling_zamba2.py
(`Zamba2AttentionDecoderLayer`, `Zamba2HybridLayer`): the residual stream and the model's embedding, side by side, are
normalized and attended to, queries as wide as both; a norm, a gated MLP and a matrix of the layer's own follow. The
result is added to what the layer's state space reads, not to the residual stream. Adapters of rank `adapter_rank` are
of the layer, too: of gate and up projection, and of queries, keys and values where `adapts_attention`.

Its operators are in `mixers.shared_block`.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from clustersim.common.units import Flop
from clustersim.model.attention_spec import FullAttention
from clustersim.model.mixer import AttentionFlopConvention, ContextRule, Mixer, ShardedSize


@dataclass(frozen=True, slots=True)
class SharedBlock(Mixer):
    """One use of a shared block. index: which block of the model; holds_weights: it is the block's first use."""

    label: ClassVar[str] = "shared attention"
    context_rule: ClassVar[ContextRule] = ContextRule.KV_RING
    reads_first_layer: ClassVar[bool] = True

    index: int
    attention: FullAttention
    ffn: int
    adapter_rank: int
    adapts_attention: bool = False
    holds_weights: bool = True

    @property
    def attention_projections(self) -> tuple[int, int, int]:
        """Widths of queries, keys and values."""
        return self.attention.query_width, self.attention.key_width, self.attention.key_width

    def shared_elements(self, hidden: int) -> int:
        """Weights of the block's matrices, which all its uses share."""
        projected = 2 * hidden * sum(self.attention_projections)
        return projected + self.attention.query_width * hidden + 3 * hidden * self.ffn

    def own_elements(self, hidden: int) -> int:
        """Weights of this use: its adapters, and the matrix of its result."""
        mlp = self.adapter_rank * (hidden + 2 * self.ffn)
        attention = sum(self.adapter_rank * (2 * hidden + width) for width in self.attention_projections)
        return hidden * hidden + mlp + (attention if self.adapts_attention else 0)

    def matrix_elements(self, hidden: int) -> int:
        """Those of every use, which a token passes."""
        return self.shared_elements(hidden) + self.own_elements(hidden)

    def parameter_count(self, hidden: int, *, linear_bias: bool) -> int:  # noqa: ARG002 - its matrices have none
        """Of the block's first use its matrices and both norms, too."""
        shared = self.shared_elements(hidden) + 2 * hidden + hidden
        return self.own_elements(hidden) + (shared if self.holds_weights else 0)

    def mixing_flops(self, sequence: int, convention: AttentionFlopConvention) -> Flop:
        """Those of its attention."""
        return self.attention.mixing_flops(sequence, convention)

    @property
    def sharded_sizes(self) -> tuple[ShardedSize, ...]:
        """Heads, and the MLP's width."""
        return (*self.attention.sharded_sizes, ShardedSize("ffn", self.ffn))

    def with_changes(self, changes: Mapping[str, Any]) -> "SharedBlock":
        """The block with other dimensions of attention."""
        return replace(self, attention=self.attention.with_changes(changes))
