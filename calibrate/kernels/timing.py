"""Statistical timing of an action.

The action is run until it gets no faster, then timed in samples of as many runs as make a sample long
compared to the clock's resolution. The result is the median of the samples (`devices.sample_statistics`).
Sampling ends when the standard error of the median (1.2533 standard deviations over the root of the number
of samples, for a normal distribution) is below the target and the samples span 200 ms (a short burst does
not represent the hours that training runs), or when the time limit is reached. With 300 kernels in eight
minutes each has 1.6 s, operands and compilation included.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from calibrate.devices.sample_statistics import MAD_TO_STD, OUTLIER_STDS, robust_std, time_statistics
from calibrate.devices.stopwatch import Action, Stopwatch
from clustersim.common.units import Seconds
from clustersim.cost.calibration_record import TimeStatistics

__all__ = ["QUICK", "MeasurementMethod", "measure_action", "time_statistics"]

_MEDIAN_ERROR: Final = 1.2533  # ratio of the standard errors of median and mean, for a normal distribution


@dataclass(frozen=True, slots=True)
class MeasurementMethod:
    """How much is measured.

    max_seconds: limit of sampling time (except for the minimum number of samples); min_sample_seconds: of one
    sample; max_runs_per_sample: limit; min_samples, max_samples: limits; target_error: relative error of the
    median at which sampling ends; min_span_seconds: from the first to the last sample, if max_seconds allows;
    cold_cache: operands are not in a cache.
    """

    max_seconds: Seconds = 0.5
    min_sample_seconds: Seconds = 5e-3
    max_runs_per_sample: int = 512
    min_samples: int = 5
    max_samples: int = 200
    min_span_seconds: Seconds = 0.2
    target_error: float = 2e-3
    cold_cache: bool = True

    def __str__(self) -> str:
        """Description of the method, as records store it."""
        operands = "rotated through more memory than the caches hold, or flushed" if self.cold_cache else "warm"
        return (
            f"random normal operands, {operands}; run until no faster, then {self.min_samples} to {self.max_samples} "
            "samples of at "
            f"least {self.min_sample_seconds * 1e3:g} ms (or one run) each over {self.min_span_seconds:g} s; median, "
            "5th and 95th "
            f"percentile; samples beyond {OUTLIER_STDS:g} x {MAD_TO_STD} median absolute deviations dropped"
        )


QUICK: Final = MeasurementMethod(max_seconds=0.05, min_samples=3, max_samples=20, target_error=0.01)
"""Accurate enough for a comparison within one run."""


def measure_action(
    stopwatch: Stopwatch, action: Action, method: MeasurementMethod, *, rotation_length: int = 1
) -> TimeStatistics:
    """Time an action; rotation_length: runs after which the same operands are used again."""
    run_seconds = _warm_up(stopwatch, action, rotation_length)
    runs = max(1, min(method.max_runs_per_sample, math.ceil(method.min_sample_seconds / run_seconds)))
    samples: list[Seconds] = []
    started = stopwatch.now()
    while not _is_sampled(samples, stopwatch.now() - started, method):
        samples.append(stopwatch.time(action, runs) / runs)
    return time_statistics(samples)


def _warm_up(stopwatch: Stopwatch, action: Action, rotation_length: int) -> Seconds:
    """Repeat rounds until one is not much faster than the one before; seconds of one run."""
    previous = stopwatch.time(action, rotation_length)
    while (current := stopwatch.time(action, rotation_length)) < 0.9 * previous:
        previous = current
    return max(current / rotation_length, 1e-9)


def _is_sampled(samples: Sequence[Seconds], elapsed: Seconds, method: MeasurementMethod) -> bool:
    """Whether sampling can end."""
    if len(samples) < method.min_samples:
        return len(samples) >= 1 and elapsed > 10.0 * method.max_seconds
    if elapsed >= method.max_seconds:
        return True
    if elapsed < method.min_span_seconds:
        return False
    if len(samples) >= method.max_samples:
        return True
    times = np.array(samples)
    error = _MEDIAN_ERROR * robust_std(times) / math.sqrt(len(times))
    return bool(error <= method.target_error * np.median(times))
