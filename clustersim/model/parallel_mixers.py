"""Attention and another mixer side by side in one layer: which sizes does it have? (Falcon-H1)

Both read the same norm of the layer's input, and their outputs are summed before the residual add (Zuo et al. 2025,
arXiv:2507.22448, section 2.1). Operators: `mixers.parallel`.
"""

from dataclasses import dataclass
from typing import ClassVar

from clustersim.common.units import Flop
from clustersim.model.attention_spec import SoftmaxAttention
from clustersim.model.mixer import AttentionFlopConvention, ContextRule, Mixer, ShardedSize


@dataclass(frozen=True, slots=True)
class ParallelMixers(Mixer):
    """Attention and another mixer that read the same input."""

    label: ClassVar[str] = "parallel mixers"

    attention: SoftmaxAttention
    other: Mixer

    @property
    def context_rule(self) -> ContextRule:  # type: ignore[override]
        """That of the other mixer, next to the ring of keys and values."""
        return self.other.context_rule

    def parameter_count(self, hidden: int, *, linear_bias: bool) -> int:
        """Of both."""
        return sum(mixer.parameter_count(hidden, linear_bias=linear_bias) for mixer in (self.attention, self.other))

    def matrix_elements(self, hidden: int) -> int:
        """Of both."""
        return self.attention.matrix_elements(hidden) + self.other.matrix_elements(hidden)

    def mixing_flops(self, sequence: int, convention: AttentionFlopConvention) -> Flop:
        """Of both."""
        return sum(mixer.mixing_flops(sequence, convention) for mixer in (self.attention, self.other))

    @property
    def sharded_sizes(self) -> tuple[ShardedSize, ...]:
        """Of both, those of the other mixer first, which context parallelism may exchange."""
        return (*self.other.sharded_sizes, *self.attention.sharded_sizes)
