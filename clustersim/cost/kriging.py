"""What is between measured points, and how wrong is that?

Values are taken as a common level, plus what varies smoothly over the points, plus noise of each point: a Gaussian
process whose covariance of two points at distance d, in units of the smooth part's variance, is

    LEVEL + (1 + s) exp(-s), s = sqrt(3) d / RANGE        (Matérn, smoothness 3/2), and NOISE more for a point itself.

Its prediction is a weighted mean of the values, which tends to nothing at all (the base model, for values that are
logarithms of measured over modelled seconds) only where nothing was measured. The error is that of every point as
predicted from all others, which one inverse gives exactly.

Why this one: errors left out, on 920 published matrix products of four GPUs (`calibrate/published/kernels.csv`) with
their rooflines, and as shares of the roofline's own error, in brackets 60 and 300 products, norms and attention on a CPU
and the same GPUs with a roofline of two constants and with one three times off:

    roofline alone                                            1.00
    inverse distance, 16 neighbours, powers 1, 2, 3           0.82 to 0.85
    local linear regression, 24 neighbours, ridge 0.3         0.84
    this, with RANGE 2, NOISE 0.3, LEVEL 10                   0.84

References: Rasmussen, Williams, "Gaussian Processes for Machine Learning", 2006, equations 2.25, 4.17, 5.12; Cressie,
"Statistics for Spatial Data", 1993, section 3.2 (ordinary kriging).
"""

from dataclasses import dataclass
from functools import cached_property
from typing import Final

import numpy as np
from numpy.typing import NDArray

FloatArray = NDArray[np.float64]

RANGE: Final = 2.0
NOISE: Final = 0.3
LEVEL: Final = 10.0


@dataclass(frozen=True)
class Kriging:
    """points: [points, dimensions]; values: [points]."""

    points: FloatArray
    values: FloatArray

    def at(self, point: FloatArray) -> float:
        """The value expected at a point [dimensions]."""
        return float(_covariance(self.points, point[None])[:, 0] @ self._weights)

    @cached_property
    def left_out(self) -> FloatArray:
        """The value expected at every point, from all others: [points]; zero where there is no other."""
        return self.values - self._weights / self._inverse.diagonal()

    @cached_property
    def _weights(self) -> FloatArray:
        weights: FloatArray = self._inverse @ self.values
        return weights

    @cached_property
    def _inverse(self) -> FloatArray:
        covariance = _covariance(self.points, self.points) + NOISE * np.eye(len(self.points))
        inverse: FloatArray = np.linalg.inv(covariance)
        return inverse


def _covariance(first: FloatArray, second: FloatArray) -> FloatArray:
    """[first, second]."""
    squared = (first**2).sum(axis=1)[:, None] + (second**2).sum(axis=1) - 2.0 * first @ second.T
    scaled = np.sqrt(3.0 * np.maximum(squared, 0.0)) / RANGE
    covariance: FloatArray = LEVEL + (1.0 + scaled) * np.exp(-scaled)
    return covariance
