"""Time breakdown: where does every second of a rank's step go?

Every instant from 0 to the makespan is assigned exactly one time category on every rank, by what its
compute stream does. While it runs a segment, the segment's operations decide: kernels by work type,
communication that no kernel hides by its axis. The time by which concurrent communication slows kernels is
a category of its own, and waiting for other ranks inside a segment is wait; delays of exposed communication
by link sharing count as exposed. While a collective runs on the compute stream itself, it is exposed; while
the stream is idle, `idle_time` decides. So the categories of a rank sum to the makespan (with several
steps: to the mean step time). Communication on other streams during a running segment is hidden and has no
category, except for the slowdown that it causes.
"""

from dataclasses import dataclass

import numpy as np

from clustersim.common.arrays import FloatArray, IntArray
from clustersim.common.units import Seconds
from clustersim.results.class_blocks import class_blocks
from clustersim.results.idle_time import ComputeEvents, build_compute_events, idle_seconds
from clustersim.results.time_categories import TIME_CATEGORIES, SegmentCategories, TimeCategory
from clustersim.results.trace_table import (
    FULL_RUN,
    SegmentRunTotals,
    SegmentTimingLookup,
    TimeWindow,
    TraceTable,
    distinct_timings,
    sum_segment_runs,
)
from clustersim.trace.trace import Trace


@dataclass(frozen=True, slots=True)
class TimeBreakdown:
    """Seconds per symmetry class of ranks and time category.

    ranks: [classes] the simulated ranks; seconds: [classes, categories]; weights: [classes] number of ranks
    that each represents; representative: [ranks] the simulated rank that stands for each rank.
    """

    ranks: IntArray
    seconds: FloatArray
    weights: IntArray
    representative: IntArray

    def rank_seconds(self, rank: int) -> dict[str, Seconds]:
        """Seconds of every category on one rank, by category name; they sum to the step time."""
        return _by_category_name(self.seconds[np.searchsorted(self.ranks, self.representative[rank])])

    def mean_seconds(self) -> dict[str, Seconds]:
        """Seconds of every category, averaged over all ranks; they sum to the step time."""
        return _by_category_name(self._mean_array())

    def category_total(self, *categories: TimeCategory) -> Seconds:
        """Total seconds of some categories, averaged over all ranks."""
        return float(self._mean_array()[[category.index for category in categories]].sum())

    @property
    def launch_share(self) -> float:
        """Share of the step in which GPUs wait for kernel launches."""
        step_time = sum(self.mean_seconds().values())
        return self.category_total(TimeCategory.LAUNCH) / step_time if step_time > 0 else 0.0

    def _mean_array(self) -> FloatArray:
        mean: FloatArray = self.weights @ self.seconds / self.weights.sum()
        return mean


def compute_breakdown(
    table: TraceTable, segment_timing: SegmentTimingLookup, window: TimeWindow = FULL_RUN
) -> TimeBreakdown:
    """Aggregate a trace into seconds per class and category of one step, averaged over steps.

    segment_timing(rank, segment): timing of the segment on that rank; window: the time range of the trace that
    counts.
    """
    seconds = np.concatenate([_class_seconds(block, segment_timing, window) for block in class_blocks(table)])
    return TimeBreakdown(table.ranks, seconds / table.step_count, table.weights, table.trace.representative)


def _class_seconds(table: TraceTable, segment_timing: SegmentTimingLookup, window: TimeWindow) -> FloatArray:
    """Seconds of all steps: [classes, categories]."""
    trace, (begin, end) = table.trace, window
    compute_events = build_compute_events(trace, table)
    seconds = idle_seconds(trace, table, compute_events, window)
    is_counted = table.segment_index >= 0
    is_counted &= trace.start <= end
    is_counted &= trace.end >= begin
    events = np.flatnonzero(is_counted)
    runs = sum_segment_runs(table, events, np.clip(trace.end[events], *window) - np.clip(trace.start[events], *window))
    np.add.at(seconds, runs.rank_class, segment_category_seconds(table, runs, segment_timing))
    _add_collectives(seconds, trace, table, compute_events, window)
    return seconds


def segment_category_seconds(
    table: TraceTable, totals: SegmentRunTotals, segment_timing: SegmentTimingLookup
) -> FloatArray:
    """Category seconds of every (class, segment) pair: [pairs, categories]; rows sum to the pair's seconds.

    What neither exposed communication nor waiting nor slowdown explains is kernel time; because of jitter it
    differs from the timings, so it is distributed over categories in their proportion. Runs that count
    partially do so uniformly.
    """
    distinct, timing_index = distinct_timings(table, totals, segment_timing)
    categories_by_segment = {segment: SegmentCategories.from_segment(segment) for segment in table.segments}
    timing_seconds = [
        (categories_by_segment[segment].kernel_seconds(timing), categories_by_segment[segment].exposed_seconds(timing))
        for segment, timing in distinct
    ]
    kernel_weights, exposed = np.array(timing_seconds).reshape(-1, 2, len(TIME_CATEGORIES))[timing_index].swapaxes(0, 1)
    exposed = exposed * totals.run_count[:, None]
    explained = totals.waited + totals.slowed + totals.exposed_delay.sum(axis=1)
    kernel_time = np.maximum(totals.full_seconds - explained - exposed.sum(axis=1), 0.0)
    seconds = exposed + totals.exposed_delay + _distribute(kernel_time, kernel_weights)
    seconds[:, TimeCategory.WAIT.index] += totals.waited
    seconds[:, TimeCategory.SLOWED.index] += totals.slowed
    return _distribute(totals.counted_seconds, seconds)


def _distribute(seconds: FloatArray, weights: FloatArray) -> FloatArray:
    """Distribute seconds [pairs] in proportion to weights [pairs, categories]; without any weight they are wait."""
    total = weights.sum(axis=1)
    ratio = np.divide(weights, total[:, None], out=np.zeros_like(weights), where=total[:, None] > 0)
    ratio[total <= 0, TimeCategory.WAIT.index] = 1.0
    distributed: FloatArray = ratio * seconds[:, None]
    return distributed


def _add_collectives(
    seconds: FloatArray, trace: Trace, table: TraceTable, compute_events: ComputeEvents, window: TimeWindow
) -> None:
    entry = table.entries_of(compute_events.events)
    is_comm = table.tasks.comm_op[entry] >= 0
    events = compute_events.events[is_comm]
    durations = np.clip(trace.end[events], *window) - np.clip(compute_events.start[is_comm], *window)
    np.add.at(seconds, (table.classes_of(events), table.tasks.category[entry[is_comm]]), durations)


def _by_category_name(seconds: FloatArray) -> dict[str, Seconds]:
    return {category.value: float(value) for category, value in zip(TIME_CATEGORIES, seconds, strict=True)}
