"""DeepSeek's sparse attention (DSA): which sizes does it have? Latent attention to the keys that an indexer selects.

DeepSeek-V3.2-Exp (DeepSeek-AI 2025, section 1 and inference/model.py; arXiv:2512.02556). The lightning indexer scores
all keys of a query, sum over its few heads of w_h ReLU(q_h k), with queries from the queries' latent vector, one key
per token, and a weight per head from the layer's input. Attention sees the `index_topk` keys with the highest scores.
Operators: `mixers.deepseek_sparse_attention`.

Two stages of training (section 2.1 there): in the dense warm-up (`warms_up`) attention sees all keys, and the indexer
alone is trained, to score as attention weights them; then attention is sparse and all is trained.

Model FLOP: of attention 12 per query width and selected key, as of a window as long; of the indexer's scores 2 per
width and key forward, and 4 per selected key backward. Its weights count six like all, though it has no input gradient.
In the warm-up attention and all other weights count forward alone, and the indexer's gradients are at all keys.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from clustersim.common.units import Flop
from clustersim.model.attention_spec import (
    LatentAttention,
    SelectedKeysAttention,
    max_attended_keys,
    mean_attended_keys,
)
from clustersim.model.mixer import AttentionFlopConvention, ContextRule


@dataclass(frozen=True, slots=True)
class DeepseekSparseAttention(SelectedKeysAttention):
    """Latent attention to the `index_topk` keys that an indexer of `index_heads` heads of `index_head_dim` selects.

    warms_up: the indexer is trained alone, while attention is to all keys.
    """

    label: ClassVar[str] = "sparse attention"
    has_indexer: ClassVar[bool] = True

    latent: LatentAttention
    index_heads: int = 64
    index_head_dim: int = 128
    index_topk: int = 2048
    warms_up: bool = False

    @property
    def context_rule(self) -> ContextRule:  # type: ignore[override]
        """Keys are gathered; how the warm-up works on parts of sequences is not known."""
        return ContextRule.NONE if self.warms_up else ContextRule.KEY_GATHER

    @property
    def unselected(self) -> LatentAttention:
        """The same heads' attention to all keys."""
        return self.latent

    @property
    def absorbed_width(self) -> int:
        """Dimensions of a head's queries, and of the keys, in the latent space."""
        return self.latent.kv_lora_rank + self.latent.qk_rope_head_dim

    @property
    def index_width(self) -> int:
        """Dimensions of all of the indexer's queries."""
        return self.index_heads * self.index_head_dim

    def index_matrices(self, hidden: int) -> int:
        """Weights of the indexer's projections: of queries, of keys, and of the heads' weights."""
        return (self.latent.q_lora_rank or hidden) * self.index_width + hidden * (
            self.index_head_dim + self.index_heads
        )

    def matrix_elements(self, hidden: int) -> int:
        """Those of latent attention and of the indexer."""
        return self.latent.matrix_elements(hidden) + self.index_matrices(hidden)

    def parameter_count(self, hidden: int, *, linear_bias: bool) -> int:
        """Those of latent attention, the indexer's matrices and the LayerNorm of its keys."""
        attention = self.latent.parameter_count(hidden, linear_bias=linear_bias)
        return attention + self.index_matrices(hidden) + 2 * self.index_head_dim

    def mixing_flops(self, sequence: int, convention: AttentionFlopConvention) -> Flop:
        """Attention to selected keys; the indexer's scores of all keys, and their gradients at the selected ones."""
        key_count = max_attended_keys if convention is AttentionFlopConvention.FULL else mean_attended_keys
        scored, selected = key_count(sequence, None), key_count(sequence, self.index_topk)
        if self.warms_up:
            return self.latent.mixing_flops(sequence, convention) / 3 + self.index_width * 6.0 * scored
        attention = 6.0 * self.heads * (self.head_dim + self.v_head_dim) * selected
        return attention + self.index_width * (2.0 * scored + 4.0 * selected)

    def with_changes(self, changes: Mapping[str, Any]) -> "DeepseekSparseAttention":
        """The attention with another number of heads; raise InputError for dimensions that only full attention has."""
        return replace(self, latent=self.latent.with_changes(changes))
