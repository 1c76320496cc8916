"""Segments whose rate changes while collectives overlap them: which operation is running, how much of it is done?

Operations that no other rank observes are one event. The end time of each is known at every interference
level: uncontended (level 0), and while a DP or EP collective is in flight, which slows every kind of kernel
by its own factor. When the level changes midway, the running operation is found by bisection, and the
completed fraction of it carries over to the curve of the new level. The end times of all operations follow
from the times of these changes, so they need no events.
"""

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from clustersim.common.arrays import FloatArray
from clustersim.common.units import Seconds
from clustersim.engine.kernel.environment import SimEnvironment
from clustersim.engine.kernel.fluid_action import FluidAction


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
    is_slowed: list[bool] = np.any(kernel_seconds * slowdown, axis=1).tolist()
    uncontended, *contended = _cumulative_seconds(
        np.vstack([kernel_seconds + fixed_seconds, kernel_seconds * (1.0 + slowdown) + fixed_seconds])
    )
    curves = (curve if slowed else uncontended for curve, slowed in zip(contended, is_slowed, strict=True))
    return ProgressCurves((uncontended, *curves))


def _cumulative_seconds(durations: FloatArray) -> list[list[Seconds]]:
    """[levels, operations] to [levels][operations + 1], from 0 on."""
    cumulative: list[list[Seconds]] = np.hstack([np.zeros((len(durations), 1)), np.cumsum(durations, axis=1)]).tolist()
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


class SegmentAction(FluidAction):
    """A segment in progress. level: current interference level; was_slowed: ever above 0; progress: on its curve."""

    __slots__ = ("_curves", "_progress", "_rate_changes", "_start", "level", "was_slowed")

    def __init__(self, environment: SimEnvironment, curves: ProgressCurves, level: int) -> None:
        super().__init__(environment, curves.end_times[level][-1])
        self._curves, self._progress, self._start = curves, 0.0, environment.now
        self._rate_changes: list[tuple[Seconds, int, Seconds]] = []
        self.level, self.was_slowed = level, level > 0
        self.set_remaining(self.remaining)

    def set_level(self, level: int) -> None:
        """Continue at another interference level."""
        if level == self.level or self.done.processed:
            return
        end_times, elapsed = self._curves.end_times, self.environment.now - self.last_update
        self._rate_changes.append((self.last_update, self.level, self._progress))
        self._progress = _map_progress(self._progress + elapsed, end_times[self.level], end_times[level])
        self.level, self.was_slowed = level, True
        self.set_remaining(max(end_times[level][-1] - self._progress, 0.0))

    @property
    def slowed_seconds(self) -> Seconds:
        """Seconds by which the action, which ends now, took longer than uncontended."""
        return self.environment.now - self._start - self._curves.uncontended[-1]

    def end_times(self) -> VariableRateEndTimes:
        """End times of its operations; it must be done."""
        rate_changes = (*self._rate_changes, (self.last_update, self.level, self._progress))
        return VariableRateEndTimes(
            self._curves, tuple((since - self._start, level, progress) for since, level, progress in rate_changes)
        )


def _map_progress(progress: Seconds, old_curve: Sequence[Seconds], new_curve: Sequence[Seconds]) -> Seconds:
    """The same progress on another curve: same operation, same completed fraction of it."""
    index = min(bisect_right(old_curve, progress), len(old_curve) - 1)
    begin, end = old_curve[index - 1], old_curve[index]
    fraction = (progress - begin) / (end - begin) if end > begin else 1.0
    return new_curve[index - 1] + min(fraction, 1.0) * (new_curve[index] - new_curve[index - 1])
