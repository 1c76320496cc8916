"""How much does the same kernel vary from one run to the next?

The duration of every kernel run on every rank is multiplied by a random factor with mean 1 (exponential: at
least 1). Factors of a rank depend on the seed and the rank only, so they are the same whichever other ranks
are simulated, and can be drawn again for one rank. Draws are independent; slow drifts (temperature, clocks)
are modelled by `SlowGpus` degradations.

Reference: Philox (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011), a counter-based
generator.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from math import log1p, sqrt
from typing import Final

import numpy as np

from clustersim.common.arrays import FloatArray

MAX_NORMAL_STD: Final = 0.1
"""Largest standard deviation of a normal factor; above it negative factors would be drawn eventually."""


class Distribution(Enum):
    """Distribution of the factor on a kernel's duration."""

    NORMAL = "normal"  # mean 1
    LOGNORMAL = "lognormal"  # mean 1, never below zero, a longer tail
    EXPONENTIAL = "exponential"  # at least 1: interruptions that only add time


@dataclass(frozen=True, slots=True)
class Jitter:
    """Random kernel durations. std: standard deviation of the factor (normal: at most MAX_NORMAL_STD)."""

    std: float
    distribution: Distribution = Distribution.NORMAL
    seed: int = 0

    def rank_factors(self, rank: int, count: int) -> FloatArray:
        """Factors of the first `count` operations that a rank runs: [count]."""
        factors = np.empty(count)
        self.draw_factors([self.rank_generator(rank)], factors[None, :])
        return factors

    def rank_generator(self, rank: int) -> "np.random.Generator":
        """Random generator of a rank's factors, drawn in order."""
        return np.random.Generator(np.random.Philox(key=[self.seed, rank]))

    def draw_factors(self, generators: "Sequence[np.random.Generator]", out: FloatArray) -> None:
        """Draw the next factors of some ranks into `out`: [ranks, count]."""
        exponential = self.distribution is Distribution.EXPONENTIAL
        for generator, rank_factors in zip(generators, out, strict=True):
            if exponential:
                generator.standard_exponential(out=rank_factors)
            else:
                generator.standard_normal(out=rank_factors)
        if self.distribution is Distribution.LOGNORMAL:
            sigma = sqrt(log1p(self.std**2))
            out *= sigma
            out -= sigma**2 / 2
            np.exp(out, out=out)
        else:
            out *= self.std
            out += 1.0
