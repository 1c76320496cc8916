"""How does a collective go on while kernels of its members run beside it?

It goes at the pace of the member whose kernels slow it most, since data pass all of them. Beside a block it goes at one
pace: the mean over the block's operations (`SegmentCost.comm_speed`). What a collective moves beside a whole block is so
exact, beside a part of one it is an average over that block. Where nobody computes it goes at its own pace.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

import simpy

from clustersim.common.units import Seconds
from clustersim.engine.kernel.environment import SimEnvironment


@dataclass(slots=True, eq=False)
class InFlightCollective:
    """A collective under way. done: it has ended; limit: lets it go at a part of its own pace from now on."""

    done: simpy.Event
    set_rate_bound: Callable[[float], None]
    _rank_bounds: dict[int, float] = field(init=False, default_factory=dict)
    _bound: float = field(init=False, default=1.0)

    def bound_rate(self, rank: int, rate: float) -> None:
        """Note at which pace it can go as far as one member is concerned."""
        self._rank_bounds[rank] = rate
        slowest = min(self._rank_bounds.values())
        if slowest != self._bound and not self.done.triggered:
            self._bound = slowest
            self.set_rate_bound(slowest)


class PrivateCollective:
    """Seconds of work that nobody shares links with, at a pace that changes."""

    __slots__ = ("_remaining", "_updated", "_rate", "_timer_id", "done", "environment")

    def __init__(self, environment: SimEnvironment, seconds: Seconds) -> None:
        self.environment, self._remaining, self._rate = environment, seconds, 1.0
        self.done = simpy.Event(environment)
        self._updated, self._timer_id = environment.now, 0
        self._set_timer()

    def set_rate_bound(self, rate: float) -> None:
        """Go on at this pace from now."""
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
