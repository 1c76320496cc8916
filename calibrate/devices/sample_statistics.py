"""What is the time of a repeatedly measured kernel?

The median, with the 5th and 95th percentile. Outliers are dropped, and counted: samples further from the
median than five robust standard deviations, which are 1.4826 median absolute deviations (Leys et al. 2013,
J. Exp. Soc. Psychology 49(4)); their causes are other processes or clock changes. With fewer than eight
samples none is dropped, since the deviation is then too uncertain.
"""

from collections.abc import Sequence
from typing import Final

import numpy as np

from clustersim.common.arrays import FloatArray
from clustersim.common.units import Seconds
from clustersim.cost.calibration_record import TimeStatistics

MAD_TO_STD: Final = 1.4826  # standard deviations per median absolute deviation of a normal distribution
OUTLIER_STDS: Final = 5.0  # standard deviations
_MIN_SAMPLES_FOR_DROPPING: Final = 8  # samples
_MIN_RELATIVE_DEVIATION: Final = 1e-3  # relative to the median; smaller deviations never count as outliers


def time_statistics(samples: Sequence[Seconds]) -> TimeStatistics:
    """Median and percentiles of samples, without outliers."""
    values = np.array(samples)
    inliers = (
        values
        if len(values) < _MIN_SAMPLES_FOR_DROPPING
        else values[np.abs(values - np.median(values)) <= _max_deviation(values)]
    )
    p5, median, p95 = (float(value) for value in np.percentile(inliers, (5, 50, 95)))
    return TimeStatistics(median, p5, p95, repetitions=len(inliers), dropped=len(values) - len(inliers))


def robust_std(samples: FloatArray) -> float:
    """Robust standard deviation of samples, from their median absolute deviation."""
    return float(MAD_TO_STD * np.median(np.abs(samples - np.median(samples))))


def _max_deviation(samples: FloatArray) -> float:
    return max(OUTLIER_STDS * robust_std(samples), _MIN_RELATIVE_DEVIATION * float(np.median(samples)))
