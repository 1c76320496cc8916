"""What do repeated measurements of one thing say?

Their median, with their 5th and 95th percentile. A sample is dropped, and counted, where it is further from the median
than five standard deviations of the others, the deviation being 1.4826 median absolute deviations (Leys et al. 2013,
J. Exp. Soc. Psychology 49(4)): another process, a clock that changes. Of fewer than eight samples none is dropped,
since those say little about the others.
"""

from collections.abc import Sequence
from typing import Final

import numpy as np

from clustersim.common.arrays import FloatArray
from clustersim.common.units import Seconds
from clustersim.cost.calibration_record import TimeStatistics

NORMAL: Final = 1.4826  # standard deviations in a median absolute deviation, of a normal distribution
OUTLYING: Final = 5.0  # standard deviations
_FEW: Final = 8  # samples
_ROUNDING: Final = 1e-3  # of the median: below that samples are equal


def spread(samples: Sequence[Seconds]) -> TimeStatistics:
    """Median and percentiles of samples, without those that are far from all others."""
    every = np.array(samples)
    kept = every if len(every) < _FEW else every[np.abs(every - np.median(every)) <= _allowed(every)]
    p5, median, p95 = (float(value) for value in np.percentile(kept, (5, 50, 95)))
    return TimeStatistics(median, p5, p95, repetitions=len(kept), dropped=len(every) - len(kept))


def deviation(samples: FloatArray) -> float:
    """Standard deviations of samples, by their median absolute deviation."""
    return float(NORMAL * np.median(np.abs(samples - np.median(samples))))


def _allowed(samples: FloatArray) -> float:
    return max(OUTLYING * deviation(samples), _ROUNDING * float(np.median(samples)))
