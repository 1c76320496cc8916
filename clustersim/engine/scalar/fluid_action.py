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
from clustersim.engine.kernel.environment import SimEnvironment


@dataclass(frozen=True, slots=True, eq=False)
class ProgressCurves:
    """Ends of operations from the stretch's start, at each pace, each from 0 on: [paces][operations + 1].

    Pace 0 is alone; one at which nothing is slowed is the same list. equal: no collective beside changes anything.
    """

    end_times: tuple[list[Seconds], ...]
    uncontended: list[Seconds] = field(init=False)
    is_unaffected: bool = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "uncontended", self.end_times[0])
        object.__setattr__(self, "is_unaffected", all(curve is self.uncontended for curve in self.end_times))

    def operation_times(self, start: FloatArray, first_operation: int, end_operation: int) -> FloatArray:
        """When operations beside which nothing is begin, and the last one ends: [runs, until - begin + 1].

        first: [runs] when operation `begin` begins.
        """
        ends = np.array(self.uncontended[first_operation : end_operation + 1])
        times: FloatArray = start[:, None] + (ends - ends[0])
        return times

    def slice_operations(self, begin: int, end: int) -> "ProgressCurves":
        """Some operations of the stretch."""
        uncontended = _slice_curve(self.uncontended, begin, end)
        return ProgressCurves(
            tuple(
                uncontended if curve is self.uncontended else _slice_curve(curve, begin, end)
                for curve in self.end_times
            )
        )


def progress_curves(kernel_seconds: FloatArray, fixed_seconds: FloatArray, slowdown: FloatArray) -> ProgressCurves:
    """Paces of operations; kernels, rest: [operations] seconds that a collective slows, and that it does not.

    slowing: [paces - 1, operations] the part by which kernels take longer at each pace but the first.
    """
    uncontended = _cumulative_seconds(kernel_seconds + fixed_seconds)
    contended = (
        _cumulative_seconds(kernel_seconds * (1.0 + level_slowdown) + fixed_seconds)
        if (kernel_seconds * level_slowdown).any()
        else uncontended
        for level_slowdown in slowdown
    )
    return ProgressCurves((uncontended, *contended))


def _cumulative_seconds(durations: FloatArray) -> list[Seconds]:
    cumulative: list[Seconds] = np.concatenate(([0.0], np.cumsum(durations))).tolist()
    return cumulative


def _slice_curve(end_times: Sequence[Seconds], begin: int, end: int) -> list[Seconds]:
    return [time - end_times[begin] for time in end_times[begin : end + 1]]


@dataclass(frozen=True, slots=True, eq=False)
class VariableRateEndTimes:
    """When operations ended whose pace changed (an `engine.written.Inner`), worked out if somebody asks.

    spans: since when, in seconds from the first one's begin, they went on at which pace, from which place in its ends.
    """

    curves: ProgressCurves
    rate_changes: tuple[tuple[Seconds, int, Seconds], ...]

    def operation_times(self, start: FloatArray, first_operation: int, end_operation: int) -> FloatArray:
        """See `EndTimes`; `begin` is the first of all operations, `until` behind the last.

        Gone on from place a at time s, at a pace at which an operation ends at e, it ends at s + e - a, if the pace did
        not change before.
        """
        end_times = np.zeros(len(self.curves.uncontended))
        for since, level, progress in self.rate_changes:
            shifted = since + (np.array(self.curves.end_times[level]) - progress)
            end_times = np.where(shifted >= since, shifted, end_times) if since else shifted
        times: FloatArray = start[:, None] + end_times[: end_operation - first_operation + 1]
        return times


@dataclass(slots=True, eq=False)
class FluidAction:
    """A stretch under way. done: it has ended; beside: its pace now; disturbed: it was ever another than alone."""

    environment: SimEnvironment
    curves: ProgressCurves
    level: int
    done: simpy.Event = field(init=False)
    was_slowed: bool = field(init=False)
    _start: Seconds = field(init=False)
    _progress: Seconds = field(init=False, default=0.0)
    _updated: Seconds = field(init=False)
    _due: Seconds = field(init=False)
    _timer_time: Seconds = field(init=False, default=inf)
    _timer_id: int = field(init=False, default=0)
    _rate_changes: list[tuple[Seconds, int, Seconds]] = field(init=False, default_factory=list)

    def __post_init__(self) -> None:
        self.done = simpy.Event(self.environment)
        self._start = self._updated = self.environment.now
        self.was_slowed = self.level > 0
        self._schedule_end()

    def set_level(self, level: int) -> None:
        """Go on at another pace."""
        if level == self.level or self.done.triggered:
            return
        now, end_times = self.environment.now, self.curves.end_times
        self._rate_changes.append((self._updated, self.level, self._progress))
        self._progress = _map_progress(self._progress + (now - self._updated), end_times[self.level], end_times[level])
        self._updated, self.level, self.was_slowed = now, level, True
        self._schedule_end()

    @property
    def slowed_seconds(self) -> Seconds:
        """By how much the stretch, which ends now, took longer than alone."""
        return self.environment.now - self._start - self.curves.uncontended[-1]

    def end_times(self) -> VariableRateEndTimes:
        """When its operations ended, all being done."""
        rate_changes = (*self._rate_changes, (self._updated, self.level, self._progress))
        return VariableRateEndTimes(
            self.curves, tuple((since - self._start, level, progress) for since, level, progress in rate_changes)
        )

    def _schedule_end(self) -> None:
        """Be done when this pace leads to the end; a timer that is set for an earlier time will see to it then."""
        remaining = max(self.curves.end_times[self.level][-1] - self._progress, 0.0)
        self._due = self._updated + remaining
        if self._due < self._timer_time:
            self._set_timer(remaining)

    def _set_timer(self, seconds: Seconds) -> None:
        self._timer_id += 1
        self._timer_time, timer_id = self.environment.now + seconds, self._timer_id
        event = self.environment.event_after(seconds)
        event.callbacks.append(lambda _: self._on_timer(timer_id))

    def _on_timer(self, timer_id: int) -> None:
        if timer_id != self._timer_id:
            return
        remaining = self._due - self.environment.now
        if remaining > 0.0:
            self._set_timer(remaining)
        else:
            self.done.succeed()


def _map_progress(progress: Seconds, old_curve: Sequence[Seconds], new_curve: Sequence[Seconds]) -> Seconds:
    """The same place in a stretch, told at another pace."""
    index = min(bisect_right(old_curve, progress), len(old_curve) - 1)
    begin, end = old_curve[index - 1], old_curve[index]
    fraction = (progress - begin) / (end - begin) if end > begin else 1.0
    return new_curve[index - 1] + min(fraction, 1.0) * (new_curve[index] - new_curve[index - 1])
