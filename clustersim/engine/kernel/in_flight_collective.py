"""Collectives in flight whose rate is bounded by concurrent kernels of their members.

The rate is that of the member whose kernels slow the collective most, since data pass through all of them.
During a segment the rate is constant: the mean over the segment's operations (`SegmentCost`). What is
transferred during a full segment is therefore exact, during a fraction of one it is an approximation. While
no member computes, the rate is 1 (uncontended).
"""

from collections.abc import Callable
from dataclasses import dataclass, field

import simpy

from clustersim.common.units import Seconds
from clustersim.engine.kernel.environment import SimEnvironment


@dataclass(slots=True, eq=False)
class InFlightCollective:
    """A collective in flight. done: its completion; set_rate_bound: bounds its rate (1: uncontended) from now on."""

    done: simpy.Event
    set_rate_bound: Callable[[float], None]
    _rank_bounds: dict[int, float] = field(init=False, default_factory=dict)
    _bound: float = field(init=False, default=1.0)

    def bound_rate(self, rank: int, rate: float) -> None:
        """Set the rate bound of one member; the minimum over all members applies."""
        self._rank_bounds[rank] = rate
        slowest = min(self._rank_bounds.values())
        if slowest != self._bound and not self.done.triggered:
            self._bound = slowest
            self.set_rate_bound(slowest)


class PrivateCollective:
    """A collective on links of its own: a fluid action of given uncontended seconds, with a rate bound."""

    __slots__ = ("_rate", "_remaining", "_timer_id", "_updated", "done", "environment")

    def __init__(self, environment: SimEnvironment, seconds: Seconds) -> None:
        self.environment, self._remaining, self._rate = environment, seconds, 1.0
        self.done = simpy.Event(environment)
        self._updated, self._timer_id = environment.now, 0
        self._set_timer()

    def set_rate_bound(self, rate: float) -> None:
        """Continue at this rate from now on."""
        now = self.environment.now
        self._remaining = max(self._remaining - (now - self._updated) * self._rate, 0.0)
        self._updated, self._rate = now, rate
        self._timer_id += 1
        self._set_timer()

    def _set_timer(self) -> None:
        timer_id = self._timer_id
        event = self.environment.event_after(self._remaining / self._rate)
        event.callbacks.append(lambda _: self._on_timer(timer_id))

    def _on_timer(self, timer_id: int) -> None:
        if timer_id == self._timer_id:
            self.done.succeed()
