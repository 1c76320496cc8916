"""Dominant time category of every rank in each time bin (the rank-time heatmap).

Same categories as in the time breakdown, by the same rules, but resolved in time: transfers of an idle gap
stand where they happened, the remainder of the gap around them. Inside a segment the categories are spread
uniformly over its span, except for the time in which this run waited for others; slowdown and link-sharing
delays are averaged over all runs of the segment on the rank. So a rank's seconds of a category, summed over
bins, are its breakdown (summed over all steps).

Ranks of one symmetry class share a heatmap row. If there are more classes than can be shown, those of
evenly spaced ranks are shown.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Self

import numpy as np
from numpy.typing import NDArray

from clustersim.common.arrays import FloatArray, IntArray
from clustersim.common.units import Seconds
from clustersim.program.task import Stream
from clustersim.results.class_blocks import select_classes
from clustersim.results.idle_time import (
    ComputeEvents,
    GapTransfers,
    IdleGaps,
    build_compute_events,
    find_gaps,
    host_chain_transfers,
    stream_wait_gaps,
)
from clustersim.results.intervals import Intervals, intersect
from clustersim.results.time_breakdown import segment_category_seconds
from clustersim.results.time_categories import TIME_CATEGORIES, TimeCategory
from clustersim.results.trace_table import SegmentTimingLookup, TraceTable, has_pipeline, sum_segment_runs

MAX_CLASSES = 2048
"""Maximum number of classes that are evaluated."""


@dataclass(frozen=True, slots=True, eq=False)
class DominantCategories:
    """Dominant time category by class and time bin.

    ranks: [classes] the simulated ranks that are shown; representative: [ranks] the simulated rank of each
    rank; seconds: [classes, categories] of all steps; category: [classes, bins] index of the category with the
    largest share of the bin; makespan: seconds of all bins.
    """

    ranks: IntArray
    representative: IntArray
    seconds: FloatArray
    category: NDArray[np.uint8]
    makespan: Seconds

    @property
    def is_complete(self) -> bool:
        """Whether all classes are shown."""
        return len(self.ranks) == len(np.unique(self.representative))

    @property
    def class_of_rank(self) -> IntArray:
        """[ranks] class index of each rank, -1 where it is not shown."""
        index = np.minimum(np.searchsorted(self.ranks, self.representative), len(self.ranks) - 1)
        return np.where(self.ranks[index] == self.representative, index, -1)


def dominant_categories(
    table: TraceTable, segment_timing: SegmentTimingLookup, *, bin_count: int, max_classes: int = MAX_CLASSES
) -> DominantCategories:
    """Dominant category of each of `bin_count` equal bins from 0 to the makespan, for at most `max_classes` classes."""
    shown_table = _evenly_spaced_classes(table, max_classes)
    category = np.zeros((len(shown_table.ranks), bin_count), dtype=np.uint8)
    longest = np.zeros((len(shown_table.ranks), bin_count))
    seconds = np.zeros((len(shown_table.ranks), len(TIME_CATEGORIES)))
    for index, bin_seconds in enumerate(
        category_seconds(shown_table, segment_timing, bin_count=bin_count, makespan=table.trace.makespan)
    ):
        seconds[:, index] = bin_seconds.sum(axis=1)
        category[bin_seconds > longest] = index
        np.maximum(longest, bin_seconds, out=longest)
    return DominantCategories(shown_table.ranks, table.trace.representative, seconds, category, table.trace.makespan)


def category_seconds(
    table: TraceTable, segment_timing: SegmentTimingLookup, *, bin_count: int, makespan: Seconds
) -> Iterator[FloatArray]:
    """Yield, for each category in order, its seconds in every bin: [classes, bins]."""
    compute_events = build_compute_events(table.trace, table)
    intervals = _concatenate_categories(
        [
            *_comm_intervals(table, compute_events),
            *_gap_intervals(table, compute_events),
            _tail_interval(table, compute_events, makespan),
        ]
    )
    segments = _SegmentEvents.from_table(table, segment_timing)
    grid = _TimeGrid.from_intervals(
        _concatenate_intervals(segments.intervals, intervals.intervals),
        class_count=len(table.ranks),
        bin_count=bin_count,
        makespan=makespan,
    )
    for index in range(len(TIME_CATEGORIES)):
        yield grid.distribute(
            np.concatenate(
                (segments.category_seconds(index), np.where(intervals.category == index, intervals.seconds, 0.0))
            )
        )


def _evenly_spaced_classes(table: TraceTable, max_classes: int) -> TraceTable:
    """The table restricted to the classes of at most `max_classes` evenly spaced ranks."""
    if len(table.ranks) <= max_classes:
        return table
    spaced_ranks = np.linspace(0, len(table.trace.representative) - 1, max_classes).round().astype(np.int64)
    is_shown = np.isin(table.ranks, table.trace.representative[spaced_ranks])
    return select_classes(table, is_shown)


@dataclass(frozen=True, slots=True, eq=False)
class _CategoryIntervals:
    """Intervals of classes with their category; sign: +1, or -1 where time is subtracted from a category."""

    intervals: Intervals
    category: IntArray
    sign: int | FloatArray = 1

    @property
    def seconds(self) -> FloatArray:
        """Seconds that each interval adds to its category."""
        return self.intervals.seconds * self.sign


def _concatenate_categories(interval_sets: list[_CategoryIntervals]) -> _CategoryIntervals:
    intervals = _concatenate_intervals(*(interval_set.intervals for interval_set in interval_sets))
    sign = np.concatenate(
        [
            np.broadcast_to(np.asarray(category_intervals.sign, dtype=np.float64), len(category_intervals.category))
            for category_intervals in interval_sets
        ]
    )
    return _CategoryIntervals(
        intervals, np.concatenate([intervals_of_kind.category for intervals_of_kind in interval_sets]), sign
    )


def _concatenate_intervals(*interval_sets: Intervals) -> Intervals:
    """Concatenation of interval tables."""
    columns = (
        np.concatenate([getattr(interval_set, name) for interval_set in interval_sets])
        for name in ("key", "start", "end")
    )
    return Intervals(*columns)


def _comm_intervals(table: TraceTable, compute_events: ComputeEvents) -> Iterator[_CategoryIntervals]:
    """Collectives that the compute stream runs, and those that it waits for at the end."""
    entry = table.entries_of(compute_events.events)
    is_comm = table.tasks.comm_op[entry] >= 0
    events = compute_events.events[is_comm]
    yield _CategoryIntervals(
        Intervals(table.classes_of(events), compute_events.start[is_comm], table.trace.end[events]),
        table.tasks.category[entry[is_comm]],
    )


def _gap_intervals(table: TraceTable, compute_events: ComputeEvents) -> Iterator[_CategoryIntervals]:
    """Idle gaps of compute streams: transfers by their category, the remainder by the gap's."""
    gaps = find_gaps(table.trace, table, compute_events)
    yield _CategoryIntervals(Intervals(gaps.rank_class, gaps.start, gaps.end), gaps.remainder_category)
    for gap, category, start, end in (
        _receive_transfers(table, gaps),
        _stream_transfers(table, gaps),
        host_chain_transfers(table, gaps),
    ):
        transfer = Intervals(gaps.rank_class[gap], start, end)
        yield _CategoryIntervals(transfer, category)
        yield _CategoryIntervals(transfer, gaps.remainder_category[gap], -1)


def _receive_transfers(table: TraceTable, gaps: IdleGaps) -> GapTransfers:
    """Transfer of the awaited message in each gap: gap, category, start, end."""
    trace = table.trace
    gap = np.flatnonzero((gaps.awaited >= 0) & (trace.stream[gaps.awaited] == Stream.RECEIVE))
    awaited = gaps.awaited[gap]
    start = np.maximum(gaps.start[gap], trace.start[awaited])
    end = np.maximum(np.minimum(gaps.end[gap], trace.end[awaited]), start)
    return gap, table.tasks.category[table.entries_of(awaited)], start, end


def _stream_transfers(table: TraceTable, gaps: IdleGaps) -> GapTransfers:
    """Transfers in each gap on the other stream that it awaits: gap, category, start, end."""
    trace, stream_count = table.trace, len(Stream)
    gap = stream_wait_gaps(table, gaps)
    gap_keys = gaps.rank_class[gap] * stream_count + trace.stream[gaps.awaited[gap]]
    events = np.flatnonzero((trace.stream != Stream.COMPUTE) & (trace.stream != Stream.RECEIVE))
    events = events[
        np.lexsort(
            (trace.end[events], trace.start[events], table.classes_of(events) * stream_count + trace.stream[events])
        )
    ]
    transfers = Intervals(
        table.classes_of(events) * stream_count + trace.stream[events], trace.start[events], trace.end[events]
    )
    gap_position, transfer_position, overlaps = intersect(
        Intervals(gap_keys, gaps.start[gap], gaps.end[gap]), transfers
    )
    category = table.tasks.category[table.entries_of(events[transfer_position])]
    return gap[gap_position], category, overlaps.start, overlaps.end


def _tail_interval(table: TraceTable, compute_events: ComputeEvents, makespan: Seconds) -> _CategoryIntervals:
    """From a class's last task until the step ends."""
    has_events = np.diff(compute_events.class_offset) > 0
    ends = np.zeros(len(table.ranks))
    ends[has_events] = table.trace.end[compute_events.events[compute_events.class_offset[1:][has_events] - 1]]
    category = TimeCategory.BUBBLE_COOLDOWN if has_pipeline(table.program) else TimeCategory.WAIT
    classes = np.arange(len(ends))
    return _CategoryIntervals(
        Intervals(classes, ends, np.full(len(ends), makespan)), np.full(len(ends), category.index)
    )


@dataclass(frozen=True, slots=True, eq=False)
class _SegmentEvents:
    """Runs of segments.

    waited: [runs] seconds in which each run waited for others; pair_index: [runs] its (class, segment) pair;
    shares: [pairs, categories] how the remaining seconds of a pair are distributed.
    """

    intervals: Intervals
    waited: FloatArray
    pair_index: IntArray
    shares: FloatArray

    @classmethod
    def from_table(cls, table: TraceTable, segment_timing: SegmentTimingLookup) -> Self:
        """All segment runs of a trace."""
        trace, segment_count = table.trace, max(1, len(table.segments))
        events = np.flatnonzero(table.segment_index >= 0)
        totals = sum_segment_runs(table, events, trace.end[events] - trace.start[events])
        pair_index = np.searchsorted(
            totals.rank_class * segment_count + totals.segment,
            table.classes_of(events) * segment_count + table.segment_index[events],
        )
        seconds, wait_index = segment_category_seconds(table, totals, segment_timing), TimeCategory.WAIT.index
        wait_ratio = np.minimum(
            _ratio(seconds[:, wait_index], totals.waited), 1.0
        )  # below 1 if the pair's category seconds were scaled to fit
        seconds[:, wait_index] -= wait_ratio * totals.waited
        shares = _ratio(seconds, np.broadcast_to(seconds.sum(axis=1)[:, None], seconds.shape))
        return cls(
            Intervals(table.classes_of(events), trace.start[events], trace.end[events]),
            trace.waited[events] * wait_ratio[pair_index],
            pair_index,
            shares,
        )

    def category_seconds(self, category: int) -> FloatArray:
        """Seconds of each run in one category."""
        seconds: FloatArray = (self.intervals.seconds - self.waited) * self.shares[self.pair_index, category]
        return seconds + self.waited if category == TimeCategory.WAIT.index else seconds


def _ratio(numerator: FloatArray, denominator: FloatArray) -> FloatArray:
    """Elementwise ratio, 0 where the denominator is 0."""
    return np.divide(numerator, denominator, out=np.zeros_like(numerator), where=denominator > 0)


@dataclass(frozen=True, slots=True, eq=False)
class _TimeGrid:
    """Cells (class and bin) that intervals overlap, and the share of each interval in its cells.

    shape: (classes, bins); first_cell, last_cell: [intervals] cell indices; first_share, last_share,
    inner_share: [intervals] fractions.
    """

    shape: tuple[int, int]
    first_cell: IntArray
    last_cell: IntArray
    first_share: FloatArray
    last_share: FloatArray
    inner_share: FloatArray

    @classmethod
    def from_intervals(cls, intervals: Intervals, *, class_count: int, bin_count: int, makespan: Seconds) -> Self:
        """Cells of equal bins from 0 to the makespan."""
        bin_width = makespan / bin_count or 1.0
        first_bin = np.clip((intervals.start / bin_width).astype(np.int64), 0, bin_count - 1)
        last_bin = np.clip(np.ceil(intervals.end / bin_width).astype(np.int64) - 1, first_bin, bin_count - 1)
        in_one_bin, durations = first_bin == last_bin, intervals.seconds
        first_share = _ratio(np.where(in_one_bin, durations, (first_bin + 1) * bin_width - intervals.start), durations)
        last_share = _ratio(np.where(in_one_bin, 0.0, intervals.end - last_bin * bin_width), durations)
        inner_share = _ratio(np.where(last_bin > first_bin + 1, bin_width, 0.0), durations)
        return cls(
            (class_count, bin_count),
            intervals.key * bin_count + first_bin,
            intervals.key * bin_count + last_bin,
            first_share,
            last_share,
            inner_share,
        )

    def distribute(self, seconds: FloatArray) -> FloatArray:
        """Seconds, distributed uniformly over their intervals, by class and bin: [classes, bins]."""
        nonzero = np.flatnonzero(seconds)
        if len(nonzero) == 0:
            return np.zeros(self.shape)
        first_cell, last_cell, seconds = self.first_cell[nonzero], self.last_cell[nonzero], seconds[nonzero]
        total = self._accumulate(
            first_cell, seconds * self.first_share[nonzero], last_cell, seconds * self.last_share[nonzero]
        )
        multi_cell = np.flatnonzero(last_cell > first_cell + 1)
        if len(multi_cell):
            inner_seconds = seconds[multi_cell] * self.inner_share[nonzero[multi_cell]]
            changes = self._accumulate(first_cell[multi_cell] + 1, inner_seconds, last_cell[multi_cell], -inner_seconds)
            total += np.cumsum(changes, axis=1, out=changes)
        return total

    def _accumulate(
        self, cell: IntArray, seconds: FloatArray, second_cell: IntArray, second_seconds: FloatArray
    ) -> FloatArray:
        """Sum of two columns of seconds by cell: [classes, bins]."""
        cells, size = np.concatenate((cell, second_cell)), self.shape[0] * self.shape[1]
        sums: FloatArray = np.bincount(cells, np.concatenate((seconds, second_seconds)), minlength=size).astype(
            np.float64, copy=False
        )
        return sums.reshape(self.shape)
