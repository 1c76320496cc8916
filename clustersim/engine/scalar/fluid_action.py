"""How does a stretch of operations go on when a collective begins or ends beside it?

Operations that nobody else can observe are one event. Where each of them ends is known at every pace: alone, and beside
a collective of the rank's data stream, which makes kernels take longer, each kind of collective in its own way. When
the pace changes midway, the operation under way is found by bisection, and as much of it as is done at the one pace is
done at the other. When each operation ended follows from the times of these changes, so no event is needed for it.
"""

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field
from math import inf

import numpy as np
import simpy

from clustersim.common.arrays import FloatArray
from clustersim.common.units import Seconds
from clustersim.engine.kernel.environment import Clock


@dataclass(frozen=True, slots=True, eq=False)
class Paces:
    """Ends of operations from the stretch's start, at each pace, each from 0 on: [paces][operations + 1].

    Pace 0 is alone; one at which nothing is slowed is the same list. equal: no collective beside changes anything.
    """

    ends: tuple[list[Seconds], ...]
    alone: list[Seconds] = field(init=False)
    equal: bool = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "alone", self.ends[0])
        object.__setattr__(self, "equal", all(end is self.alone for end in self.ends))

    def reached(self, first: FloatArray, begin: int, until: int) -> FloatArray:
        """When operations beside which nothing is begin, and the last one ends: [runs, until - begin + 1].

        first: [runs] when operation `begin` begins.
        """
        ends = np.array(self.alone[begin : until + 1])
        reached: FloatArray = first[:, None] + (ends - ends[0])
        return reached

    def between(self, begin: int, end: int) -> "Paces":
        """Some operations of the stretch."""
        alone = _between(self.alone, begin, end)
        return Paces(tuple(alone if item is self.alone else _between(item, begin, end) for item in self.ends))


def paces(kernels: FloatArray, rest: FloatArray, slowing: FloatArray) -> Paces:
    """Paces of operations; kernels, rest: [operations] seconds that a collective slows, and that it does not.

    slowing: [paces - 1, operations] the part by which kernels take longer at each pace but the first.
    """
    alone = _ends(kernels + rest)
    beside = (_ends(kernels * (1.0 + part) + rest) if (kernels * part).any() else alone for part in slowing)
    return Paces((alone, *beside))


def _ends(durations: FloatArray) -> list[Seconds]:
    ends: list[Seconds] = np.concatenate(([0.0], np.cumsum(durations))).tolist()
    return ends


def _between(ends: Sequence[Seconds], begin: int, end: int) -> list[Seconds]:
    return [item - ends[begin] for item in ends[begin : end + 1]]


@dataclass(frozen=True, slots=True, eq=False)
class Disturbed:
    """When operations ended whose pace changed (an `engine.written.Inner`), worked out if somebody asks.

    spans: since when, in seconds from the first one's begin, they went on at which pace, from which place in its ends.
    """

    paces: Paces
    spans: tuple[tuple[Seconds, int, Seconds], ...]

    def reached(self, first: FloatArray, begin: int, until: int) -> FloatArray:
        """See `Inner`; `begin` is the first of all operations, `until` behind the last.

        Gone on from place a at time s, at a pace at which an operation ends at e, it ends at s + e - a, if the pace did
        not change before.
        """
        ends = np.zeros(len(self.paces.alone))
        for since, pace, at in self.spans:
            later = since + (np.array(self.paces.ends[pace]) - at)
            ends = np.where(later >= since, later, ends) if since else later
        reached: FloatArray = first[:, None] + ends[: until - begin + 1]
        return reached


@dataclass(slots=True, eq=False)
class Stretch:
    """A stretch under way. done: it has ended; beside: its pace now; disturbed: it was ever another than alone."""

    environment: Clock
    paces: Paces
    beside: int
    done: simpy.Event = field(init=False)
    disturbed: bool = field(init=False)
    _begun: Seconds = field(init=False)
    _at: Seconds = field(init=False, default=0.0)
    _since: Seconds = field(init=False)
    _due: Seconds = field(init=False)
    _timed: Seconds = field(init=False, default=inf)
    _timer: int = field(init=False, default=0)
    _before: list[tuple[Seconds, int, Seconds]] = field(init=False, default_factory=list)

    def __post_init__(self) -> None:
        self.done = simpy.Event(self.environment)
        self._begun = self._since = self.environment.now
        self.disturbed = self.beside > 0
        self._go_on()

    def change(self, beside: int) -> None:
        """Go on at another pace."""
        if beside == self.beside or self.done.triggered:
            return
        now, ends = self.environment.now, self.paces.ends
        self._before.append((self._since, self.beside, self._at))
        self._at = _moved(self._at + (now - self._since), ends[self.beside], ends[beside])
        self._since, self.beside, self.disturbed = now, beside, True
        self._go_on()

    @property
    def slowed(self) -> Seconds:
        """By how much the stretch, which ends now, took longer than alone."""
        return self.environment.now - self._begun - self.paces.alone[-1]

    def ends(self) -> Disturbed:
        """When its operations ended, all being done."""
        spans = (*self._before, (self._since, self.beside, self._at))
        return Disturbed(self.paces, tuple((since - self._begun, pace, at) for since, pace, at in spans))

    def _go_on(self) -> None:
        """Be done when this pace leads to the end; a timer that is set for an earlier time will see to it then."""
        left = max(self.paces.ends[self.beside][-1] - self._at, 0.0)
        self._due = self._since + left
        if self._due < self._timed:
            self._wait(left)

    def _wait(self, seconds: Seconds) -> None:
        self._timer += 1
        self._timed, number = self.environment.now + seconds, self._timer
        timer = self.environment.wait(seconds)
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
