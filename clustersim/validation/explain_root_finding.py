"""How strong must a cause be so that the simulated step time equals the measured one? Root finding.

Every evaluation is a simulation and expensive. Step time grows about linearly with the strength, with kinks
where another rank, link or host becomes the bottleneck. So the root is first bracketed by extrapolating the
line through the samples, then the bracket is refined by inverse quadratic interpolation where that is safe,
else by bisection.

Reference: Chandrupatla, "A new hybrid quadratic/bisection algorithm for finding the zero of a nonlinear
function without using derivatives", Advances in Engineering Software 28(3), 1997.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from clustersim.common.units import Seconds

TOLERANCE: Final = 0.002  # stopping tolerance: relative to the gap, or, where the curve is steep, to the strength
_MAX_SIMULATIONS: Final = 16  # simulations per cause
_OVERSHOOT: Final = 1.05  # factor on the extrapolated root, so that the next sample lies beyond it


@dataclass(frozen=True, slots=True)
class StrengthSample:
    """A strength and its residual: simulated minus measured step time, as a fraction of the gap.

    The residual is -1 at the neutral strength and 0 where the step time equals the measured one.
    """

    strength: float
    residual: float


@dataclass(frozen=True, slots=True)
class FittedStrength:
    """The strength that comes closest; explains_gap: it explains the gap, or a stronger cause would explain more."""

    strength: float
    step_time: Seconds
    explains_gap: bool


@dataclass(frozen=True, slots=True)
class StepTimeGap:
    """Expected and measured step time in seconds, which differ."""

    expected: Seconds
    measured: Seconds

    @property
    def is_slower(self) -> bool:
        """Whether the measured step is longer than expected."""
        return self.measured > self.expected

    def explained_share(self, step_time: Seconds) -> float:
        """Fraction of the gap that a step time explains: 0 as expected, 1 as measured."""
        return (step_time - self.expected) / (self.measured - self.expected)

    def step_time_at(self, share: float) -> Seconds:
        """The step time at an explained share: inverse of `explained_share`."""
        return self.expected + share * (self.measured - self.expected)


def find_strength(
    step_time: Callable[[float], Seconds], gap: StepTimeGap, *, neutral: float, limit: float
) -> FittedStrength:
    """The strength between `neutral` and `limit` that explains the gap, or the limit if none does.

    step_time(strength): simulates.
    """

    def evaluate(strength: float) -> StrengthSample:
        return StrengthSample(strength, gap.explained_share(step_time(strength)) - 1.0)

    below, above, simulations_left = _bracket(evaluate, StrengthSample(neutral, -1.0), limit)
    if above is None:
        return FittedStrength(below.strength, gap.step_time_at(1.0 + below.residual), explains_gap=False)
    best = _refine_bracket(evaluate, below, above, simulations_left)
    return FittedStrength(best.strength, gap.step_time_at(1.0 + best.residual), explains_gap=True)


def _bracket(
    evaluate: Callable[[float], StrengthSample], start: StrengthSample, limit: float
) -> tuple[StrengthSample, StrengthSample | None, int]:
    """The last sample with a negative residual, the first with a non-negative one (None: none), simulations left."""
    below, share = start, 0.05
    for simulations_left in range(_MAX_SIMULATIONS, 0, -1):
        is_last = simulations_left == 1 or share >= 1.0
        point = evaluate(limit if is_last else start.strength + share * (limit - start.strength))
        if point.residual >= -TOLERANCE:
            return below, point, simulations_left - 1
        if is_last:
            return point, None, simulations_left - 1
        slope = (point.residual - start.residual) / share
        secant_fraction = _OVERSHOOT / slope if slope > 0.0 else 1.0
        below, share = point, min(1.0, max(2.0 * share, secant_fraction))
    return below, None, 0


def _refine_bracket(
    evaluate: Callable[[float], StrengthSample], below: StrengthSample, above: StrengthSample, simulations_left: int
) -> StrengthSample:
    """Chandrupatla's algorithm: newest sample, the one on the opposite side of the root, and the previous one."""
    newest, opposite, previous = above, below, below
    fraction = _secant_step(opposite, newest)
    for _ in range(simulations_left):
        best = min(newest, opposite, key=lambda point: abs(point.residual))
        if abs(best.residual) <= TOLERANCE or abs(newest.strength - opposite.strength) <= TOLERANCE * abs(
            best.strength
        ):
            return best
        point = evaluate(newest.strength + fraction * (opposite.strength - newest.strength))
        if math.copysign(1.0, point.residual) == math.copysign(1.0, newest.residual):
            previous, newest = newest, point
        else:
            previous, opposite, newest = opposite, newest, point
        fraction = _interpolation_step(newest, opposite, previous)
    return min(newest, opposite, key=lambda point: abs(point.residual))


def _secant_step(opposite: StrengthSample, newest: StrengthSample) -> float:
    """Root of the line through two samples, as a fraction of the distance from `newest` to `widens_gap`."""
    return min(0.995, max(0.005, newest.residual / (newest.residual - opposite.residual)))


def _interpolation_step(newest: StrengthSample, opposite: StrengthSample, previous: StrengthSample) -> float:
    """Position of the next sample, as a fraction of the distance from `newest` to `widens_gap`."""
    if opposite.strength == previous.strength or previous.residual in (newest.residual, opposite.residual):
        return 0.5
    strength_ratio = (newest.strength - opposite.strength) / (previous.strength - opposite.strength)
    residual_ratio = (newest.residual - opposite.residual) / (previous.residual - opposite.residual)
    if not (residual_ratio**2 < strength_ratio and (1.0 - residual_ratio) ** 2 < 1.0 - strength_ratio):
        return 0.5
    extrapolation_ratio = (previous.strength - newest.strength) / (opposite.strength - newest.strength)
    fraction = (
        newest.residual
        / (opposite.residual - newest.residual)
        * previous.residual
        / (opposite.residual - previous.residual)
    )
    fraction += (
        extrapolation_ratio
        * newest.residual
        / (previous.residual - newest.residual)
        * opposite.residual
        / (previous.residual - opposite.residual)
    )
    return min(0.98, max(0.02, fraction))
