"""How strong must a cause be, so that a step takes the time that was measured?

Step times are simulated, so each costs; they grow with the strength, about in a straight line, with bends where another
rank, link or host becomes the slowest. So: a guess on the line that the points known so far give, which brackets the
strength soon; then the bracket is narrowed by inverse quadratic interpolation where that is safe and by bisection
where it is not.

Reference: Chandrupatla, "A new hybrid quadratic/bisection algorithm for finding the zero of a nonlinear function
without using derivatives", Advances in Engineering Software 28(3), 1997.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from clustersim.common.units import Seconds

CLOSE: Final = 0.002  # of the gap: what is left of it when a strength is found; or of the strength, where that is steep
_MOST: Final = 16  # simulations for one cause
_BEYOND: Final = 1.05  # of the way to where the line would meet: so that the next point lies behind it


@dataclass(frozen=True, slots=True)
class Point:
    """A strength, and by how much the step is longer (or less short) than what was measured, in parts of the gap.

    -1 where nothing is changed, 0 where the step takes what was measured.
    """

    strength: float
    miss: float


@dataclass(frozen=True, slots=True)
class Found:
    """The strength that comes closest; reached: it explains the gap, or a stronger cause would explain more."""

    strength: float
    step_time: Seconds
    reached: bool


@dataclass(frozen=True, slots=True)
class Gap:
    """expected, measured: seconds, which differ."""

    expected: Seconds
    measured: Seconds

    @property
    def longer(self) -> bool:
        """Whether more was measured than expected."""
        return self.measured > self.expected

    def share(self, step_time: Seconds) -> float:
        """Part of the gap that a step time explains: 0 as expected, 1 as measured."""
        return (step_time - self.expected) / (self.measured - self.expected)

    def step_time(self, share: float) -> Seconds:
        """What `share` comes from."""
        return self.expected + share * (self.measured - self.expected)


def find_strength(step_time: Callable[[float], Seconds], gap: Gap, *, none: float, limit: float) -> Found:
    """The strength between `none` and `limit` that explains a gap, or the limit where none does.

    step_time(strength): simulates.
    """

    def at(strength: float) -> Point:
        return Point(strength, gap.share(step_time(strength)) - 1.0)

    below, above, left = _bracket(at, Point(none, -1.0), limit)
    if above is None:
        return Found(below.strength, gap.step_time(1.0 + below.miss), reached=False)
    best = _narrowed(at, below, above, left)
    return Found(best.strength, gap.step_time(1.0 + best.miss), reached=True)


def _bracket(at: Callable[[float], Point], start: Point, limit: float) -> tuple[Point, Point | None, int]:
    """The last point that explains too little, the first that explains enough (None: none does), simulations left."""
    below, share = start, 0.05
    for left in range(_MOST, 0, -1):
        last = left == 1 or share >= 1.0
        point = at(limit if last else start.strength + share * (limit - start.strength))
        if point.miss >= -CLOSE:
            return below, point, left - 1
        if last:
            return point, None, left - 1
        gained = (point.miss - start.miss) / share
        line = _BEYOND / gained if gained > 0.0 else 1.0
        below, share = point, min(1.0, max(2.0 * share, line))
    return below, None, 0


def _narrowed(at: Callable[[float], Point], below: Point, above: Point, left: int) -> Point:
    """Chandrupatla's algorithm: `new` is the last point, `other` the one across, `old` the one before."""
    new, other, old = above, below, below
    part = _on_line(other, new)
    for _ in range(left):
        best = min(new, other, key=lambda point: abs(point.miss))
        if abs(best.miss) <= CLOSE or abs(new.strength - other.strength) <= CLOSE * abs(best.strength):
            return best
        point = at(new.strength + part * (other.strength - new.strength))
        if math.copysign(1.0, point.miss) == math.copysign(1.0, new.miss):
            old, new = new, point
        else:
            old, other, new = other, new, point
        part = _part(new, other, old)
    return min(new, other, key=lambda point: abs(point.miss))


def _on_line(other: Point, new: Point) -> float:
    """Where the line between two points is zero, as a part of the way from `new` to `other`."""
    return min(0.995, max(0.005, new.miss / (new.miss - other.miss)))


def _part(new: Point, other: Point, old: Point) -> float:
    """How far the next point lies on the way from `new` to `other`."""
    if other.strength == old.strength or old.miss in (new.miss, other.miss):
        return 0.5
    along = (new.strength - other.strength) / (old.strength - other.strength)
    height = (new.miss - other.miss) / (old.miss - other.miss)
    if not (height**2 < along and (1.0 - height) ** 2 < 1.0 - along):
        return 0.5
    bend = (old.strength - new.strength) / (other.strength - new.strength)
    part = new.miss / (other.miss - new.miss) * old.miss / (other.miss - old.miss)
    part += bend * new.miss / (old.miss - new.miss) * other.miss / (old.miss - other.miss)
    return min(0.98, max(0.02, part))
