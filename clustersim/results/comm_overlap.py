"""How much communication hides behind computation? For every class of ranks and mesh axis.

An axis *moves data* while one of the rank's collectives or messages of it is under way, from its start (the last member
has come, the message can move) to its end; two at once count once. Waiting for a late member is not moving. Every
second in which it moves is one of

    hidden    beside a running block of the rank, or, inside one, beside the kernel of the same operation
    exposed   the compute stream waits for it: the breakdown's exposed part of the axis, to the second
    beside    the compute stream stands still for another reason (a bubble, another axis, the other direction of a
              pipeline), so it costs nothing, and nothing hides it

Where ranks stand still for nothing else, exposed is simply what does not hide. *Alone* is the time in blocks in which
nothing of the axis moves; other axes may, and members may be waited for.
What hides inside blocks is what their costs say (jitter makes kernels differ, not what moves) and what sharing links
adds.
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

_EXPOSED_INDICES: Final = [part.index for part in EXPOSED_CATEGORIES.values()]
_FIRST_EXPOSED: Final = _EXPOSED_INDICES[0]


@dataclass(frozen=True, slots=True, eq=False)
class AxisOverlap:
    """Seconds of one step (of several: the mean), by row, a class or a stage, and axis of `COMM_AXES`: [rows, axes] each.

    step: seconds of the step.
    """

    no_overlap: FloatArray
    hidden: FloatArray
    exposed: FloatArray
    during_idle: FloatArray
    step_time: Seconds

    @property
    def transfer_time(self) -> FloatArray:
        """How long each axis moves data."""
        return self.hidden + self.exposed + self.during_idle

    def group_mean(self, group: IntArray, weights: IntArray) -> "AxisOverlap":
        """Means of rows put together. row: [rows] to which each goes; weights: [rows] how many ranks each is."""
        total_weight = np.bincount(group, weights)[:, None]

        def weighted_mean(seconds: FloatArray) -> FloatArray:
            mean: FloatArray = np.zeros((len(total_weight), len(COMM_AXES)))
            np.add.at(mean, group, seconds * weights[:, None])
            return mean / total_weight

        return AxisOverlap(
            no_overlap=weighted_mean(self.no_overlap), hidden=weighted_mean(self.hidden), exposed=weighted_mean(self.exposed),
            during_idle=weighted_mean(self.during_idle), step_time=self.step_time,
        )  # fmt: skip


def compute_overlap(table: TraceTable, segment_timing: SegmentTimingLookup, breakdown: TimeBreakdown) -> AxisOverlap:
    """How communication meets computation on every class. parts: the same step's breakdown."""
    trace, table_shape = table.trace, (len(table.ranks), len(COMM_AXES))
    transfers = _stream_transfers(table).merge_overlapping()
    segment_events = np.flatnonzero(table.segment_index >= 0)
    busy = Intervals(table.rank_class[segment_events], trace.start[segment_events], trace.end[segment_events])
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
    """What moves outside blocks; keys are class and axis."""
    events = np.flatnonzero(table.comm_op_index >= 0)
    axis = table.tasks.category[table.entry[events]] - _FIRST_EXPOSED
    return Intervals(
        table.rank_class[events] * len(COMM_AXES) + axis, table.trace.start[events], table.trace.end[events]
    )


def _concurrent_seconds(transfers: Intervals, busy: Intervals, class_count: int) -> FloatArray:
    """How long moves are beside running blocks: [classes, axes]. moves: by class and axis; busy: by class."""
    by_class = Intervals(transfers.key // len(COMM_AXES), transfers.start, transfers.end)
    transfer_index, _, common_time = intersect(by_class, busy.sort_by_key())
    concurrent = Intervals(transfers.key[transfer_index], common_time.start, common_time.end)
    return concurrent.total_seconds(class_count * len(COMM_AXES)).reshape(class_count, len(COMM_AXES))


def _segment_seconds(
    table: TraceTable, totals: SegmentRunTotals, segment_timing: SegmentTimingLookup
) -> tuple[FloatArray, FloatArray]:
    """Exposed and hidden seconds of the exchanges inside blocks: [classes, axes] each."""
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
    """Seconds in which a block's exchanges move behind the kernels beside them: [axes]."""
    seconds, kernels = np.zeros(len(COMM_AXES)), timing.kernel_seconds
    for index, overlap in timing.overlaps.items():
        comm_group = overlap.overlap.comm_op.comm_group
        comm_seconds = overlap.comm_duration(float(kernels[index]), overlap.comm_seconds)
        seconds[CATEGORY_BY_COMM_GROUP[comm_group].index - _FIRST_EXPOSED] += comm_seconds - timing.exposed_comm[index]
    return seconds
