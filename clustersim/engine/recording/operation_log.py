"""Log of operation spans that the engine recorded itself.

Segments that are not one event are recorded by sub-segments. The times of the operations in a sub-segment
follow from its start, so they are computed on demand.
"""

from collections.abc import Iterator, Sequence, Set
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import NamedTuple, Protocol, Self

import numpy as np

from clustersim.common.arrays import FloatArray, IntArray
from clustersim.common.interning import IdentityKey
from clustersim.common.units import Seconds
from clustersim.trace.trace import OperationSpans


class EndTimes(Protocol):
    """End times of a back-to-back sequence of operations."""

    def operation_times(self, start: FloatArray, first_operation: int, end_operation: int) -> FloatArray:
        """Start of each operation and the end of the last: [runs, end_operation - first_operation + 1].

        start: [runs] when the first one starts.
        """


@dataclass(frozen=True, slots=True, eq=False)
class PhasedEndTimes:
    """`EndTimes` of operations that start with a phase, or at an offset within one.

    phase_seconds: [phases]; phase_index: [operations + 1] phase of each, and the number of phases; offset:
    [operations] seconds since the start of the phase. Phases are summed one by one, as an event loop would that
    stops at each of them, so that times are equal to the last bit.
    """

    phase_seconds: tuple[Seconds, ...]
    phase_index: IntArray
    offset: FloatArray

    def phase_times(self, start: Seconds) -> list[Seconds]:
        """Start of each phase, and the end of the last, if the first starts at `start`."""
        return list(accumulate(self.phase_seconds, initial=start))

    def operation_times(self, start: FloatArray, first_operation: int, end_operation: int) -> FloatArray:
        """See `EndTimes`; `first_operation` is the first one, `end_operation` starts with a phase, or is the end."""
        seconds = np.broadcast_to(np.array(self.phase_seconds), (len(start), len(self.phase_seconds)))
        times = np.add.accumulate(np.hstack([start[:, None], seconds]), axis=1)
        count = end_operation - first_operation
        begins = times[:, self.phase_index[:count]] + self.offset[:count]
        return np.hstack([begins, times[:, self.phase_index[count], None]])


class JointSpans(NamedTuple):
    """A sub-segment of a task that several ranks began at the same instant.

    operations: the first, and the end; start: of all; ends: [ranks] of each; end_times: [ranks] of their operations,
    None for a single one.
    """

    ranks: IntArray
    task: int
    operations: tuple[int, int]
    start: Seconds
    ends: FloatArray
    end_times: Sequence[EndTimes] | None


@dataclass(frozen=True, slots=True, eq=False)
class OperationSpanLog:
    """Sub-segments: operations `begin_operation` to before `end_operation` of a task's segment, and its times.

    Columns [sub-segments]: start, end in seconds; end_times_index: index into the distinct `end_times`, -1 for a
    single operation.
    """

    rank: IntArray
    task: IntArray
    begin_operation: IntArray
    end_operation: IntArray
    start: FloatArray
    end: FloatArray
    end_times_index: IntArray
    end_times: tuple[EndTimes, ...]

    @classmethod
    def from_sub_segments(
        cls,
        sub_segments: Sequence[tuple[int, int, int, int]],
        times: Sequence[tuple[Seconds, Seconds]],
        end_times: Sequence[EndTimes | None],
    ) -> Self:
        """Sub-segments as recorded: positions, (start, end) times, end times of their operations."""
        distinct: dict[EndTimes, int] = {}  # equal only to themselves
        indices = [-1 if entry is None else distinct.setdefault(entry, len(distinct)) for entry in end_times]
        rank, task, begin_operation, end_operation = np.array(sub_segments, dtype=np.int64).reshape(-1, 4).T
        start, end = np.array(times, dtype=np.float64).reshape(-1, 2).T
        end_times_index = np.array(indices, dtype=np.int64)
        return cls(
            rank,
            task,
            begin_operation,
            end_operation,
            start,
            end,
            end_times_index,
            tuple(distinct),
        )

    def add_joint_spans(self, spans: Sequence[JointSpans], time_offset: Seconds) -> Self:
        """The log with sub-segments that ranks ran together, so many seconds later than they are noted."""
        if not spans:
            return self
        counts = [len(entry.ranks) for entry in spans]
        columns = np.array([(entry.task, *entry.operations) for entry in spans], dtype=np.int64)
        task, begin_operation, end_operation = np.repeat(columns, counts, axis=0).T
        start = np.repeat([entry.start for entry in spans], counts) + time_offset
        end = np.concatenate([entry.ends for entry in spans]) + time_offset
        distinct = {entry: index for index, entry in enumerate(self.end_times)}
        indices = _end_times_indices(spans, distinct)
        return replace(
            self,
            rank=np.concatenate([self.rank, *(entry.ranks for entry in spans)]),
            task=np.concatenate([self.task, task]),
            begin_operation=np.concatenate([self.begin_operation, begin_operation]),
            end_operation=np.concatenate([self.end_operation, end_operation]),
            start=np.concatenate([self.start, start]),
            end=np.concatenate([self.end, end]),
            end_times_index=np.concatenate([self.end_times_index, *indices]),
            end_times=tuple(distinct),
        )

    def unroll(self, source_index: IntArray, task_offset: IntArray, time_offset: FloatArray) -> Self:
        """The log with repetitions: [n] source entry, task id offset and time offset of each entry."""
        rank, begin_operation, end_operation, end_times_index = (
            column[source_index]
            for column in (self.rank, self.begin_operation, self.end_operation, self.end_times_index)
        )
        start, end, task = (
            self.start[source_index] + time_offset,
            self.end[source_index] + time_offset,
            self.task[source_index] + task_offset,
        )
        return replace(
            self,
            rank=rank,
            task=task,
            begin_operation=begin_operation,
            end_operation=end_operation,
            start=start,
            end=end,
            end_times_index=end_times_index,
        )

    def __len__(self) -> int:
        """Number of operations."""
        return int((self.end_operation - self.begin_operation).sum())

    def task_spans(self, rank: int, tasks: Set[int]) -> OperationSpans:
        """The operations of some tasks of one rank, in any order."""
        entries = np.flatnonzero(self.rank == rank)
        return self._spans(entries[np.isin(self.task[entries], list(tasks))])

    def _spans(self, entries: IntArray) -> OperationSpans:
        """The operations of some entries."""
        begin, counts = self.begin_operation[entries], (self.end_operation - self.begin_operation)[entries]
        first_span = np.concatenate(([0], np.cumsum(counts)))
        entry = np.repeat(np.arange(len(counts)), counts)
        start, end = self.start[entries][entry], self.end[entries][entry]
        for positions in self._group_equal(entries):
            end_times, (first_entry, *_) = (
                self.end_times[self.end_times_index[entries[positions[0]]]],
                entries[positions],
            )
            times = end_times.operation_times(
                self.start[entries[positions]],
                int(self.begin_operation[first_entry]),
                int(self.end_operation[first_entry]),
            )
            spans = first_span[positions, None] + np.arange(times.shape[1] - 1)
            start[spans], end[spans[:, :-1]] = times[:, :-1], times[:, 1:-1]
        operation = np.arange(len(entry)) - first_span[entry] + begin[entry]
        span_entries = entries[entry]
        return OperationSpans(
            self.rank[span_entries], self.task[span_entries], operation, start, end, *np.zeros((2, len(entry)))
        )

    def _group_equal(self, entries: IntArray) -> Iterator[IntArray]:
        """Positions of entries with several operations, grouped by equal operations and end times."""
        long = np.flatnonzero(self.end_operation[entries] - self.begin_operation[entries] > 1)
        keys = np.stack(
            [column[entries[long]] for column in (self.end_times_index, self.begin_operation, self.end_operation)],
            axis=1,
        )
        _, labels = np.unique(keys, axis=0, return_inverse=True)
        order = np.argsort(labels.reshape(-1), kind="stable")
        boundaries = np.flatnonzero(np.diff(labels.reshape(-1)[order])) + 1
        yield from (long[positions] for positions in np.split(order, boundaries) if len(positions))


def _end_times_indices(spans: Sequence[JointSpans], distinct: dict[EndTimes, int]) -> list[IntArray]:
    """For each span, [ranks] index of its end times, -1 without any. distinct: indices so far, to which it adds."""
    by_identity: dict[IdentityKey, IntArray] = {}
    indices = []
    for span in spans:
        if span.end_times is None:
            indices.append(np.full(len(span.ranks), -1))
            continue
        key = IdentityKey(span.end_times)
        if key not in by_identity:
            by_identity[key] = np.array([distinct.setdefault(entry, len(distinct)) for entry in span.end_times])
        indices.append(by_identity[key])
    return indices
