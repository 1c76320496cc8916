"""How far does the step move if kernels are slower by a few parts in 10^12?

A message that arrives later by a hair changes the shares of a link that others have meanwhile, so their ends move, and
whatever they were to overlap with. Over a few thousand such changes a difference grows by two or three orders of
magnitude; over some ten thousand it no longer depends on its size: the step is chaotic, and even rounding (1e-16)
moves it by up to a percent. The physics has this property, not the arithmetic: real kernels differ by more. So a
chaotic step has no exact time; a few perturbed runs say by how much it spreads, differences below that mean nothing,
and the prediction interval is wider by it.

No order of equal instants would give it one. Of a step of 128 ranks with and without coalescing (0.13 % apart) the
first difference is the last bit of a single sum of durations, which differs by where it begins. From one end of a span
to the next it grows at most fourfold, so that no tie is broken differently: for two thirds of the step all ends come in
one order, and where two first change places they are 3e-7 of the time apart. Runs are equal only where they add the
same durations in one order (`tests/laws/test_joint_runs.py`).

Assumption: the spread of `RUN_COUNT` runs stands for that of all. Where fewer than `MIN_DELAYED_OPERATIONS` operations
were delayed by shared links nothing is run again: of the packaged examples the most sensitive one (DeepSeek-V3, 521
delayed operations) multiplies a perturbation by 200, which leaves rounding invisible.
"""

from dataclasses import dataclass
from typing import Final

from clustersim.common.units import Seconds
from clustersim.results.simulated_step import SimulatedStep

MIN_DELAYED_OPERATIONS: Final = 5000
RUN_COUNT: Final = 3
PERTURBATION: Final = 1e-12
"""Relative increase of all kernel durations in the first perturbed run; twice and three times that in the others."""
MIN_REPORTED_SPREAD: Final = 1e-5  # relative to the step


@dataclass(frozen=True, slots=True)
class TimingSensitivity:
    """Spread of a chaotic step. low, high: of its time over the simulated one, at most and at least 1."""

    low: float
    high: float

    @property
    def spread(self) -> float:
        """The largest difference between two of the runs, as a fraction of the step."""
        return self.high - self.low


def may_be_chaotic(step: SimulatedStep) -> bool:
    """Whether enough operations share links for rounding to matter. Jittered steps vary by far more anyway."""
    return step.scenario.jitter is None and len(step.trace.contention.event) >= MIN_DELAYED_OPERATIONS


def timing_sensitivity(step_time: Seconds, perturbed: tuple[Seconds, ...]) -> TimingSensitivity | None:
    """The spread of a step over perturbed runs; None where it was not perturbed, or is not chaotic."""
    if not perturbed:
        return None
    times = [time / step_time for time in (step_time, *perturbed)]
    sensitivity = TimingSensitivity(min(times), max(times))
    return sensitivity if sensitivity.spread >= MIN_REPORTED_SPREAD else None
