"""How unevenly do tokens choose their experts?

A load says, for each routed layer and step, which part of all rows (a token once for each of its experts) each expert
gets. Three ways to say it: as measured, a vector for all layers or one for each; or drawn, with a stated coefficient of
variation. Drawn parts are gamma variates over their sum, anew for each layer and step and by the seed alone: what an
untrained or hardly balanced router makes (measured on ranks: a variation of 0.05 to 0.55). All groups of ranks that
hold the experts see the same parts: preferences are the router's, and a group's tokens are enough to show them.

Nothing is said of a load that is even, which is the rule for mixtures that are balanced by force or by a loss.

References: Marsaglia and Tsang, A simple method for generating gamma variables (2000); PKU-DAIR/Hetu-Galvatron@2704237,
scripts_ae/token_analysis_backup.csv (measured loads of 32 ranks).
"""

from dataclasses import dataclass
from typing import Protocol

import numpy as np

from clustersim.common.arrays import FloatArray


class ExpertLoad(Protocol):
    """The seam: what a load must answer."""

    @property
    def varies_by_layer(self) -> bool:
        """Whether layers differ."""

    @property
    def varies_by_step(self) -> bool:
        """Whether steps differ."""

    @property
    def description(self) -> str:
        """For people."""

    def expert_shares(self, expert_count: int, layer: int, step: int) -> FloatArray:
        """The part of all rows that each expert gets in a routed layer and step, both from 0: [experts], sum 1."""


@dataclass(frozen=True, slots=True)
class MeasuredExpertLoad:
    """rows: of each expert, in any unit: of all layers [1][experts], or of each routed layer [layers][experts]."""

    token_counts: tuple[tuple[float, ...], ...]

    @property
    def varies_by_layer(self) -> bool:
        """Whether layers differ."""
        return len(self.token_counts) > 1

    @property
    def varies_by_step(self) -> bool:
        """Steps are alike."""
        return False

    @property
    def description(self) -> str:
        """For people."""
        return "as measured, layer by layer" if self.varies_by_layer else "as measured"

    def expert_shares(self, expert_count: int, layer: int, step: int) -> FloatArray:  # noqa: ARG002 - as many as were measured
        """Those of a layer: [experts]."""
        counts = np.array(self.token_counts[layer if self.varies_by_layer else 0], dtype=np.float64)
        shares: FloatArray = counts / counts.sum()
        return shares


@dataclass(frozen=True, slots=True)
class RandomExpertLoad:
    """variation: standard deviation of an expert's rows over their mean, at least 0; seed: the same, the same loads."""

    variation: float
    seed: int = 0

    @property
    def varies_by_layer(self) -> bool:
        """Every layer is drawn."""
        return True

    @property
    def varies_by_step(self) -> bool:
        """So is every step."""
        return True

    @property
    def description(self) -> str:
        """For people."""
        return f"drawn, with a variation of {self.variation:g} (seed {self.seed})"

    def expert_shares(self, expert_count: int, layer: int, step: int) -> FloatArray:
        """Drawn parts: [experts]."""
        if self.variation == 0.0:
            return np.full(expert_count, 1.0 / expert_count)
        generator = np.random.Generator(np.random.Philox(np.random.SeedSequence((self.seed, layer, step))))
        samples = generator.standard_gamma(1.0 / self.variation**2, expert_count)
        total = float(samples.sum())
        shares: FloatArray = (
            samples / total if total > 0.0 else np.eye(1, expert_count, int(generator.integers(expert_count)))[0]
        )
        return shares
