"""How much does the same kernel vary from one run to the next?

Every kernel of every rank takes its time multiplied by a factor with mean 1 (exponential: at least 1), drawn anew each
time that it runs. Factors of one rank depend on the seed and the rank alone, so they are the same whoever else is
simulated, and can be drawn again for one rank. Draws are independent; slow drifts (temperature, clocks) are what
`SlowGpus` disturbances are for.

Reference: Philox (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011), a counter-based generator.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from math import log1p, sqrt
from typing import Final

import numpy as np

from clustersim.common.arrays import FloatArray

MAX_NORMAL_STD: Final = 0.1
"""Standard deviations of the normal distribution above which a factor below zero would be drawn sooner or later."""


class Distribution(Enum):
    """Of the factor by which a kernel's time varies."""

    NORMAL = "normal"  # mean 1
    LOGNORMAL = "lognormal"  # mean 1, never below zero, a longer tail
    EXPONENTIAL = "exponential"  # 1 and more: interruptions that only ever cost time


@dataclass(frozen=True, slots=True)
class Jitter:
    """std: standard deviation of the factor, at least 0 (normal: at most MOST_NORMAL)."""

    std: float
    distribution: Distribution = Distribution.NORMAL
    seed: int = 0

    def rank_factors(self, rank: int, count: int) -> FloatArray:
        """Factors of the first `count` operations that a rank runs: [count]."""
        factors = np.empty(count)
        self.draw_factors([self.rank_generator(rank)], factors[None, :])
        return factors

    def rank_generator(self, rank: int) -> np.random.Generator:
        """What a rank's factors are drawn from, one after the other."""
        return np.random.Generator(np.random.Philox(key=[self.seed, rank]))

    def draw_factors(self, generators: Sequence[np.random.Generator], out: FloatArray) -> None:
        """Draw the next factors of some ranks: out [ranks, count]."""
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
