"""How long does something take, and how sure is that?

It is run until it gets no faster, then timed in samples of as many runs as make one long against the clock's
resolution. The answer is their median (`devices.sample_statistics`).
Sampling ends when the median's standard error (1.2533 standard deviations over the root of the samples, for normal
ones) is below a part of it and the samples span 200 ms (a burst says nothing of the hours that a step runs), or when
the time that was given is up. Of 300 kernels in eight minutes each has 1.6 s, operands and compiling included.
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

_MEDIAN_ERROR: Final = 1.2533  # standard error of a median over that of a mean, of a normal distribution


@dataclass(frozen=True, slots=True)
class MeasurementMethod:
    """How much is measured.

    seconds: spent on samples, at most (but for the least number of samples); sample: that one lasts, at least; batch:
    runs in a sample, at most; error: of the median, at which sampling ends; span: from the first sample to the last, at
    least, where the seconds are enough; cold: operands are not in a cache.
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
        """The method in a sentence, as records keep it."""
        operands = "rotated through more memory than the caches hold, or flushed" if self.cold_cache else "warm"
        return (
            f"random normal operands, {operands}; run until no faster, then {self.min_samples} to {self.max_samples} samples of at "
            f"least {self.min_sample_seconds * 1e3:g} ms (or one run) each over {self.min_span_seconds:g} s; median, 5th and 95th "
            f"percentile; samples beyond {OUTLIER_STDS:g} x {MAD_TO_STD} median absolute deviations dropped"
        )


QUICK: Final = MeasurementMethod(max_seconds=0.05, min_samples=3, max_samples=20, target_error=0.01)
"""Good enough for a comparison within one run."""


def measure_action(
    stopwatch: Stopwatch, action: Action, method: MeasurementMethod, *, rotation_length: int = 1
) -> TimeStatistics:
    """Time an action; round_of: runs after which it starts over with the same operands."""
    run_seconds = _warm_up(stopwatch, action, rotation_length)
    runs = max(1, min(method.max_runs_per_sample, math.ceil(method.min_sample_seconds / run_seconds)))
    samples: list[Seconds] = []
    started = stopwatch.now()
    while not _is_sampled(samples, stopwatch.now() - started, method):
        samples.append(stopwatch.time(action, runs) / runs)
    return time_statistics(samples)


def _warm_up(stopwatch: Stopwatch, action: Action, rotation_length: int) -> Seconds:
    """Run a round after the other until one is not much faster than that before; seconds of one run."""
    previous = stopwatch.time(action, rotation_length)
    while (current := stopwatch.time(action, rotation_length)) < 0.9 * previous:
        previous = current
    return max(current / rotation_length, 1e-9)


def _is_sampled(samples: Sequence[Seconds], elapsed: Seconds, method: MeasurementMethod) -> bool:
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
