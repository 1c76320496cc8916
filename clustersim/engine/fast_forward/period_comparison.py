"""Comparison of two consecutive periods: are their records equal up to a shift in time and task ids?

All spans, all sub-segments and all delays inside them are compared, rank by rank, in task order: equal
streams, task ids shifted by one offset per rank, predecessors shifted likewise, times shifted by the period,
and equal lost seconds, except for rounding.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Final

import numpy as np

from clustersim.common.arrays import FloatArray, IntArray
from clustersim.common.units import Seconds
from clustersim.engine.recording.recorder import (
    PREDECESSOR,
    RANK,
    RELATIVE_ROUNDING,
    STREAM,
    TASK,
    TIMES,
    WAIT_AND_SLOWDOWN,
    Recorder,
)
from clustersim.engine.recording.unroll import DELAYS, EVENT_KEY_STRIDE, SUB_SEGMENTS, LogSizes, Repetition

_SUB_SEGMENT_COLUMNS: Final = 4  # rank, task, begin, until
_OPERATION_COLUMNS: Final = 3  # rank, task, operation


@dataclass(frozen=True, slots=True)
class Snapshot:
    """Progress of the simulation at one time.

    skipped_seconds: simulated time that was skipped so far; unrolled_sizes: lengths of the recorder's lists with
    repetitions; recorded_sizes: without; repetition_count; stream_positions: of each stream of each rank.
    """

    now: Seconds
    skipped_seconds: Seconds
    unrolled_sizes: LogSizes
    recorded_sizes: LogSizes
    repetition_count: int
    stream_positions: list[int]


@dataclass(frozen=True, slots=True)
class PeriodComparison:
    """Two consecutive periods: from the first snapshot to the second, and from there to the third."""

    recorder: Recorder
    snapshots: tuple[Snapshot, Snapshot, Snapshot]
    rank_count: int

    @property
    def period_seconds(self) -> Seconds:
        """Duration of the second period on the clock."""
        return self.snapshots[2].now - self.snapshots[1].now

    @property
    def period_sizes(self) -> LogSizes:
        """Number of records in the second period, repetitions included."""
        return self.snapshots[2].unrolled_sizes.add_scaled(self.snapshots[1].unrolled_sizes, -1)

    @property
    def _tolerance(self) -> Seconds:
        """Difference of times that is only rounding of the clock."""
        return RELATIVE_ROUNDING * self.snapshots[2].now

    def create_repetition(self, count: int, task_offsets: IntArray, first_task_ids: IntArray) -> Repetition:
        """`count` more repetitions of the second period. task_offsets, first_task_ids: see `Repetition`."""
        _, last, now = self.snapshots
        seconds = self.period_seconds + now.skipped_seconds - last.skipped_seconds
        return Repetition(
            last.unrolled_sizes, now.unrolled_sizes, now.recorded_sizes, count, seconds, task_offsets, first_task_ids
        )

    def period_spans(self) -> FloatArray:
        """Spans recorded in the second period: [spans, columns]."""
        _, last, now = (snapshot.recorded_sizes.spans for snapshot in self.snapshots)
        return self.recorder.spans_between(last, now)

    def task_offsets(self) -> IntArray | None:
        """[ranks] shift of task ids from period to period; None where the periods differ."""
        if not (self._sizes_are_equal() and self._repetitions_are_equal()):
            return None
        offsets = self._span_task_offsets()
        return offsets if offsets is not None and self._operations_are_periodic(offsets) else None

    def _sizes_are_equal(self) -> bool:
        first, last, now = (snapshot.recorded_sizes for snapshot in self.snapshots)
        return now.add_scaled(last, -1) == last.add_scaled(first, -1) and now.spans > last.spans

    def _repetitions_are_equal(self) -> bool:
        first, last, now = (snapshot.repetition_count for snapshot in self.snapshots)
        repetitions = [
            (repetition.count, repetition.period_sizes) for repetition in self.recorder.repetitions[first:now]
        ]
        return repetitions[: last - first] == repetitions[last - first :]

    def _span_task_offsets(self) -> IntArray | None:
        """`task_offsets` by the spans alone."""
        sizes = [snapshot.recorded_sizes.spans for snapshot in self.snapshots]
        early, late = (_sort_records(self.recorder.spans_between(*period), 2) for period in pairwise(sizes))
        difference = late - early
        difference[:, TIMES] -= self.period_seconds
        differs = difference[:, [RANK, STREAM]].any()
        if (
            differs
            or max(np.abs(difference[:, TIMES]).max(), np.abs(difference[:, WAIT_AND_SLOWDOWN]).max()) > self._tolerance
        ):
            return None
        ranks, offsets = late[:, RANK].astype(np.int64), np.zeros(self.rank_count, dtype=np.int64)
        offsets[ranks] = difference[:, TASK]
        return (
            offsets
            if (offsets[ranks] == difference[:, TASK]).all() and self._predecessors_are_periodic(early, late, offsets)
            else None
        )

    def _predecessors_are_periodic(self, early: FloatArray, late: FloatArray, offsets: IntArray) -> bool:
        """Whether predecessors are shifted by the period, or end at the same time as the shifted one."""
        early_keys, late_keys = (records[:, PREDECESSOR].astype(np.int64) for records in (early, late))
        differs = (early_keys != late_keys) & (late_keys - early_keys != offsets[late_keys // EVENT_KEY_STRIDE])
        end_times = _predecessor_ends(early[differs], early), _predecessor_ends(late[differs], late)
        is_periodic = np.abs(end_times[1] - end_times[0] - self.period_seconds) <= self._tolerance
        return bool((is_periodic & (end_times[0] >= 0.0)).all())

    def _operations_are_periodic(self, offsets: IntArray) -> bool:
        """Whether operations inside segments, and their delays, are shifted by the period."""
        positions, times = (
            self._split_periods(self.recorder.sub_segments, SUB_SEGMENTS),
            self._split_periods(self.recorder.sub_segment_times, SUB_SEGMENTS),
        )
        if times[1].size:
            times[1][:] -= self.period_seconds
            early, late = (
                np.hstack([columns, period_times]) for columns, period_times in zip(positions, times, strict=True)
            )
            if self._differs(
                _sort_records(early, 3), _sort_records(late, 3), offsets, key_columns=_SUB_SEGMENT_COLUMNS
            ):
                return False
        early, late = self._split_periods(self.recorder.delays, DELAYS)
        return not self._differs(
            _sort_records(early, 3), _sort_records(late, 3), offsets, key_columns=_OPERATION_COLUMNS
        )

    def _split_periods(self, records: Sequence[Any], list_index: int) -> tuple[FloatArray, FloatArray]:
        """Records of the first period and of the second."""
        first, middle, last = (snapshot.recorded_sizes[list_index] for snapshot in self.snapshots)
        return np.array(records[first:middle], dtype=np.float64), np.array(records[middle:last], dtype=np.float64)

    def _differs(self, early: FloatArray, late: FloatArray, offsets: IntArray, *, key_columns: int) -> bool:
        """Whether records differ by more than the shift of task ids; their first columns are compared exactly."""
        if not late.size:
            return False
        difference = late - early
        difference[:, TASK] -= offsets[late[:, RANK].astype(np.int64)]
        return bool(
            difference[:, :key_columns].any() or np.abs(difference[:, key_columns:]).max(initial=0.0) > self._tolerance
        )


def _sort_records(records: FloatArray, key_columns: int) -> FloatArray:
    """Sorted by the first few columns: simultaneous events are recorded in any order."""
    return records[np.lexsort(records[:, key_columns - 1 :: -1].T)] if records.size else records


def _predecessor_ends(spans: FloatArray, all_spans: FloatArray) -> FloatArray:
    """End times of the predecessors of spans; -1 where one is not among all_spans (sorted by rank and task)."""
    event_keys = (all_spans[:, RANK] * EVENT_KEY_STRIDE + all_spans[:, TASK]).astype(np.int64)
    predecessor = spans[:, PREDECESSOR].astype(np.int64)
    index = np.minimum(np.searchsorted(event_keys, predecessor), len(event_keys) - 1)
    return np.where(event_keys[index] == predecessor, all_spans[index, TIMES][:, -1], -1.0)
