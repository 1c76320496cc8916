"""Within which interval does a run of many steps lie, given its simulated durations and its step's interval?

A step that takes f times as long makes a run f times as long: failures come per hour, so that there are as
many more of them. Assumed: the step's error is log-normal on either side of the prediction, with half of it and 5 %
beyond the end of the prediction interval on each, and independent of the failures. A run then lasts a simulated
duration times an error, and its distribution is a mixture of these, one for each simulated run.
"""

import math
from collections.abc import Sequence
from statistics import NormalDist
from typing import Final

import numpy as np

from clustersim.common.arrays import FloatArray
from clustersim.uncertainty.prediction_interval import INTERVAL_COVERAGE

_INTERVAL_DEVIATIONS: Final = NormalDist().inv_cdf(0.5 + INTERVAL_COVERAGE / 2.0)
"""Distance of either end of the prediction interval, in standard deviations of the logarithm on its side."""
_TOLERANCE: Final = 1e-12  # of the logarithm
_MIN_DEVIATION: Final = 1e-12  # of a side without errors
_standard_normal_cdf: Final = np.vectorize(NormalDist().cdf, otypes=[float])


def scaled_percentiles(
    durations: Sequence[float], interval: tuple[float, float], percentiles: Sequence[float]
) -> tuple[float, ...]:
    """Percentiles of the durations, each multiplied by the step's error.

    interval: ends of the step's prediction interval over the step, from 0 to 1 and from 1 (both 1: no error, the
    percentiles of the durations); percentiles: above 0 and below 100.
    """
    fast, slow = (abs(math.log(end)) / _INTERVAL_DEVIATIONS for end in interval)
    if fast == slow == 0.0:
        return tuple(np.percentile(durations, percentiles).tolist())
    logarithms, sides = np.log(np.asarray(durations)), (max(fast, _MIN_DEVIATION), max(slow, _MIN_DEVIATION))
    return tuple(math.exp(_mixture_quantile(logarithms, sides, percent / 100.0)) for percent in percentiles)


def _mixture_quantile(medians: FloatArray, deviations: tuple[float, float], probability: float) -> float:
    """Quantile of the equal mixture of distributions that are normal on either side of their medians.

    It lies between their own quantiles. deviations: below and above the medians.
    """
    fast, slow = deviations
    standard = NormalDist().inv_cdf(probability)
    offset = standard * (fast if standard < 0.0 else slow)
    low, high = float(medians.min()) + offset, float(medians.max()) + offset
    while high - low > _TOLERANCE:
        middle = (low + high) / 2.0
        distance = middle - medians
        if float(_standard_normal_cdf(distance / np.where(distance < 0.0, fast, slow)).mean()) < probability:
            low = middle
        else:
            high = middle
    return (low + high) / 2.0
