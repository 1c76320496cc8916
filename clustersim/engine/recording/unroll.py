"""Unrolling: the full trace of a simulation whose middle was fast-forwarded, because it repeats earlier periods.

The recorder notes which of its latest records are repeated and how often (`Repetition`); records that follow
have the time of the clock, and their final task ids. `UnrolledLog` gives for every record of the full trace
which stored record it is, and the offsets of its time and its task id.

Example: records a b c d e f, of which c d are stored when they are detected to repeat twice more, 1 s each
time. The full trace is a b c d c' d' c'' d'' e f, where c' is c one second and one period of tasks after it,
and e and f are two seconds after their stored times. A repeated range may contain repetitions itself: layers
within microbatches.
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
        """The sum with `factor` times another."""
        return LogSizes(*(size + other_size * factor for size, other_size in zip(self, other, strict=True)))


EVENT_KEY_STRIDE: Final = 1 << 24
"""More tasks than any rank has: the key of an event is its rank times this, plus its task id."""
NO_RECORDS: Final = LogSizes(0, 0, 0)
SPANS, SUB_SEGMENTS, DELAYS = range(3)
"""Places in it."""


@dataclass(frozen=True, slots=True)
class Repetition:
    """The records from `begin` to `end`, counted with earlier repetitions, occur `count` more times.

    recorded_sizes: stored records at that time; period_seconds: from one period to the next; task_offsets:
    [ranks] tasks per period; first_task_ids: [ranks] first task of each in the range.
    """

    begin: LogSizes
    end: LogSizes
    recorded_sizes: LogSizes
    count: int
    period_seconds: Seconds
    task_offsets: IntArray
    first_task_ids: IntArray

    def shift_event_keys(self, event_keys: IntArray, periods: IntArray | int) -> IntArray:
        """Event keys some periods later; keys from before the range and the period before it stay.

        Predecessors of repeated events are of the same period or the one before, unless they were fixed from the
        beginning.
        """
        rank, task = event_keys // EVENT_KEY_STRIDE, event_keys % EVENT_KEY_STRIDE
        is_fixed = (event_keys < 0) | (task < self.first_task_ids[rank] - self.task_offsets[rank])
        return np.where(is_fixed, event_keys, event_keys + periods * self.task_offsets[rank])

    @property
    def period_sizes(self) -> LogSizes:
        """Number of records in one period."""
        return self.end.add_scaled(self.begin, -1)


@dataclass(slots=True)
class UnrolledLog:
    """source_index: stored record of each record of the full trace; time_offset: seconds; task_offset: task ids."""

    source_index: IntArray
    time_offset: FloatArray
    task_offset: IntArray
    _filled: int = field(default=0)

    @classmethod
    def from_repetitions(cls, repetitions: Sequence[Repetition], rank: IntArray, list_index: int) -> Self:
        """All records of a list; rank: [stored records] rank of each."""
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
        """Append stored records `begin` to before `end`, shifted by some seconds."""
        target = slice(self._filled, self._filled + end - begin)
        self.source_index[target], self.time_offset[target] = np.arange(begin, end), time_offset
        self._filled = target.stop

    def _append_repetition(self, repetition: Repetition, list_index: int, rank: IntArray) -> None:
        """Append the repetitions of a range that was appended before."""
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
    """Predecessor keys of all events, from those of their stored events: [events]; changes `predecessors` in place."""
    for repetition in repetitions:
        period_size = repetition.period_sizes.spans
        repeated = np.tile(predecessors[repetition.begin.spans : repetition.end.spans], repetition.count)
        period_index = np.repeat(np.arange(1, repetition.count + 1), period_size)
        predecessors[repetition.end.spans : repetition.end.spans + period_size * repetition.count] = (
            repetition.shift_event_keys(repeated, period_index)
        )
    return predecessors
