"""How does a stretch of operations go on when a collective begins or ends beside it?

Operations that nobody else can observe are one event. Where each of them ends is known at two paces: alone, and beside
a collective of the rank's data stream, which makes kernels take longer. When the pace changes midway, the operation
under way is found by bisection, and as much of it as is done alone is done at the other pace.
"""

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field
from math import inf

import numpy as np
import simpy

from clustersim.arrays import FloatArray
from clustersim.units import Seconds


@dataclass(frozen=True, slots=True, eq=False)
class Paces:
    """Ends of operations from the stretch's start, at both paces, each from 0 on: [operations + 1]."""

    alone: list[Seconds]
    beside: list[Seconds]

    @property
    def equal(self) -> bool:
        """Whether a collective beside changes nothing."""
        return self.alone is self.beside

    def between(self, begin: int, end: int) -> "Paces":
        """Some operations of the stretch, as one."""
        alone = [0.0, self.alone[end] - self.alone[begin]]
        return Paces(alone, alone if self.equal else [0.0, self.beside[end] - self.beside[begin]])


def paces(kernels: FloatArray, rest: FloatArray, slowdown: float) -> Paces:
    """Paces of operations; kernels, rest: [operations] seconds that a collective slows, and that it does not."""
    alone = _ends(kernels + rest)
    return Paces(alone, _ends(kernels * (1.0 + slowdown) + rest) if slowdown and kernels.any() else alone)


def _ends(durations: FloatArray) -> list[Seconds]:
    ends: list[Seconds] = np.concatenate(([0.0], np.cumsum(durations))).tolist()
    return ends


@dataclass(slots=True, eq=False)
class Stretch:
    """A stretch under way. done: it has ended; beside: a collective is beside it now; disturbed: one has been."""

    environment: simpy.Environment
    paces: Paces
    beside: bool
    done: simpy.Event = field(init=False)
    disturbed: bool = field(init=False)
    _at: Seconds = field(init=False, default=0.0)
    _since: Seconds = field(init=False)
    _due: Seconds = field(init=False)
    _timed: Seconds = field(init=False, default=inf)
    _timer: int = field(init=False, default=0)

    def __post_init__(self) -> None:
        self.done = self.environment.event()
        self._since = self.environment.now
        self.disturbed = self.beside
        self._go_on()

    def change(self, beside: bool) -> None:
        """Go on at the other pace."""
        if beside == self.beside or self.done.triggered:
            return
        now, there = self.environment.now, self._pace(beside)
        self._at = _moved(self._at + (now - self._since), self._pace(self.beside), there)
        self._since, self.beside, self.disturbed = now, beside, True
        self._go_on()

    def _pace(self, beside: bool) -> list[Seconds]:
        return self.paces.beside if beside else self.paces.alone

    def _go_on(self) -> None:
        """Be done when this pace leads to the end; a timer that is set for an earlier time will see to it then."""
        left = max(self._pace(self.beside)[-1] - self._at, 0.0)
        self._due = self._since + left
        if self._due < self._timed:
            self._wait(left)

    def _wait(self, seconds: Seconds) -> None:
        self._timer += 1
        self._timed, number = self.environment.now + seconds, self._timer
        timer = self.environment.timeout(seconds)
        timer.callbacks.append(lambda _: self._ring(number))

    def _ring(self, timer: int) -> None:
        if timer != self._timer:
            return
        left = self._due - self.environment.now
        if left > 0.0:
            self._wait(left)
        else:
            self.done.succeed()


def _moved(at: Seconds, here: Sequence[Seconds], there: Sequence[Seconds]) -> Seconds:
    """The same place in a stretch, told at another pace."""
    place = min(bisect_right(here, at), len(here) - 1)
    begin, end = here[place - 1], here[place]
    part = (at - begin) / (end - begin) if end > begin else 1.0
    return there[place - 1] + min(part, 1.0) * (there[place] - there[place - 1])
