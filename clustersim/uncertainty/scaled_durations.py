"""Within which interval does a run of many steps lie, given its simulated durations and its step's interval?

A step that takes f times as long makes a run f times as long: failures come per hour, so that there are as
many more of them. Assumed: the step's error is log-normal, with 90 % of it inside the prediction interval, and
independent of the failures. A run then lasts a simulated duration times an error, and its distribution is a
mixture of log-normals, one for each simulated run.
"""

import math
from collections.abc import Sequence
from statistics import NormalDist
from typing import Final

import numpy as np

from clustersim.common.arrays import FloatArray
from clustersim.uncertainty.prediction_interval import INTERVAL_COVERAGE

_INTERVAL_DEVIATIONS: Final = NormalDist().inv_cdf(0.5 + INTERVAL_COVERAGE / 2.0)
"""Half width of the prediction interval, in standard deviations of the logarithm."""
_TOLERANCE: Final = 1e-12  # of the logarithm
_standard_normal_cdf: Final = np.vectorize(NormalDist().cdf, otypes=[float])


def scaled_percentiles(
    durations: Sequence[float], interval_factor: float, percentiles: Sequence[float]
) -> tuple[float, ...]:
    """Percentiles of the durations, each multiplied by the step's error.

    interval_factor: upper end of the step's prediction interval over the step, from 1 (no error: the percentiles of
    the durations); percentiles: above 0 and below 100.
    """
    deviation = math.log(interval_factor) / _INTERVAL_DEVIATIONS
    if deviation == 0.0:
        return tuple(np.percentile(durations, percentiles).tolist())
    logarithms = np.log(np.asarray(durations))
    return tuple(math.exp(_mixture_quantile(logarithms, deviation, percent / 100.0)) for percent in percentiles)


def _mixture_quantile(means: FloatArray, deviation: float, probability: float) -> float:
    """Quantile of the equal mixture of normal distributions; it lies between their own quantiles."""
    offset = deviation * NormalDist().inv_cdf(probability)
    low, high = float(means.min()) + offset, float(means.max()) + offset
    while high - low > _TOLERANCE:
        middle = (low + high) / 2.0
        if float(_standard_normal_cdf((middle - means) / deviation).mean()) < probability:
            low = middle
        else:
            high = middle
    return (low + high) / 2.0
