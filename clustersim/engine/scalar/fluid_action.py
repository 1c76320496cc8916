"""Fluid actions: operations of known duration whose rate changes while collectives overlap them.

Operations that no other rank observes are one event. The end time of each is known at every interference
level: uncontended (level 0), and while a DP or EP collective is in flight, which slows every kind of kernel
by its own factor. When the level changes midway, the running operation is found by bisection, and the
completed fraction of it carries over to the curve of the new level. The end times of all operations follow
from the times of these changes, so they need no events. In SimGrid's terms: an action with remaining work,
rate and last update.
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
    """Cumulative end times of operations at each interference level: [levels][operations + 1], from 0 on.

    Level 0 is uncontended; a level at which nothing is slowed is the same list object. is_unaffected: no level
    changes anything.
    """

    end_times: tuple[list[Seconds], ...]
    uncontended: list[Seconds] = field(init=False)
    is_unaffected: bool = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "uncontended", self.end_times[0])
        object.__setattr__(self, "is_unaffected", all(curve is self.uncontended for curve in self.end_times))

    def operation_times(self, start: FloatArray, first_operation: int, end_operation: int) -> FloatArray:
        """Start of each uncontended operation, and the end of the last: [runs, end_operation - first_operation + 1].

        start: [runs] when `first_operation` starts.
        """
        ends = np.array(self.uncontended[first_operation : end_operation + 1])
        times: FloatArray = start[:, None] + (ends - ends[0])
        return times

    def slice_operations(self, begin: int, end: int) -> "ProgressCurves":
        """Curves of the operations `begin` to before `end`."""
        uncontended = _slice_curve(self.uncontended, begin, end)
        return ProgressCurves(
            tuple(
                uncontended if curve is self.uncontended else _slice_curve(curve, begin, end)
                for curve in self.end_times
            )
        )


def progress_curves(kernel_seconds: FloatArray, fixed_seconds: FloatArray, slowdown: FloatArray) -> ProgressCurves:
    """Curves of operations; kernel_seconds, fixed_seconds: [operations] time that collectives slow, or do not.

    slowdown: [levels - 1, operations] relative slowdown of kernels at each level from 1 on.
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
    """End times (`operation_log.EndTimes`) of operations whose interference level changed; evaluated on demand.

    rate_changes: (seconds since the start, level from then on, progress on the curve of that level).
    """

    curves: ProgressCurves
    rate_changes: tuple[tuple[Seconds, int, Seconds], ...]

    def operation_times(self, start: FloatArray, first_operation: int, end_operation: int) -> FloatArray:
        """See `EndTimes`; `first_operation` is the first of all operations, `end_operation` behind the last.

        From progress a at time s, an operation that ends at e on the curve of the level ends at s + e - a, unless the
        level changes before.
        """
        end_times = np.zeros(len(self.curves.uncontended))
        for since, level, progress in self.rate_changes:
            shifted = since + (np.array(self.curves.end_times[level]) - progress)
            end_times = np.where(shifted >= since, shifted, end_times) if since else shifted
        times: FloatArray = start[:, None] + end_times[: end_operation - first_operation + 1]
        return times


@dataclass(slots=True, eq=False)
class FluidAction:
    """A fluid action in progress. done: its completion; level: current interference level; was_slowed: ever above 0."""

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
        """Continue at another interference level."""
        if level == self.level or self.done.triggered:
            return
        now, end_times = self.environment.now, self.curves.end_times
        self._rate_changes.append((self._updated, self.level, self._progress))
        self._progress = _map_progress(self._progress + (now - self._updated), end_times[self.level], end_times[level])
        self._updated, self.level, self.was_slowed = now, level, True
        self._schedule_end()

    @property
    def slowed_seconds(self) -> Seconds:
        """Seconds by which the action, which ends now, took longer than uncontended."""
        return self.environment.now - self._start - self.curves.uncontended[-1]

    def end_times(self) -> VariableRateEndTimes:
        """End times of its operations; it must be done."""
        rate_changes = (*self._rate_changes, (self._updated, self.level, self._progress))
        return VariableRateEndTimes(
            self.curves, tuple((since - self._start, level, progress) for since, level, progress in rate_changes)
        )

    def _schedule_end(self) -> None:
        """Complete when the current level leads to the end; a timer already set for earlier will check again."""
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
    """The same progress on another curve: same operation, same completed fraction of it."""
    index = min(bisect_right(old_curve, progress), len(old_curve) - 1)
    begin, end = old_curve[index - 1], old_curve[index]
    fraction = (progress - begin) / (end - begin) if end > begin else 1.0
    return new_curve[index - 1] + min(fraction, 1.0) * (new_curve[index] - new_curve[index - 1])
