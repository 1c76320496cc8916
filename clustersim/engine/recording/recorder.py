"""Recorder of the scalar engine: collects spans, operation times and delays, and builds the trace."""

from array import array
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from typing import Final, NamedTuple, Self

import numpy as np

from clustersim.common.arrays import FloatArray, IntArray
from clustersim.common.units import Seconds
from clustersim.engine.recording.operation_log import EndTimes, JointSpans, OperationSpanLog
from clustersim.engine.recording.unroll import (
    DELAYS,
    EVENT_KEY_STRIDE,
    NO_RECORDS,
    SPANS,
    SUB_SEGMENTS,
    LogSizes,
    Repetition,
    UnrolledLog,
    unroll_predecessors,
)
from clustersim.trace.trace import ContentionDelays, Trace


class WaitAndSlowdown(NamedTuple):
    """Seconds lost inside a segment: waiting for other ranks, and kernels slowed by concurrent communication."""

    waited: Seconds = 0.0
    slowed: Seconds = 0.0


class ContentionDelay(NamedTuple):
    """Delays of an operation by link sharing, in seconds, against uncontended links.

    kernel_delay: of its kernel, by a transfer that lasts longer; exposed_delay: of the part of its transfer that
    the kernel does not hide; transfer_delay: of its transfer.
    """

    kernel_delay: Seconds = 0.0
    exposed_delay: Seconds = 0.0
    transfer_delay: Seconds = 0.0

    def without_rounding(self, now: Seconds) -> "ContentionDelay":
        """The same without differences that are only rounding of the clock."""
        threshold = RELATIVE_ROUNDING * abs(now)
        return (
            ContentionDelay(*(seconds if abs(seconds) > threshold else 0.0 for seconds in self))
            if max(map(abs, self)) > threshold
            else NO_DELAY
        )


OperationPosition = tuple[int, int, int]
"""Rank, task id, and index of the operation in the task's segment."""
NO_DELAY: Final = ContentionDelay()
RELATIVE_ROUNDING: Final = 1e-12
"""Relative to the clock, differences of times below this are rounding: float64 has 2e-16, and times are sums."""


SpanRecord = tuple[int, int, int, int, Seconds, Seconds, Seconds, Seconds, Seconds, Seconds]
"""Rank, task, stream, predecessor; queued, ready, start, end; seconds lost inside it (`WaitAndSlowdown`).

Queued is when the stream reached the task: periods are equal only if they also began equally
(`fast_forward.period_comparison`).

The predecessor is the key of the event whose end allowed the start: rank * `EVENT_KEY_STRIDE` + task; -1:
none.
"""
_COLUMN_COUNT: Final = 10
RANK, TASK, STREAM, PREDECESSOR = range(4)
TIMES: Final = slice(4, 8)
WAIT_AND_SLOWDOWN: Final = slice(8, 10)
"""Columns of a span record. The first four are integers, which float64 holds exactly."""


def _empty_array() -> "array[float]":
    return array("d")


@dataclass(slots=True)
class Recorder:
    """Append-only lists. Events are identified by rank and task (`EVENT_KEY_STRIDE`), as their order is arbitrary.

    spans: the numbers of all span records, one after the other (a quarter of the bytes of tuples); sync_participants:
    event keys by (order of the group in the segment, task, group key); sub_segments: rank, task, first and end
    operation; delays: position, exposed and transfer delay; joint_spans, joint_delays: the same of ranks that run
    together, which are all behind what is repeated; repetitions: what is repeated on unrolling; skipped_seconds:
    simulated time that the clock did not pass, because periods were skipped.
    """

    spans: "array[float]" = field(default_factory=_empty_array)
    sync_participants: dict[tuple[int, int, Hashable], list[int]] = field(default_factory=dict)
    sub_segments: list[tuple[int, int, int, int]] = field(default_factory=list)
    sub_segment_times: list[tuple[Seconds, Seconds]] = field(default_factory=list)
    sub_segment_ends: list[EndTimes | None] = field(default_factory=list)
    delays: list[tuple[int, int, int, Seconds, Seconds]] = field(default_factory=list)
    joint_spans: list[JointSpans] = field(default_factory=list)
    joint_delays: list[FloatArray] = field(default_factory=list)
    repetitions: list[Repetition] = field(default_factory=list)
    skipped_seconds: Seconds = 0.0
    _repeated_sizes: LogSizes = NO_RECORDS

    @property
    def span_count(self) -> int:
        """Number of spans, repeated ones included."""
        return self.recorded_sizes.spans + self._repeated_sizes.spans

    @property
    def unrolled_sizes(self) -> LogSizes:
        """Lengths of the lists, repetitions included."""
        return self.recorded_sizes.add_scaled(self._repeated_sizes)

    @property
    def recorded_sizes(self) -> LogSizes:
        """Lengths of the lists, without repetitions."""
        return LogSizes(len(self.spans) // _COLUMN_COUNT, len(self.sub_segments), len(self.delays))

    def add_span(self, span: SpanRecord) -> None:
        """Record the span of a task."""
        self.spans.extend(span)

    def spans_between(self, begin: int, end: int) -> FloatArray:
        """Spans from one to before another, without repetitions: [spans, columns]."""
        return np.array(self.spans[begin * _COLUMN_COUNT : end * _COLUMN_COUNT]).reshape(-1, _COLUMN_COUNT)

    def add_repetition(self, repetition: Repetition) -> None:
        """Repeat the most recent records a number of times; all that follows is shifted accordingly."""
        self.repetitions.append(repetition)
        self._repeated_sizes = self._repeated_sizes.add_scaled(repetition.period_sizes, repetition.count)
        self.skipped_seconds += repetition.period_seconds * repetition.count

    def add_sync(self, rank: int, task: int, group_keys: Sequence[Hashable]) -> None:
        """Record the groups with which a rank synchronized inside a task's segment, ordered by first comm op."""
        for order, group_key in enumerate(group_keys):
            self.sync_participants.setdefault((order, task, group_key), []).append(rank * EVENT_KEY_STRIDE + task)

    def add_operation(self, position: OperationPosition, start: Seconds, end: Seconds, delay: ContentionDelay) -> None:
        """Record the span of a single operation."""
        if delay.exposed_delay or delay.transfer_delay:
            self.delays.append((*position, delay.exposed_delay, delay.transfer_delay))
        self.add_sub_segment(position, position[-1] + 1, (start, end), None)

    def add_sub_segment(
        self,
        position: OperationPosition,
        end_operation: int,
        times: tuple[Seconds, Seconds],
        end_times: EndTimes | None,
    ) -> None:
        """Record consecutive operations, from a position to before `end_operation`.

        times: (start, end) of all of them; end_times: of every operation, None for a single one.
        """
        self.sub_segments.append((*position, end_operation))
        self.sub_segment_times.append(times)
        self.sub_segment_ends.append(end_times)

    def add_joint_delays(self, ranks: IntArray, position: tuple[int, int], delays: FloatArray, now: Seconds) -> None:
        """Record by how much ranks were delayed in an operation (task, index), which has just ended: [ranks] each."""
        is_delayed = np.abs(delays) > RELATIVE_ROUNDING * now
        rows = np.empty((int(is_delayed.sum()), 5))
        rows[:, 0], rows[:, 1:3], rows[:, 3:] = ranks[is_delayed], position, delays[is_delayed, None]
        self.joint_delays.append(rows)

    def build_trace(self, representative: IntArray) -> Trace:
        """The trace, with repetitions unrolled; its spans leave the recorder."""
        columns = self._take_columns()
        rank, task, stream, predecessor = np.ascontiguousarray(columns[:, : TIMES.start].T, dtype=np.int64)
        ready, start, end, waited, slowed = np.ascontiguousarray(columns[:, TIMES.start + 1 :].T)
        del columns  # 64 MB of 1,048,576 GPUs
        events = _EventIndex.from_columns(rank, task)
        return Trace(
            rank=rank,
            task=task,
            stream=stream,
            critical_predecessor=np.where(predecessor < 0, -1, events.lookup(predecessor)),
            blocking_event=self._blocking_events(events, waited),
            ready=ready,
            start=start,
            end=end,
            waited=waited,
            slowed=slowed,
            contention=self._contention_delays(events),
            representative=representative,
        )

    def _take_columns(self) -> FloatArray:
        """Take out the spans, with repetitions unrolled: [spans, columns]."""
        columns, self.spans = np.asarray(self.spans).reshape(-1, _COLUMN_COUNT), _empty_array()
        if self.repetitions:
            unrolled = UnrolledLog.from_repetitions(self.repetitions, columns[:, RANK].astype(np.int64), SPANS)
            columns = columns[unrolled.source_index]
            columns[:, PREDECESSOR] = unroll_predecessors(self.repetitions, columns[:, PREDECESSOR].astype(np.int64))
            columns[:, TASK] += unrolled.task_offset
            columns[:, TIMES] += unrolled.time_offset[:, None]
        return columns

    def _blocking_events(self, event_index: "_EventIndex", waited: FloatArray) -> IntArray:
        """For each event, the event that waited least among those that synchronized with it.

        The groups of a segment are considered one after the other.
        """
        blocking = np.arange(len(waited))
        by_order_and_size: dict[tuple[int, int], list[list[int]]] = {}
        for (order, *_), event_keys in self.sync_participants.items():
            by_order_and_size.setdefault((order, len(event_keys)), []).append(event_keys)
        for _, keys_of_groups in sorted(by_order_and_size.items()):  # an event is in one group of each order
            events = event_index.lookup(np.array(keys_of_groups))
            earliest = np.argmin(waited[blocking[events]], axis=1)
            blocking[events] = blocking[events[np.arange(len(events)), earliest]][:, None]
        return blocking

    def _contention_delays(self, event_index: "_EventIndex") -> ContentionDelays:
        """Delays by link sharing, by event."""
        delays = np.array(self.delays, dtype=np.float64).reshape(-1, 5)
        if self.repetitions:
            unrolled = UnrolledLog.from_repetitions(self.repetitions, delays[:, RANK].astype(np.int64), DELAYS)
            delays = delays[unrolled.source_index]
            delays[:, TASK] += unrolled.task_offset
        delays = np.concatenate([delays, *self.joint_delays])
        *positions, exposed_delay, transfer_delay = delays.T
        ranks, tasks, operation = (np.ascontiguousarray(column, dtype=np.int64) for column in positions)
        event = event_index.lookup(ranks * EVENT_KEY_STRIDE + tasks)
        by_event = np.argsort(event, kind="stable")
        return ContentionDelays(event[by_event], operation[by_event], exposed_delay[by_event], transfer_delay[by_event])

    def operation_log(self) -> OperationSpanLog:
        """Spans of operations that were run by sub-segments."""
        log = OperationSpanLog.from_sub_segments(self.sub_segments, self.sub_segment_times, self.sub_segment_ends)
        if self.repetitions:
            unrolled = UnrolledLog.from_repetitions(self.repetitions, log.rank, SUB_SEGMENTS)
            log = log.unroll(unrolled.source_index, unrolled.task_offset, unrolled.time_offset)
        return log.add_joint_spans(self.joint_spans, self.skipped_seconds)


@dataclass(frozen=True, slots=True)
class _EventIndex:
    """Event index by key. rank_index: [ranks] among simulated ranks; event: [simulated ranks, tasks]."""

    rank_index: IntArray
    event: IntArray

    @classmethod
    def from_columns(cls, rank: IntArray, task: IntArray) -> Self:
        """Index events by their rank and task."""
        is_present = np.bincount(rank) > 0
        rank_index = np.cumsum(is_present) - 1
        event = np.full((int(is_present.sum()), int(task.max(initial=-1)) + 1), -1)
        event[rank_index[rank], task] = np.arange(len(rank))
        return cls(rank_index, event)

    def lookup(self, event_keys: IntArray) -> IntArray:
        """Event indices of event keys; arbitrary for key -1."""
        events: IntArray = self.event[
            self.rank_index[event_keys // EVENT_KEY_STRIDE], event_keys % EVENT_KEY_STRIDE % self.event.shape[1]
        ]
        return events
