"""Where do spans go while the engine runs?"""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Final, NamedTuple, Self

import numpy as np

from clustersim.common.arrays import FloatArray, IntArray
from clustersim.common.units import Seconds
from clustersim.engine.recording.operation_log import EndTimes, OperationSpanLog
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
    """Seconds of a block: a rank waited for others, communication beside slowed its kernels."""

    waited: Seconds = 0.0
    slowed: Seconds = 0.0


class ContentionDelay(NamedTuple):
    """An operation whose exchange shares links: seconds more than if nobody shared them, nor slowed its kernel.

    kernel: that its kernel runs; exposed: that its exchange moves without the kernel; moved: that its exchange takes.
    """

    kernel_delay: Seconds = 0.0
    exposed_delay: Seconds = 0.0
    transfer_delay: Seconds = 0.0

    def without_rounding(self, now: Seconds) -> "ContentionDelay":
        """The same without what is only rounding of the clock."""
        threshold = RELATIVE_ROUNDING * abs(now)
        return (
            ContentionDelay(*(seconds if abs(seconds) > threshold else 0.0 for seconds in self))
            if max(map(abs, self)) > threshold
            else NO_DELAY
        )


OperationPosition = tuple[int, int, int]
"""Of an operation: its rank, the rank's task, and where in the task's block."""
NO_DELAY: Final = ContentionDelay()
RELATIVE_ROUNDING: Final = 1e-12
"""Part of the clock below which a difference of two times says nothing: float64 keeps 2e-16, and times are sums."""


SpanRecord = tuple[int, int, int, int, Seconds, Seconds, Seconds, Seconds, Seconds, Seconds]
"""A span: rank, task, stream, cause; when it was queued, ready, started and ended; what was lost inside it (`WaitAndSlowdown`).

The cause is the name of the row whose end allowed the start: its rank times `NAMES` plus its task; -1: nothing did.
"""
_COLUMN_COUNT: Final = 10
RANK, TASK, STREAM, PREDECESSOR = range(4)
TIMES: Final = slice(4, 8)
WAIT_AND_SLOWDOWN: Final = slice(8, 10)
"""Columns of a row. The first four are whole numbers, which float64 holds exactly."""


@dataclass(slots=True)
class Recorder:
    """Appends rows. A row is named by its rank and its task, as it may be written anywhere (`NAMES`)."""

    spans: list[SpanRecord] = field(default_factory=list)
    sync_participants: dict[tuple[int, int, Hashable], list[int]] = field(default_factory=dict)
    sub_segments: list[tuple[int, int, int, int]] = field(default_factory=list)
    sub_segment_times: list[tuple[Seconds, Seconds]] = field(default_factory=list)
    sub_segment_ends: list[EndTimes | None] = field(default_factory=list)
    delays: list[tuple[int, int, int, Seconds, Seconds]] = field(default_factory=list)
    repetitions: list[Repetition] = field(default_factory=list)
    skipped_seconds: Seconds = 0.0
    _repeated_sizes: LogSizes = NO_RECORDS

    @property
    def span_count(self) -> int:
        """How many there are, with those that are repeated."""
        return len(self.spans) + self._repeated_sizes.spans

    @property
    def unrolled_sizes(self) -> LogSizes:
        """How much is written, with what is repeated."""
        return self.recorded_sizes.add_scaled(self._repeated_sizes)

    @property
    def recorded_sizes(self) -> LogSizes:
        """How much is written, without what is repeated."""
        return LogSizes(len(self.spans), len(self.sub_segments), len(self.delays))

    def add_span(self, span: SpanRecord) -> None:
        """Write the span of a task."""
        self.spans.append(span)

    def add_repetition(self, repetition: Repetition) -> None:
        """Let what was written last be written again, a few times; what follows is that much later."""
        self.repetitions.append(repetition)
        self._repeated_sizes = self._repeated_sizes.add_scaled(repetition.period_sizes, repetition.count)
        self.skipped_seconds += repetition.period_seconds * repetition.count

    def add_sync(self, rank: int, task: int, group_keys: Sequence[Hashable]) -> None:
        """Note that a span is of a block in which its rank met the members of groups, first come first."""
        for order, group_key in enumerate(group_keys):
            self.sync_participants.setdefault((order, task, group_key), []).append(rank * EVENT_KEY_STRIDE + task)

    def add_operation(
        self, position: OperationPosition, start: Seconds, end: Seconds, delay: ContentionDelay = NO_DELAY
    ) -> None:
        """Write the span of an operation: of a rank, inside a task's block, at this place."""
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
        """Write operations that ran one behind the other, from a place to before place `until`.

        times: of all of them; ends: of each of them, None of one alone.
        """
        self.sub_segments.append((*position, end_operation))
        self.sub_segment_times.append(times)
        self.sub_segment_ends.append(end_times)

    def build_trace(self, representative: IntArray) -> Trace:
        """All spans, in columns."""
        values = np.fromiter(chain.from_iterable(self.spans), np.float64, _COLUMN_COUNT * len(self.spans))
        columns = values.reshape(-1, _COLUMN_COUNT)
        if self.repetitions:
            unrolled = UnrolledLog.from_repetitions(self.repetitions, columns[:, RANK].astype(np.int64), SPANS)
            columns = columns[unrolled.source_index]
            columns[:, PREDECESSOR] = unroll_predecessors(self.repetitions, columns[:, PREDECESSOR].astype(np.int64))
            columns[:, TASK] += unrolled.task_offset
            columns[:, TIMES] += unrolled.time_offset[:, None]
        rank, task, stream, predecessor = np.ascontiguousarray(columns[:, : TIMES.start].T, dtype=np.int64)
        queued, ready, start, end, waited, slowed = np.ascontiguousarray(columns[:, TIMES.start :].T)
        events = _EventIndex.from_columns(rank, task)
        return Trace(
            rank=rank, task=task, stream=stream, critical_predecessor=np.where(predecessor < 0, -1, events.lookup(predecessor)),
            blocking_event=self._blocking_events(events, waited),
            queued=queued, ready=ready, start=start, end=end, waited=waited, slowed=slowed,
            contention=self._contention_delays(events),
            representative=representative,
        )  # fmt: skip

    def _blocking_events(self, event_index: "_EventIndex", waited: FloatArray) -> IntArray:
        """For each row the one of those that met that waited least; through groups of several roles, role by role."""
        blocking = np.arange(len(waited))
        for _, event_keys in sorted(self.sync_participants.items(), key=lambda item: item[0][0]):
            events = event_index.lookup(np.array(event_keys))
            earliest = events[int(np.argmin(waited[blocking[events]]))]
            blocking[events] = blocking[earliest]
        return blocking

    def _contention_delays(self, event_index: "_EventIndex") -> ContentionDelays:
        """What sharing links changed."""
        if not self.delays:
            return ContentionDelays.empty()
        delays = np.array(self.delays, dtype=np.float64)
        if self.repetitions:
            unrolled = UnrolledLog.from_repetitions(self.repetitions, delays[:, RANK].astype(np.int64), DELAYS)
            delays = delays[unrolled.source_index]
            delays[:, TASK] += unrolled.task_offset
        *positions, exposed_delay, transfer_delay = delays.T
        ranks, tasks, operation = (np.ascontiguousarray(column, dtype=np.int64) for column in positions)
        event = event_index.lookup(ranks * EVENT_KEY_STRIDE + tasks)
        by_event = np.argsort(event, kind="stable")
        return ContentionDelays(event[by_event], operation[by_event], exposed_delay[by_event], transfer_delay[by_event])

    def operation_log(self) -> OperationSpanLog:
        """The operations inside blocks that were run piece by piece."""
        log = OperationSpanLog.from_sub_segments(self.sub_segments, self.sub_segment_times, self.sub_segment_ends)
        if not self.repetitions:
            return log
        unrolled = UnrolledLog.from_repetitions(self.repetitions, log.rank, SUB_SEGMENTS)
        return log.unroll(unrolled.source_index, unrolled.task_offset, unrolled.time_offset)


@dataclass(frozen=True, slots=True)
class _EventIndex:
    """Where the row of each name is. number: [ranks] of simulated ranks; row: [simulated ranks, tasks]."""

    rank_index: IntArray
    event: IntArray

    @classmethod
    def from_columns(cls, rank: IntArray, task: IntArray) -> Self:
        """Rows by their rank and task."""
        is_present = np.bincount(rank) > 0
        rank_index = np.cumsum(is_present) - 1
        event = np.full((int(is_present.sum()), int(task.max(initial=-1)) + 1), -1)
        event[rank_index[rank], task] = np.arange(len(rank))
        return cls(rank_index, event)

    def lookup(self, event_keys: IntArray) -> IntArray:
        """The rows of names; of none (-1) any."""
        events: IntArray = self.event[
            self.rank_index[event_keys // EVENT_KEY_STRIDE], event_keys % EVENT_KEY_STRIDE % self.event.shape[1]
        ]
        return events
