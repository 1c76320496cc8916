"""Communication overlap: how much communication is hidden, for every class of ranks and mesh axis?

An axis *moves data* while one of the rank's collectives or messages of it is in flight, from its start (the
last member has arrived, the message can move) to its end; concurrent ones count once. Waiting for a late
member is not counted. Every second in which it moves data is one of

    hidden        concurrent with a running segment of the rank or, inside one, with the same
                  operation's kernel
    exposed       the compute stream waits for it: the breakdown's exposed category of the axis, to the second
    during_idle   the compute stream is idle for another reason (a bubble, another axis, the other direction of
                  a pipeline), so it costs nothing, and nothing hides it

Where ranks are idle for nothing else, exposed is simply what is not hidden. *No overlap* is the time in
segments in which no data of the axis moves; other axes may be active, and members may be waited for. Hidden
time inside segments is derived from their timings (jitter changes kernels, not transfers) plus the delays
of link sharing.
"""

from dataclasses import dataclass
from typing import Final

import numpy as np

from clustersim.common.arrays import FloatArray, IntArray
from clustersim.common.units import Seconds
from clustersim.cost.segment import SegmentTiming
from clustersim.parallel.mesh import COMM_AXES
from clustersim.results.intervals import Intervals, intersect
from clustersim.results.time_breakdown import TimeBreakdown, segment_category_seconds
from clustersim.results.time_categories import CATEGORY_BY_COMM_GROUP, EXPOSED_CATEGORIES
from clustersim.results.trace_table import (
    SegmentRunTotals,
    SegmentTimingLookup,
    TraceTable,
    distinct_timings,
    sum_segment_runs,
)

_EXPOSED_INDICES: Final = [category.index for category in EXPOSED_CATEGORIES.values()]
_FIRST_EXPOSED: Final = _EXPOSED_INDICES[0]


@dataclass(frozen=True, slots=True, eq=False)
class AxisOverlap:
    """Seconds of one step (with several: the mean), by class or stage and by axis of `COMM_AXES`: [rows, axes] each.

    step_time: seconds of the step.
    """

    no_overlap: FloatArray
    hidden: FloatArray
    exposed: FloatArray
    during_idle: FloatArray
    step_time: Seconds

    @property
    def transfer_time(self) -> FloatArray:
        """Seconds in which each axis moves data."""
        return self.hidden + self.exposed + self.during_idle

    def group_mean(self, group: IntArray, weights: IntArray) -> "AxisOverlap":
        """Weighted means over groups of rows. group: [rows] group of each; weights: [rows] number of ranks of each."""
        total_weight = np.bincount(group, weights)[:, None]

        def weighted_mean(seconds: FloatArray) -> FloatArray:
            mean: FloatArray = np.zeros((len(total_weight), len(COMM_AXES)))
            np.add.at(mean, group, seconds * weights[:, None])
            return mean / total_weight

        return AxisOverlap(
            no_overlap=weighted_mean(self.no_overlap),
            hidden=weighted_mean(self.hidden),
            exposed=weighted_mean(self.exposed),
            during_idle=weighted_mean(self.during_idle),
            step_time=self.step_time,
        )


def compute_overlap(table: TraceTable, segment_timing: SegmentTimingLookup, breakdown: TimeBreakdown) -> AxisOverlap:
    """How communication overlaps computation on every class. breakdown: of the same step."""
    trace, table_shape = table.trace, (len(table.ranks), len(COMM_AXES))
    transfers = _stream_transfers(table).merge_overlapping()
    segment_events = np.flatnonzero(table.segment_index >= 0)
    busy = Intervals(table.classes_of(segment_events), trace.start[segment_events], trace.end[segment_events])
    totals = sum_segment_runs(table, segment_events, busy.seconds)
    segment_exposed, segment_hidden = _segment_seconds(table, totals, segment_timing)
    concurrent = _concurrent_seconds(transfers, busy, len(table.ranks))
    exposed = breakdown.seconds[:, _EXPOSED_INDICES] * table.step_count
    hidden = concurrent + segment_hidden
    stream_seconds = transfers.total_seconds(table_shape[0] * table_shape[1]).reshape(table_shape)
    return AxisOverlap(
        no_overlap=(busy.total_seconds(table_shape[0])[:, None] - hidden - segment_exposed) / table.step_count,
        hidden=hidden / table.step_count,
        exposed=exposed / table.step_count,
        during_idle=(stream_seconds - concurrent - (exposed - segment_exposed)) / table.step_count,
        step_time=trace.makespan / table.step_count,
    )


def _stream_transfers(table: TraceTable) -> Intervals:
    """Communication outside segments, launches by the host left out; keys combine class and axis."""
    events = np.flatnonzero(table.comm_op_index >= 0)
    axis = table.tasks.category[table.entries_of(events)] - _FIRST_EXPOSED
    events, axis = events[axis >= 0], axis[axis >= 0]
    return Intervals(
        table.classes_of(events) * len(COMM_AXES) + axis, table.trace.start[events], table.trace.end[events]
    )


def _concurrent_seconds(transfers: Intervals, busy: Intervals, class_count: int) -> FloatArray:
    """Seconds in which transfers overlap running segments: [classes, axes].

    transfers: keyed by class and axis; busy: keyed by class.
    """
    by_class = Intervals(transfers.key // len(COMM_AXES), transfers.start, transfers.end)
    transfer_index, _, common_time = intersect(by_class, busy.sort_by_key())
    concurrent = Intervals(transfers.key[transfer_index], common_time.start, common_time.end)
    return concurrent.total_seconds(class_count * len(COMM_AXES)).reshape(class_count, len(COMM_AXES))


def _segment_seconds(
    table: TraceTable, totals: SegmentRunTotals, segment_timing: SegmentTimingLookup
) -> tuple[FloatArray, FloatArray]:
    """Exposed and hidden seconds of communication inside segments: [classes, axes] each."""
    exposed, hidden = np.zeros((2, len(table.ranks), len(COMM_AXES)))
    np.add.at(exposed, totals.rank_class, segment_category_seconds(table, totals, segment_timing)[:, _EXPOSED_INDICES])
    distinct, timing_index = distinct_timings(table, totals, segment_timing)
    hidden_per_run = np.array([_hidden_seconds(timing) for _, timing in distinct]).reshape(-1, len(COMM_AXES))[
        timing_index
    ]
    np.add.at(
        hidden, totals.rank_class, hidden_per_run * totals.run_count[:, None] + totals.hidden_delay[:, _EXPOSED_INDICES]
    )
    return exposed, hidden


def _hidden_seconds(timing: SegmentTiming) -> FloatArray:
    """Seconds in which a segment's comm ops run behind the kernels that they overlap: [axes]."""
    seconds, kernels = np.zeros(len(COMM_AXES)), timing.kernel_seconds
    for index, overlap in timing.overlaps.items():
        comm_group = overlap.overlap.comm_op.comm_group
        comm_seconds = overlap.comm_duration(float(kernels[index]), overlap.comm_seconds)
        seconds[CATEGORY_BY_COMM_GROUP[comm_group].index - _FIRST_EXPOSED] += comm_seconds - timing.exposed_comm[index]
    return seconds
