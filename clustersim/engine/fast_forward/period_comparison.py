"""Is what was written in a period what was written in the one before, one period later?

All rows of the trace, all pieces of blocks and all that exchanges inside them lost are compared, rank by rank, in the
order of tasks: the same streams, numbers of tasks that went up by as much as the rank's others, causes that went up
likewise, times that went up by the period, and seconds that are the same, but for rounding.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from clustersim.common.arrays import FloatArray, IntArray
from clustersim.common.units import Seconds
from clustersim.engine.recording.recorder import CAUSE, LOST, RANK, ROUNDING, STREAM, TASK, TIMES, Recorder
from clustersim.engine.recording.unroll import LONGER, NAMES, PIECES, ROWS, Repeat, Sizes

_PIECE: Final = 4  # rank, task, begin, until
_OPERATION: Final = 3  # rank, task, operation


@dataclass(frozen=True, slots=True)
class Moment:
    """How far the world has come.

    later: seconds that were skipped so far; sizes: of what is written, with what is repeated; written: without;
    repeats: how many there are; heads: of each stream of each rank, how many are done.
    """

    now: Seconds
    later: Seconds
    sizes: Sizes
    written: Sizes
    repeats: int
    heads: list[int]


@dataclass(frozen=True, slots=True)
class Periods:
    """Two periods behind one another: from the first moment to the second, and from there to the third."""

    recorder: Recorder
    moments: tuple[Moment, Moment, Moment]
    ranks: int

    @property
    def seconds(self) -> Seconds:
        """How long the second one is on the clock."""
        return self.moments[2].now - self.moments[1].now

    @property
    def size(self) -> Sizes:
        """How much is written in it, with what is repeated."""
        return self.moments[2].sizes.plus(self.moments[1].sizes, -1)

    @property
    def _least(self) -> Seconds:
        """What is only rounding of the clock."""
        return ROUNDING * self.moments[2].now

    def repeat(self, times: int, tasks: IntArray, first: IntArray) -> Repeat:
        """The second one, that many times more. tasks, first: see `Repeat`."""
        _, last, now = self.moments
        seconds = self.seconds + now.later - last.later
        return Repeat(last.sizes, now.sizes, now.written, times, seconds, tasks, first)

    def rows(self) -> FloatArray:
        """What is written in the second one: [rows, columns]."""
        return self._two(self.recorder.whole, ROWS)[1]

    def tasks(self) -> IntArray | None:
        """By how much numbers of tasks went up: [ranks]; None where the periods are not alike."""
        if not (self._sizes_are_alike() and self._repeats_are_alike()):
            return None
        tasks = self._of_rows()
        return tasks if tasks is not None and self._inside_is_alike(tasks) else None

    def _sizes_are_alike(self) -> bool:
        before, last, now = (moment.written for moment in self.moments)
        return now.plus(last, -1) == last.plus(before, -1) and now.rows > last.rows

    def _repeats_are_alike(self) -> bool:
        before, last, now = (moment.repeats for moment in self.moments)
        told = [(repeat.times, repeat.size) for repeat in self.recorder.repeats[before:now]]
        return told[: last - before] == told[last - before :]

    def _of_rows(self) -> IntArray | None:
        """`tasks`, as rows of the trace have it."""
        early, late = (_sorted(array, 2) for array in self._two(self.recorder.whole, ROWS))
        more = late - early
        more[:, TIMES] -= self.seconds
        other = more[:, [RANK, STREAM]].any()
        if other or max(np.abs(more[:, TIMES]).max(), np.abs(more[:, LOST]).max()) > self._least:
            return None
        ranks, tasks = late[:, RANK].astype(np.int64), np.zeros(self.ranks, dtype=np.int64)
        tasks[ranks] = more[:, TASK]
        return tasks if (tasks[ranks] == more[:, TASK]).all() and self._caused(early, late, tasks) else None

    def _caused(self, early: FloatArray, late: FloatArray, tasks: IntArray) -> bool:
        """Whether rows were allowed by what is a period later, by what ended with it, or by what was there already."""
        first, second = (array[:, CAUSE].astype(np.int64) for array in (early, late))
        other = (first != second) & (second - first != tasks[second // NAMES])
        ends = _ended(early[other], early), _ended(late[other], late)
        together = np.abs(ends[1] - ends[0] - self.seconds) <= self._least
        return bool((together & (ends[0] >= 0.0)).all())

    def _inside_is_alike(self, tasks: IntArray) -> bool:
        """Whether operations inside blocks are."""
        places, times = self._two(self.recorder.pieces, PIECES), self._two(self.recorder.piece_times, PIECES)
        if times[1].size:
            times[1][:] -= self.seconds
            early, late = (np.hstack([array, own]) for array, own in zip(places, times, strict=True))
            if self._moved(_sorted(early, 3), _sorted(late, 3), tasks, places=_PIECE):
                return False
        early, late = self._two(self.recorder.longer, LONGER)
        return not self._moved(_sorted(early, 3), _sorted(late, 3), tasks, places=_OPERATION)

    def _two(self, listed: Sequence[Any], kind: int) -> tuple[FloatArray, FloatArray]:
        """What was written in the first period and in the second."""
        first, middle, last = (moment.written[kind] for moment in self.moments)
        return np.array(listed[first:middle], dtype=np.float64), np.array(listed[middle:last], dtype=np.float64)

    def _moved(self, early: FloatArray, late: FloatArray, tasks: IntArray, *, places: int) -> bool:
        """Whether anything is elsewhere than `tasks` on, or another number; its first columns are places."""
        if not late.size:
            return False
        more = late - early
        more[:, TASK] -= tasks[late[:, RANK].astype(np.int64)]
        return bool(more[:, :places].any() or np.abs(more[:, places:]).max(initial=0.0) > self._least)


def _sorted(found: FloatArray, columns: int) -> FloatArray:
    """Sorted by its first few columns: what happens at the same time may be written in any order."""
    return found[np.lexsort(found[:, columns - 1 :: -1].T)] if found.size else found


def _ended(rows: FloatArray, every: FloatArray) -> FloatArray:
    """When the rows ended that allowed the starts of some; -1 of those that are not among all, by rank and task."""
    names = (every[:, RANK] * NAMES + every[:, TASK]).astype(np.int64)
    cause = rows[:, CAUSE].astype(np.int64)
    place = np.minimum(np.searchsorted(names, cause), len(names) - 1)
    return np.where(names[place] == cause, every[place, TIMES][:, -1], -1.0)
