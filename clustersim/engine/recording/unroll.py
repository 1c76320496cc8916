"""What does a trace look like whose middle was not run, because it repeats what was run before?

A recorder notes where its last rows begin to be repeated and how often (`Repetition`); rows that follow were written with
the clock as it was, and with the numbers that their tasks really have. `UnrolledLog` says of every row of the whole trace
which written row it is, and by how much its time, its task and its cause are later.

Example: rows a b c d e f, of which c d are written when they are found to repeat twice more, 1 s each time. The whole
is a b c d c' d' c'' d'' e f, where c' is c one second and one period of tasks later, and e and f are two seconds later
than they were written. What is repeated may hold repeats itself: layers within microbatches.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final, NamedTuple, Self

import numpy as np

from clustersim.common.arrays import FloatArray, IntArray
from clustersim.common.units import Seconds


class LogSizes(NamedTuple):
    """Lengths of a recorder's lists."""

    spans: int
    sub_segments: int
    delays: int

    def add_scaled(self, other: "LogSizes", factor: int = 1) -> "LogSizes":
        """Both together, the other one several times."""
        return LogSizes(*(size + other_size * factor for size, other_size in zip(self, other, strict=True)))


EVENT_KEY_STRIDE: Final = 1 << 24
"""More tasks than any rank has: the name of a row is its rank times this, plus its task."""
NO_RECORDS: Final = LogSizes(0, 0, 0)
SPANS, SUB_SEGMENTS, DELAYS = range(3)
"""Places in it."""


@dataclass(frozen=True, slots=True)
class Repetition:
    """What lies from `begin` to `end`, counted with earlier repeats, is there `times` more.

    written: how much was really written until then; seconds: from one time to the next; tasks: [ranks] by how much
    numbers of tasks go up; first: [ranks] the first task of each in it.
    """

    begin: LogSizes
    end: LogSizes
    recorded_sizes: LogSizes
    count: int
    period_seconds: Seconds
    task_offsets: IntArray
    first_task_ids: IntArray

    def shift_event_keys(self, event_keys: IntArray, periods: IntArray | int) -> IntArray:
        """Names of rows so many times later; those from before it and the period before it stay what they are.

        What is repeated follows from what is of the same period or of the one before, but for what was there already.
        """
        rank, task = event_keys // EVENT_KEY_STRIDE, event_keys % EVENT_KEY_STRIDE
        is_fixed = (event_keys < 0) | (task < self.first_task_ids[rank] - self.task_offsets[rank])
        return np.where(is_fixed, event_keys, event_keys + periods * self.task_offsets[rank])

    @property
    def period_sizes(self) -> LogSizes:
        """How much is there each time."""
        return self.end.add_scaled(self.begin, -1)


@dataclass(slots=True)
class UnrolledLog:
    """source: which written row each of the whole trace is; later: seconds; further: numbers of tasks."""

    source_index: IntArray
    time_offset: FloatArray
    task_offset: IntArray
    _filled: int = field(default=0)

    @classmethod
    def from_repetitions(cls, repetitions: Sequence[Repetition], rank: IntArray, list_index: int) -> Self:
        """All rows of a list; rank: [written] of each that was written."""
        record_count = len(rank) + sum(
            repetition.period_sizes[list_index] * repetition.count for repetition in repetitions
        )
        unrolled = cls(
            np.zeros(record_count, dtype=np.int64), np.zeros(record_count), np.zeros(record_count, dtype=np.int64)
        )
        copied, time_offset = 0, 0.0
        for repetition in repetitions:
            unrolled._append_recorded(copied, repetition.recorded_sizes[list_index], time_offset)
            unrolled._append_repetition(repetition, list_index, rank)
            copied, time_offset = (
                repetition.recorded_sizes[list_index],
                time_offset + repetition.count * repetition.period_seconds,
            )
        unrolled._append_recorded(copied, len(rank), time_offset)
        return unrolled

    def _append_recorded(self, begin: int, end: int, time_offset: Seconds) -> None:
        """Rows from `first` to before `last` as they were written, by some seconds later."""
        target = slice(self._filled, self._filled + end - begin)
        self.source_index[target], self.time_offset[target] = np.arange(begin, end), time_offset
        self._filled = target.stop

    def _append_repetition(self, repetition: Repetition, list_index: int, rank: IntArray) -> None:
        period = slice(repetition.begin[list_index], repetition.end[list_index])
        period_size = period.stop - period.start
        target = slice(self._filled, self._filled + period_size * repetition.count)
        period_index = np.repeat(np.arange(1, repetition.count + 1), period_size)
        self.source_index[target] = source = np.tile(self.source_index[period], repetition.count)
        self.time_offset[target] = (
            np.tile(self.time_offset[period], repetition.count) + period_index * repetition.period_seconds
        )
        self.task_offset[target] = (
            np.tile(self.task_offset[period], repetition.count) + period_index * repetition.task_offsets[rank[source]]
        )
        self._filled = target.stop


def unroll_predecessors(repetitions: Sequence[Repetition], predecessors: IntArray) -> IntArray:
    """Names of the rows that allowed the starts of all rows, from those of the written ones that they are: [rows]."""
    for repetition in repetitions:
        period_size = repetition.period_sizes.spans
        repeated = np.tile(predecessors[repetition.begin.spans : repetition.end.spans], repetition.count)
        period_index = np.repeat(np.arange(1, repetition.count + 1), period_size)
        predecessors[repetition.end.spans : repetition.end.spans + period_size * repetition.count] = (
            repetition.shift_event_keys(repeated, period_index)
        )
    return predecessors
