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

from calibrate.devices.sample_statistics import NORMAL, OUTLYING, deviation, spread
from calibrate.devices.stopwatch import Action, Stopwatch
from clustersim.common.units import Seconds
from clustersim.cost.calibration_record import TimeStatistics

__all__ = ["QUICK", "Method", "measure", "spread"]

_MEDIAN_ERROR: Final = 1.2533  # standard error of a median over that of a mean, of a normal distribution


@dataclass(frozen=True, slots=True)
class Method:
    """How much is measured.

    seconds: spent on samples, at most (but for the least number of samples); sample: that one lasts, at least; batch:
    runs in a sample, at most; error: of the median, at which sampling ends; span: from the first sample to the last, at
    least, where the seconds are enough; cold: operands are not in a cache.
    """

    seconds: Seconds = 0.5
    sample: Seconds = 5e-3
    batch: int = 512
    least: int = 5
    most: int = 200
    span: Seconds = 0.2
    error: float = 2e-3
    cold: bool = True

    def __str__(self) -> str:
        """The method in a sentence, as records keep it."""
        operands = "rotated through more memory than the caches hold, or flushed" if self.cold else "warm"
        return (
            f"random normal operands, {operands}; run until no faster, then {self.least} to {self.most} samples of at "
            f"least {self.sample * 1e3:g} ms (or one run) each over {self.span:g} s; median, 5th and 95th "
            f"percentile; samples beyond {OUTLYING:g} x {NORMAL} median absolute deviations dropped"
        )


QUICK: Final = Method(seconds=0.05, least=3, most=20, error=0.01)
"""Good enough for a comparison within one run."""


def measure(watch: Stopwatch, action: Action, method: Method, *, round_of: int = 1) -> TimeStatistics:
    """Time an action; round_of: runs after which it starts over with the same operands."""
    once = _warm(watch, action, round_of)
    repeats = max(1, min(method.batch, math.ceil(method.sample / once)))
    samples: list[Seconds] = []
    began = watch.now()
    while not _enough(samples, watch.now() - began, method):
        samples.append(watch.time(action, repeats) / repeats)
    return spread(samples)


def _warm(watch: Stopwatch, action: Action, round_of: int) -> Seconds:
    """Run a round after the other until one is not much faster than that before; seconds of one run."""
    before = watch.time(action, round_of)
    while (now := watch.time(action, round_of)) < 0.9 * before:
        before = now
    return max(now / round_of, 1e-9)


def _enough(samples: Sequence[Seconds], spent: Seconds, method: Method) -> bool:
    if len(samples) < method.least:
        return len(samples) >= 1 and spent > 10.0 * method.seconds
    if spent >= method.seconds:
        return True
    if spent < method.span:
        return False
    if len(samples) >= method.most:
        return True
    every = np.array(samples)
    error = _MEDIAN_ERROR * deviation(every) / math.sqrt(len(every))
    return bool(error <= method.error * np.median(every))
