"""Idle time of compute streams: why did a stream stand still?

A *gap* is the time between two consecutive tasks of a rank's compute stream. What ended it is the critical
predecessor of the later task (`critical_predecessors`), here the *awaited* event. A gap is split into

1. transfer: the time in which awaited data moved, by the axis of the communication. Awaited on the receive
   stream: the awaited transfer itself, since receive buffers are pre-posted and receives never queue behind
   each other. Awaited on another stream: everything that this stream transferred in the gap, since the
   awaited event queued behind it. If the host was involved (a gather from host memory, weights that it
   updated): what was transferred, or the host computed, one after the other, following critical
   predecessors back from the awaited event.
2. the remainder, in which other ranks were waited for. If the awaited group spans pipeline stages, it is
   bubble (of the gap's phase), otherwise wait. Without awaited communication of the rank itself, it is
   wait.

A gap's phase within its step is warm-up before the rank's first backward has begun, cool-down after its
last forward has ended, and steady in between. (In GPipe the pause between the last forward and the first
backward is thus warm-up.)

After its last segment a rank's compute stream waits for its DP stream: events of that stream that end later
count as if the compute stream ran them. What then remains until the step ends is cool-down in a pipeline,
otherwise wait.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Final, Self

import numpy as np

from clustersim.common.arrays import FloatArray, IntArray
from clustersim.program.task import HOST_STREAMS, Stream
from clustersim.results.critical_predecessors import PredecessorLookup
from clustersim.results.time_categories import TIME_CATEGORIES, TimeCategory
from clustersim.results.trace_table import TimeWindow, TraceTable, has_pipeline
from clustersim.trace.trace import Trace

GapSeconds = tuple[IntArray, IntArray, FloatArray]
"""Gap indices, the category of what was transferred in each, and for how many seconds of the gap."""
GapTransfers = tuple[IntArray, IntArray, FloatArray, FloatArray]
"""Gap indices, the category of what was transferred in each, and its start and end within the gap in seconds."""
_NON_CHAINED_STREAMS: Final = (Stream.COMPUTE, Stream.RECEIVE)


@dataclass(frozen=True, slots=True)
class ComputeEvents:
    """Events that compute streams ran, or waited for at the end.

    events: trace events by class and time; start: seconds, for DP-stream events not before the last segment's
    end; class_offset: [classes + 1] start of each class.
    """

    events: IntArray
    start: FloatArray
    class_offset: IntArray


@dataclass(frozen=True, slots=True)
class IdleGaps:
    """Idle gaps of compute streams, in columns of one length.

    rank_class: symmetry class; start, end: seconds; awaited: the event that was waited for, or -1;
    remainder_category: index of the category of the time in which nothing awaited was transferred;
    predecessors: lookup for all events.
    """

    rank_class: IntArray
    start: FloatArray
    end: FloatArray
    awaited: IntArray
    remainder_category: IntArray
    predecessors: PredecessorLookup


def build_compute_events(trace: Trace, table: TraceTable) -> ComputeEvents:
    """Events of the compute streams, and those of DP streams that end after a class's last compute event."""
    last_end = np.zeros(len(table.ranks))
    compute = np.flatnonzero(trace.stream == Stream.COMPUTE)
    np.maximum.at(last_end, table.classes_of(compute), trace.end[compute])
    dp_events = np.flatnonzero(trace.stream == Stream.DP)
    trailing = dp_events[trace.end[dp_events] > last_end[table.classes_of(dp_events)]]
    events = np.concatenate((compute, trailing))
    start = np.concatenate(
        (trace.start[compute], np.maximum(trace.start[trailing], last_end[table.classes_of(trailing)]))
    )
    order = _execution_order(table, events, len(compute))
    class_offset = np.searchsorted(table.classes_of(events[order]), np.arange(len(table.ranks) + 1))
    return ComputeEvents(events[order], start[order], class_offset)


def _execution_order(table: TraceTable, events: IntArray, compute_count: int) -> IntArray:
    """Order of events by class, then compute before DP streams, then by task id (the order on the stream)."""
    key_stride = len(table.tasks.segment) + 1
    is_trailing = np.arange(len(events)) >= compute_count
    order: IntArray = np.argsort(
        (table.classes_of(events) * 2 + is_trailing) * key_stride + table.trace.task[events], kind="stable"
    )
    return order


def find_gaps(trace: Trace, table: TraceTable, compute: ComputeEvents) -> IdleGaps:
    """All gaps that ended because a task began."""
    rank_class = table.classes_of(compute.events)
    previous = np.concatenate(([0.0], trace.end[compute.events[:-1]]))[: len(compute.events)]
    previous[compute.class_offset[:-1][np.diff(compute.class_offset) > 0]] = 0.0
    gap_events = np.flatnonzero(compute.start > previous)
    predecessors = PredecessorLookup.from_trace(table)
    awaited = _awaited_events(table, predecessors, compute.events[gap_events])
    crosses_stages = (awaited >= 0) & table.tasks.crosses_stages[table.entries_of(awaited)]
    remainder_category = np.where(
        crosses_stages, _bubble_categories(table, compute, rank_class)[gap_events], TimeCategory.WAIT.index
    )
    return IdleGaps(
        rank_class[gap_events],
        previous[gap_events],
        compute.start[gap_events],
        awaited,
        remainder_category,
        predecessors,
    )


def idle_seconds(trace: Trace, table: TraceTable, compute: ComputeEvents, window: TimeWindow) -> FloatArray:
    """Seconds within a time window in which compute streams were idle: [classes, categories]."""
    seconds = np.zeros((len(table.ranks), len(TIME_CATEGORIES)))
    gaps = find_gaps(trace, table, compute)
    gaps = replace(gaps, start=np.clip(gaps.start, *window), end=np.clip(gaps.end, *window))
    transfer_seconds = np.zeros(len(gaps.rank_class))
    gap, category, start, end = host_chain_transfers(table, gaps)
    host_chain = gap, category, end - start
    for gap_index, category, busy_seconds in (
        *_receive_seconds(trace, table, gaps),
        *_stream_seconds(trace, table, gaps),
        host_chain,
    ):
        np.add.at(seconds, (gaps.rank_class[gap_index], category), busy_seconds)
        np.add.at(transfer_seconds, gap_index, busy_seconds)
    np.add.at(
        seconds, (gaps.rank_class, gaps.remainder_category), np.maximum(gaps.end - gaps.start - transfer_seconds, 0.0)
    )
    _add_tail(seconds, table, compute, window)
    return seconds


def _add_tail(seconds: FloatArray, table: TraceTable, compute: ComputeEvents, window: TimeWindow) -> None:
    category = TimeCategory.BUBBLE_COOLDOWN if has_pipeline(table.program) else TimeCategory.WAIT
    has_events = np.diff(compute.class_offset) > 0
    ends = np.zeros(len(seconds))
    ends[has_events] = table.trace.end[compute.events[compute.class_offset[1:][has_events] - 1]]
    seconds[:, category.index] += np.clip(table.makespan, *window) - np.clip(ends, *window)


def _awaited_events(table: TraceTable, predecessors: PredecessorLookup, events: IntArray) -> IntArray:
    """The rank's own communication that each event waited for: its predecessor, else the event itself, else -1."""
    trace, predecessor = table.trace, predecessors(events)
    is_rank_comm = (
        (predecessor >= 0)
        & (trace.rank[predecessor] == trace.rank[events])
        & (trace.stream[predecessor] != Stream.COMPUTE)
    )
    return np.where(is_rank_comm, predecessor, np.where(table.tasks.comm_op[table.entries_of(events)] >= 0, events, -1))


def _bubble_categories(table: TraceTable, compute: ComputeEvents, rank_class: IntArray) -> IntArray:
    """Bubble category (index) that a gap before each event would have."""
    position = np.arange(len(compute.events))
    entry = table.entries_of(compute.events)
    class_step = rank_class * table.step_count + table.tasks.step[entry]
    first_backward = np.full(len(table.ranks) * table.step_count, len(compute.events))
    last_forward = np.full(len(table.ranks) * table.step_count, -1)
    is_backward, is_forward = table.tasks.is_backward[entry], table.tasks.is_forward[entry]
    np.minimum.at(first_backward, class_step[is_backward], position[is_backward])
    np.maximum.at(last_forward, class_step[is_forward], position[is_forward])
    after = np.where(
        position > last_forward[class_step], TimeCategory.BUBBLE_COOLDOWN.index, TimeCategory.BUBBLE_STEADY.index
    )
    return np.where(position <= first_backward[class_step], TimeCategory.BUBBLE_WARMUP.index, after)


def _receive_seconds(trace: Trace, table: TraceTable, gaps: IdleGaps) -> Iterator[GapSeconds]:
    """Overlap of gaps with the transfer that each awaits on the receive stream."""
    gap_index = np.flatnonzero((gaps.awaited >= 0) & (trace.stream[gaps.awaited] == Stream.RECEIVE))
    awaited = gaps.awaited[gap_index]
    begin = np.maximum(gaps.start[gap_index], trace.start[awaited])
    overlap = np.minimum(gaps.end[gap_index], trace.end[awaited]) - begin
    yield gap_index, table.tasks.category[table.entries_of(awaited)], np.maximum(overlap, 0.0)


def _stream_seconds(trace: Trace, table: TraceTable, gaps: IdleGaps) -> Iterator[GapSeconds]:
    """Overlap of gaps with all transfers on the stream that each awaits, by category."""
    gap_index = stream_wait_gaps(table, gaps)
    gap_keys = gaps.rank_class[gap_index] * len(Stream) + trace.stream[gaps.awaited[gap_index]]
    transfers = np.flatnonzero((trace.stream != Stream.COMPUTE) & (trace.stream != Stream.RECEIVE))
    keys = table.classes_of(transfers) * len(Stream) + trace.stream[transfers]
    awaited = np.isin(keys, gap_keys)
    transfers, keys = transfers[awaited], keys[awaited]
    categories = table.tasks.category[table.entries_of(transfers)]
    for category in np.unique(categories).tolist():
        busy_time = _CumulativeBusyTime.from_events(
            trace, transfers[categories == category], keys[categories == category]
        )
        seconds = busy_time.busy_until(gap_keys, gaps.end[gap_index]) - busy_time.busy_until(
            gap_keys, gaps.start[gap_index]
        )
        yield gap_index, np.full(len(gap_index), category), seconds


def host_chain_transfers(table: TraceTable, gaps: IdleGaps) -> GapTransfers:
    """Transfers and host computation in the gaps that involve the host, one after the other."""
    gap, events = _host_chains(table, gaps)
    start = np.maximum(gaps.start[gap], table.trace.start[events])
    end = np.maximum(np.minimum(gaps.end[gap], table.trace.end[events]), start)
    return gap, table.tasks.category[table.entries_of(events)], start, end


def stream_wait_gaps(table: TraceTable, gaps: IdleGaps) -> IntArray:
    """Gaps that await another stream of the rank and do not involve the host."""
    stream = table.trace.stream[gaps.awaited]
    awaits = (gaps.awaited >= 0) & (stream != Stream.RECEIVE)
    awaits[_host_chains(table, gaps)[0]] = False
    gap_index: IntArray = np.flatnonzero(awaits)
    return gap_index


def _host_chains(table: TraceTable, gaps: IdleGaps) -> tuple[IntArray, IntArray]:
    """Gaps that involve the host, each with the rank's own events on its chain of critical predecessors."""
    trace, empty = table.trace, np.zeros(0, np.int64)
    if not np.isin(trace.stream, HOST_STREAMS).any():
        return empty, empty
    gap = np.flatnonzero((gaps.awaited >= 0) & (trace.stream[gaps.awaited] != Stream.RECEIVE))
    events = gaps.awaited[gap]
    chains = [(empty, empty)]
    while len(gap):
        ends_in_gap = trace.end[events] > gaps.start[gap]
        gap, events = gap[ends_in_gap], events[ends_in_gap]
        chains.append((gap, events))
        predecessor = gaps.predecessors(events)
        is_rank_comm = (
            (predecessor >= 0)
            & (trace.rank[predecessor] == trace.rank[events])
            & ~np.isin(trace.stream[predecessor], _NON_CHAINED_STREAMS)
        )
        gap, events = gap[is_rank_comm], predecessor[is_rank_comm]
    gap, events = (np.concatenate(column) for column in zip(*chains, strict=True))
    involves_host = np.isin(gap, gap[np.isin(trace.stream[events], HOST_STREAMS)])
    return gap[involves_host], events[involves_host]


@dataclass(frozen=True, slots=True, eq=False)
class _CumulativeBusyTime:
    """Cumulative busy time of streams. Events are sorted by stream and time.

    sort_key: orders by (stream, start); stream, end; busy_before: [events + 1] busy seconds of all preceding
    events; key_stride: distance between streams in the sort key.
    """

    sort_key: FloatArray
    stream: IntArray
    end: FloatArray
    busy_before: FloatArray
    key_stride: float

    @classmethod
    def from_events(cls, trace: Trace, events: IntArray, stream: IntArray) -> Self:
        key_stride = 2.0 * trace.makespan
        order = np.lexsort((trace.start[events], stream))
        events, stream = events[order], stream[order]
        start, end = trace.start[events], trace.end[events]
        return cls(
            stream * key_stride + start, stream, end, np.concatenate(([0.0], np.cumsum(end - start))), key_stride
        )

    def busy_until(self, stream: IntArray, time: FloatArray) -> FloatArray:
        """Busy seconds of a stream in [0, time]: all events that have begun, minus the last one's remainder.

        Positions are exact up to the rounding of the sort key; an event that begins within that of `time` has as
        much left to run as it adds, so it contributes nothing either way.
        """
        first = np.searchsorted(self.stream, stream, side="left")
        begun_count = np.maximum(np.searchsorted(self.sort_key, stream * self.key_stride + time, side="right"), first)
        unfinished = np.where(begun_count > first, np.maximum(self.end[begun_count - 1] - time, 0.0), 0.0)
        return self.busy_before[begun_count] - self.busy_before[first] - unfinished
