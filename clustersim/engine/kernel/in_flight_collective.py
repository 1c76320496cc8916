"""How does a collective go on while kernels of its members run beside it?

It goes at the pace of the member whose kernels slow it most, since data pass all of them. Beside a block it goes at one
pace: the mean over the block's operations (`BlockCost.speed`). What a collective moves beside a whole block is so
exact, beside a part of one it is an average over that block. Where nobody computes it goes at its own pace.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

import simpy

from clustersim.common.units import Seconds
from clustersim.engine.kernel.environment import Clock


@dataclass(slots=True, eq=False)
class Moving:
    """A collective under way. done: it has ended; limit: lets it go at a part of its own pace from now on."""

    done: simpy.Event
    limit: Callable[[float], None]
    _speeds: dict[int, float] = field(init=False, default_factory=dict)
    _speed: float = field(init=False, default=1.0)

    def beside(self, rank: int, speed: float) -> None:
        """Note at which pace it can go as far as one member is concerned."""
        self._speeds[rank] = speed
        slowest = min(self._speeds.values())
        if slowest != self._speed and not self.done.triggered:
            self._speed = slowest
            self.limit(slowest)


class Alone:
    """Seconds of work that nobody shares links with, at a pace that changes."""

    __slots__ = ("_left", "_since", "_speed", "_timer", "done", "environment")

    def __init__(self, environment: Clock, seconds: Seconds) -> None:
        self.environment, self._left, self._speed = environment, seconds, 1.0
        self.done = simpy.Event(environment)
        self._since, self._timer = environment.now, 0
        self._wait()

    def limit(self, speed: float) -> None:
        """Go on at this pace from now."""
        now = self.environment.now
        self._left = max(self._left - (now - self._since) * self._speed, 0.0)
        self._since, self._speed = now, speed
        self._timer += 1
        self._wait()

    def _wait(self) -> None:
        number = self._timer
        end = self.environment.wait(self._left / self._speed)
        end.callbacks.append(lambda _: self._end(number))

    def _end(self, timer: int) -> None:
        if timer == self._timer:
            self.done.succeed()
