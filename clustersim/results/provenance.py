"""Provenance of busy time: what are the durations of a result based on, and how uncertain are they?

Every second in which a rank computes or moves data, hidden or not, on all ranks, is counted under the
kernel or comm op that it is spent on, with the provenance and the expected error of its duration; waiting
(for other ranks, or for the host to launch a kernel) has none. An overlapped kernel and comm op count as
one item, with the provenance of the longer.

A kernel that was measured standalone and takes longer in situ (`cost.in_situ`) is no more certain than the
ratio of the two, which was not measured: the time of such kernels is reported separately.

Errors of one result are assumed to have the same sign: they add up, so the interval is wide rather than
narrow.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from clustersim.common.arrays import FloatArray, IntArray
from clustersim.common.units import Seconds
from clustersim.cost.segment import SegmentTiming
from clustersim.cost.timing import LOCALLY_MEASURED, CommTiming, Provenance
from clustersim.model.kernels import Kernel
from clustersim.program.task import CommOp, CommOverlap, LaunchOp, Operation, Segment
from clustersim.results.class_blocks import class_blocks
from clustersim.results.trace_table import (
    FULL_RUN,
    SegmentTimingLookup,
    TimeWindow,
    TraceTable,
    sum_segment_runs,
    timing_run_counts,
)
from clustersim.uncertainty.expected_error import ExpectedError

TimedWork = Kernel | CommOp | CommOverlap


@dataclass(frozen=True, slots=True)
class BusyTimeItem:
    """All runs of one kernel or comm op whose durations have one source.

    error: expected relative error, None where nothing was measured; in_situ_slowdown: duration in a step over
    standalone duration; seconds, runs: on all ranks (a message runs at both of its ends).
    """

    body: TimedWork
    provenance: Provenance
    error: float | None
    in_situ_slowdown: float
    seconds: Seconds
    runs: int


@dataclass(frozen=True, slots=True)
class InSituShare:
    """Kernels measured standalone and scaled to in-situ durations: share of the busy time, and mean slowdown."""

    share: float
    slowdown: float


def busy_time_items(
    table: TraceTable,
    segment_timing: SegmentTimingLookup,
    comm_timing: Callable[[CommOp], CommTiming],
    window: TimeWindow = FULL_RUN,
) -> tuple[BusyTimeItem, ...]:
    """Kernels and comm ops by busy time, longest first; window: selects events by their start."""
    indexer = _ItemIndexer()
    entries: list[_IndexedSeconds] = [(np.zeros(0, dtype=np.int64), np.zeros(0), np.zeros(0))]
    for block in class_blocks(table):
        start, (begin, end) = block.trace.start, window
        events = np.flatnonzero((start >= begin) & (start < end))
        entries += _segment_items(block, events, segment_timing, indexer)
        entries += _comm_items(block, events, comm_timing, indexer)
    item_index, *columns = map(np.concatenate, zip(*entries, strict=True))
    seconds, runs = (np.bincount(item_index, column, minlength=len(indexer)).tolist() for column in columns)
    unsorted = (
        BusyTimeItem(*key, seconds=item_seconds, runs=round(item_runs))
        for key, item_seconds, item_runs in zip(indexer.index_by_key, seconds, runs, strict=True)
    )
    return tuple(sorted(unsorted, key=lambda item: -item.seconds))


def provenance_shares(items: Iterable[BusyTimeItem]) -> dict[str, float]:
    """Share of busy seconds by provenance, summing to 1 (all zero if nothing took any time)."""
    seconds = dict.fromkeys(Provenance, 0.0)
    for item in items:
        seconds[item.provenance] += item.seconds
    total = sum(seconds.values())
    return {kind.value: item_seconds / total if total > 0 else 0.0 for kind, item_seconds in seconds.items()}


def in_situ_share(items: Sequence[BusyTimeItem]) -> InSituShare:
    """The share of kernels measured standalone whose in-situ duration differs."""
    total = sum(item.seconds for item in items)
    scaled = [item for item in items if item.provenance in LOCALLY_MEASURED and item.in_situ_slowdown != 1.0]
    seconds = sum(item.seconds for item in scaled)
    standalone_seconds = sum(item.seconds / item.in_situ_slowdown for item in scaled)
    return InSituShare(seconds / total, seconds / standalone_seconds) if scaled else InSituShare(0.0, 1.0)


def expected_error(items: Sequence[BusyTimeItem]) -> ExpectedError:
    """Expected error of the busy time, as far as its sources know."""
    total = sum(item.seconds for item in items)
    if total <= 0:
        return ExpectedError(0.0, 1.0)
    error_seconds = sum(item.seconds * item.error for item in items if item.error is not None)
    unknown_seconds = sum(item.seconds for item in items if item.error is None)
    kernels = [(item.seconds, item.error) for item in items if item.error is not None and isinstance(item.body, Kernel)]
    kernel_seconds, error = (
        sum(seconds for seconds, _ in kernels),
        sum(seconds * error for seconds, error in kernels),
    )
    return ExpectedError(error_seconds / total, unknown_seconds / total, kernel_seconds / total, error / total)


_ItemKey = tuple[TimedWork, Provenance, float | None, float]
_IndexedSeconds = tuple[IntArray, FloatArray, FloatArray]
"""[n] item indices, possibly repeated, the seconds spent on each, and how often it ran."""


@dataclass(frozen=True, slots=True)
class _ItemIndexer:
    """Indices of items; also cached by operation, since hashing kernels is slower."""

    index_by_key: dict[_ItemKey, int] = field(default_factory=dict)
    _index_by_operation: dict[tuple[Operation, Provenance, float | None, float], int] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.index_by_key)

    def index_for(self, key: _ItemKey) -> int:
        """Index of an item."""
        return self.index_by_key.setdefault(key, len(self.index_by_key))

    def segment_indices(self, segment: Segment, timing: SegmentTiming) -> IntArray:
        """Item indices of the operations of a segment: [operations]."""
        sources = zip(timing.provenance, timing.error, timing.in_situ_slowdown, strict=True)
        indices: list[int] = []
        for operation, (source, error, slowdown) in zip(segment.operations, sources, strict=True):
            key = operation, source, error, slowdown
            index = self._index_by_operation.get(key)
            if index is None:
                index = self._index_by_operation[key] = self.index_for((operation.body, source, error, slowdown))
            indices.append(index)
        return np.array(indices, dtype=np.int64)


def _segment_items(
    table: TraceTable, events: IntArray, segment_timing: SegmentTimingLookup, indexer: _ItemIndexer
) -> Iterator[_IndexedSeconds]:
    trace = table.trace
    totals = sum_segment_runs(table, events, trace.end[events] - trace.start[events])
    for segment, timing, count in timing_run_counts(table, totals, segment_timing):
        seconds = (np.array(timing.durations) - timing.launch_stalls) * count
        yield indexer.segment_indices(segment, timing), seconds, np.full(len(seconds), count)


def _comm_items(
    table: TraceTable, events: IntArray, comm_timing: Callable[[CommOp], CommTiming], indexer: _ItemIndexer
) -> Iterator[_IndexedSeconds]:
    trace, comm_op_index = table.trace, table.comm_op_index
    is_counted = np.array([*(not isinstance(comm_op, LaunchOp) for comm_op in table.comm_ops), False])  # -1: none
    selected = events[is_counted[comm_op_index[events]]]
    weights = table.weights[table.classes_of(selected)]
    timings = ((comm_op, comm_timing(comm_op)) for comm_op in table.comm_ops)
    indices = [indexer.index_for((comm_op, timing.provenance, timing.error, 1.0)) for comm_op, timing in timings]
    seconds, runs = (
        np.bincount(comm_op_index[selected], column, minlength=len(table.comm_ops)).astype(np.float64, copy=False)
        for column in ((trace.end - trace.start)[selected] * weights, weights)
    )
    yield np.array(indices, dtype=np.int64), seconds, runs
