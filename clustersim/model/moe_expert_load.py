"""How unevenly do tokens choose their experts (expert load imbalance)?

An expert load gives, for each MoE layer and step, the share of all routed tokens (a token counts once for
each of its experts) that each expert receives. Three ways to specify it: measured, as one vector for all
layers or one per layer; or random, with a given coefficient of variation. Random shares are normalized
gamma variates, drawn anew for each layer and step from the seed alone: what an untrained or poorly
balanced router produces (measured on ranks: a coefficient of variation of 0.05 to 0.55; that of n
experts' tokens together is one over the root of n of each expert's, as they are drawn independently). All
expert-parallel groups see the same shares: preferences are the router's, and a group has enough tokens to
show them.

No load (None) means perfectly balanced, the usual assumption for models with forced balancing or a
balancing loss.

References: Marsaglia and Tsang, A simple method for generating gamma variables (2000);
PKU-DAIR/Hetu-Galvatron@2704237, scripts_ae/token_analysis_backup.csv (measured loads of 32 ranks).
"""

from dataclasses import dataclass
from typing import Protocol

import numpy as np

from clustersim.common.arrays import FloatArray


class ExpertLoad(Protocol):
    """Protocol of an expert load distribution."""

    @property
    def varies_by_layer(self) -> bool:
        """Whether shares differ between layers."""

    @property
    def varies_by_step(self) -> bool:
        """Whether shares differ between steps."""

    @property
    def description(self) -> str:
        """Human-readable description."""

    def expert_shares(self, expert_count: int, layer: int, step: int) -> FloatArray:
        """Share of routed tokens per expert in a MoE layer and step (both from 0): [experts], sum 1."""


@dataclass(frozen=True, slots=True)
class MeasuredExpertLoad:
    """Measured load. token_counts: per expert, any unit: [1][experts] for all layers, or [MoE layers][experts]."""

    token_counts: tuple[tuple[float, ...], ...]

    @property
    def varies_by_layer(self) -> bool:
        """Whether shares differ between layers."""
        return len(self.token_counts) > 1

    @property
    def varies_by_step(self) -> bool:
        """False: all steps have the same shares."""
        return False

    @property
    def description(self) -> str:
        """Human-readable description."""
        return "as measured, layer by layer" if self.varies_by_layer else "as measured"

    def expert_shares(self, expert_count: int, layer: int, step: int) -> FloatArray:  # noqa: ARG002 - the measured number of experts
        """Measured shares of a layer: [experts]."""
        counts = np.array(self.token_counts[layer if self.varies_by_layer else 0], dtype=np.float64)
        shares: FloatArray = counts / counts.sum()
        return shares


@dataclass(frozen=True, slots=True)
class RandomExpertLoad:
    """Random load from a seed.

    variation: standard deviation of an expert's token count over its mean, at least 0.
    """

    variation: float
    seed: int = 0

    @property
    def varies_by_layer(self) -> bool:
        """True: every layer is drawn independently."""
        return True

    @property
    def varies_by_step(self) -> bool:
        """True: every step is drawn independently."""
        return True

    @property
    def description(self) -> str:
        """Human-readable description."""
        return f"drawn, with a variation of {self.variation:.3g} of each expert's (seed {self.seed})"

    def expert_shares(self, expert_count: int, layer: int, step: int) -> FloatArray:
        """Normalized gamma variates: [experts]."""
        if self.variation == 0.0:
            return np.full(expert_count, 1.0 / expert_count)
        generator = np.random.Generator(np.random.Philox(np.random.SeedSequence((self.seed, layer, step))))
        samples = generator.standard_gamma(1.0 / self.variation**2, expert_count)
        total = float(samples.sum())
        shares: FloatArray = (
            samples / total if total > 0.0 else np.eye(1, expert_count, int(generator.integers(expert_count)))[0]
        )
        return shares
