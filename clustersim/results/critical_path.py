"""Critical path: which chain of tasks determines the step time?

Every event names the event whose end allowed its start (`critical_predecessor`). Following predecessors
back from the event that ends last gives a chain in which each event starts when the previous one ends;
where it does not, the time in between is an explicit wait. Where a rank waited inside a segment for another
rank, the chain continues with that rank's run of the segment (`blocking_event`) instead of the rank's own
predecessor. Shortening a task off the chain cannot shorten the step; shortening one on it may, until
another chain becomes critical.
"""

from dataclasses import dataclass
from typing import Self

import numpy as np

from clustersim.common.arrays import FloatArray, IntArray
from clustersim.common.units import Seconds
from clustersim.results.time_breakdown import segment_category_seconds
from clustersim.results.time_categories import TIME_CATEGORIES, TimeCategory
from clustersim.results.trace_table import SegmentTimingLookup, TraceTable, sum_segment_runs
from clustersim.trace.trace import Trace


def find_critical_path(trace: Trace) -> IntArray:
    """Events of the chain that ends last, from first to last. Of events that end equally late, the first one counts."""
    if len(trace) == 0:
        return np.empty(0, dtype=np.int64)
    path_events = [int(trace.end.argmax())]
    while len(path_events) < 2 * len(trace):
        blocking_event = int(trace.blocking_event[path_events[-1]])
        if blocking_event != path_events[-1]:
            path_events.append(blocking_event)
        if (predecessor := int(trace.critical_predecessor[blocking_event])) < 0:
            break
        path_events.append(predecessor)
    return np.array(path_events[::-1], dtype=np.int64)


@dataclass(frozen=True, slots=True, eq=False)
class PathTimes:
    """The path's events and, for each, the end of the previous one, its own start and its own end, in seconds."""

    events: IntArray
    previous_end: FloatArray
    begin: FloatArray
    end: FloatArray

    @classmethod
    def from_events(cls, trace: Trace, events: IntArray) -> Self:
        """From events of the trace, first to last."""
        end = trace.end[events]
        is_blocking = (trace.blocking_event[events[1:]] == events[:-1]) & (events[1:] != events[:-1])
        end[:-1][is_blocking] = np.minimum(end[:-1], end[1:])[
            is_blocking
        ]  # what a blocking event does after the waiting one has ended is off the path
        end = np.maximum.accumulate(end)
        previous_end = np.concatenate(([0.0], end))[: len(events)]
        return cls(events, previous_end, np.clip(trace.start[events], previous_end, end), end)


def path_category_seconds(table: TraceTable, path_times: PathTimes, segment_timing: SegmentTimingLookup) -> FloatArray:
    """Seconds of the path by program of its rank, summing to the makespan: [programs, categories].

    Segments count by their operations, messages and collectives as exposed, time between events of the path as
    wait.
    """
    seconds = np.zeros((len(table.program.programs), len(TIME_CATEGORIES)))
    totals = sum_segment_runs(table, path_times.events, path_times.end - path_times.begin)
    np.add.at(
        seconds,
        table.program.program_index[table.ranks[totals.rank_class]],
        segment_category_seconds(table, totals, segment_timing),
    )
    program_index, category = (
        table.program.program_index[table.trace.rank[path_times.events]],
        table.tasks.category[table.entries_of(path_times.events)],
    )
    is_comm = category >= 0
    np.add.at(seconds, (program_index[is_comm], category[is_comm]), (path_times.end - path_times.begin)[is_comm])
    np.add.at(seconds[:, TimeCategory.WAIT.index], program_index, path_times.begin - path_times.previous_end)
    return seconds


def path_category_totals(table: TraceTable, segment_timing: SegmentTimingLookup) -> dict[str, Seconds]:
    """Seconds of the critical path by time category, summing to the makespan.

    With several steps they sum to the mean step time.
    """
    seconds = path_category_seconds(
        table, PathTimes.from_events(table.trace, find_critical_path(table.trace)), segment_timing
    ).sum(axis=0)
    return {
        category.value: float(value) / table.step_count
        for category, value in zip(TIME_CATEGORIES, seconds, strict=True)
    }
