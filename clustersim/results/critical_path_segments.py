"""Sections of the critical path on single ranks, and its time categories by pipeline rank.

A section is a run of consecutive path events on one rank, with the time between them; sections follow each
other without a gap from 0 to the makespan. What links two sections is what the later one's rank waited for.
Seconds of events are distributed over time categories as in the time breakdown, each run of a segment
separately, so categories sum to the makespan.
"""

from dataclasses import dataclass
from enum import Enum
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from clustersim.common.arrays import FloatArray, IntArray
from clustersim.common.units import Seconds
from clustersim.program.action import ActionKind
from clustersim.program.task import CollectiveTask, ComputeTask, ReceiveTask, SendTask, Task
from clustersim.results.critical_path import PathTimes, path_category_seconds
from clustersim.results.time_breakdown import segment_category_seconds
from clustersim.results.time_categories import TimeCategory
from clustersim.results.trace_table import SegmentRunTotals, SegmentTimingLookup, TraceTable, contention_by_category

_NumberT = TypeVar("_NumberT", np.int64, np.float64)
TimeRuns = tuple[IntArray, FloatArray, FloatArray]
"""Run-length encoded values in order of time: value, start and end of each run in seconds."""


class PathLink(Enum):
    """How the path reached a section."""

    BEGINNING = "beginning"
    MESSAGE = "message"  # the rank waited for a p2p message
    GROUP = "group"  # the rank waited for the last member of a collective
    SEGMENT = "block"  # the ranks synchronized inside a segment


@dataclass(frozen=True, slots=True)
class MicrobatchRange:
    """Actions of one kind in a section: lowest and highest microbatch, counted through all steps."""

    kind: ActionKind
    first_microbatch: int
    last_microbatch: int


@dataclass(frozen=True, slots=True)
class PathSection:
    """A section of the critical path: rank, start and end in seconds, how the path reached it, what the rank did.

    program_index: the rank's program; passes: by kind of action; other_names: names of its other segments and
    of collectives; both in order of time, and only with nonzero duration.
    """

    rank: int
    program_index: int
    start: Seconds
    end: Seconds
    link: PathLink
    passes: tuple[MicrobatchRange, ...]
    other_names: tuple[str, ...]

    @property
    def seconds(self) -> Seconds:
        """Duration."""
        return self.end - self.start


@dataclass(frozen=True, slots=True, eq=False)
class PathIntervals:
    """The path split where its rank or the dominant category of an event changes, in columns of one length.

    program_index: program of the rank; category: category index.
    """

    rank: IntArray
    program_index: IntArray
    category: IntArray
    start: FloatArray
    end: FloatArray

    def categories_over_time(self, bin_count: int) -> TimeRuns:
        """The dominant category of each of `bin_count` equal time bins."""
        present, durations = np.unique(self.category), self.end - self.start
        edges = np.linspace(0.0, float(self.end.max(initial=0.0)), bin_count + 1)
        knots = np.append(0.0, self.end)
        spent = [np.append(0.0, np.cumsum(np.where(self.category == category, durations, 0.0))) for category in present]
        dominant = present[np.array([np.diff(np.interp(edges, knots, array)) for array in spent]).argmax(axis=0)]
        return _run_length_encode(dominant, edges)

    def programs_over_time(self, max_runs: int) -> TimeRuns:
        """The program of each interval; beyond `max_runs` intervals, sampled at the centres of equal bins."""
        if len(self.program_index) <= max_runs:
            return _run_length_encode(self.program_index, np.append(self.start, self.end[-1:]))
        edges = np.linspace(0.0, float(self.end[-1]), max_runs + 1)
        sampled = np.minimum(np.searchsorted(self.end, (edges[1:] + edges[:-1]) / 2), len(self.program_index) - 1)
        return _run_length_encode(self.program_index[sampled], edges)


@dataclass(frozen=True, slots=True, eq=False)
class CriticalPathSections:
    """The critical path of all steps.

    category_seconds: [programs, categories] its seconds by the program of the rank that it was on.
    """

    sections: tuple[PathSection, ...]
    category_seconds: FloatArray
    intervals: PathIntervals

    @property
    def seconds(self) -> Seconds:
        """Length of the full path, which is the makespan."""
        return float(self.intervals.end.max(initial=0.0))


def split_critical_path(
    table: TraceTable, path_events: IntArray, segment_timing: SegmentTimingLookup
) -> CriticalPathSections:
    """Split the critical path into sections. path_events: trace events, first to last, as from `find_critical_path`."""
    path_times = PathTimes.from_events(table.trace, path_events)
    bounds = np.flatnonzero(np.diff(table.trace.rank[path_events], prepend=-1)).tolist()
    sections = tuple(
        _build_section(table, path_times, events) for events in map(slice, bounds, [*bounds[1:], len(path_events)])
    )
    return CriticalPathSections(
        sections,
        path_category_seconds(table, path_times, segment_timing),
        _path_intervals(table, path_times, segment_timing),
    )


def _dominant_categories(table: TraceTable, events: IntArray, segment_timing: SegmentTimingLookup) -> IntArray:
    """Index of the category with the largest share of each event."""
    trace, category = table.trace, table.tasks.category[table.entries_of(events)].copy()
    segment_positions = np.flatnonzero(category < 0)
    segment_events = events[segment_positions]
    durations = trace.end[segment_events] - trace.start[segment_events]
    exposed_delay, hidden_delay = contention_by_category(
        table, segment_events, np.arange(len(segment_events)), len(segment_events)
    )
    totals = SegmentRunTotals(
        rank_class=table.classes_of(segment_events),
        segment=table.segment_index[segment_events],
        counted_seconds=durations,
        full_seconds=durations,
        waited=trace.waited[segment_events],
        slowed=trace.slowed[segment_events],
        exposed_delay=exposed_delay,
        hidden_delay=hidden_delay,
        run_count=np.ones(len(segment_events), dtype=np.int64),
    )
    category[segment_positions] = segment_category_seconds(table, totals, segment_timing).argmax(axis=1)
    return category


def _path_intervals(table: TraceTable, path_times: PathTimes, segment_timing: SegmentTimingLookup) -> PathIntervals:
    """Events, and the waits before them, merged while rank and category stay the same."""
    wait_category = np.full(len(path_times.events), TimeCategory.WAIT.index)
    start, end = _alternate(path_times.previous_end, path_times.begin), _alternate(path_times.begin, path_times.end)
    category, rank = (
        _alternate(wait_category, _dominant_categories(table, path_times.events, segment_timing)),
        np.repeat(table.trace.rank[path_times.events], 2),
    )
    is_positive = end > start
    start, end, category, rank = start[is_positive], end[is_positive], category[is_positive], rank[is_positive]
    first_index = np.flatnonzero((np.diff(rank, prepend=-1) != 0) | (np.diff(category, prepend=-1) != 0))
    last_index = np.append(first_index[1:], len(rank))[: len(first_index)] - 1
    return PathIntervals(
        rank[first_index],
        table.program.program_index[rank[first_index]],
        category[first_index],
        start[first_index],
        end[last_index],
    )


def _run_length_encode(values: IntArray, edges: FloatArray) -> TimeRuns:
    """Values between edges, with equal neighbours merged."""
    first_index = np.flatnonzero(np.diff(values, prepend=-1))
    return values[first_index], edges[first_index], np.append(edges[first_index[1:]], edges[-1:])


def _alternate(left: NDArray[_NumberT], right: NDArray[_NumberT]) -> NDArray[_NumberT]:
    """The elements of two arrays in alternation."""
    return np.stack((left, right), axis=1).ravel()


def _path_link(table: TraceTable, path_events: IntArray, index: int) -> PathLink:
    """How the path reached the event at an index from the previous one."""
    if index == 0:
        return PathLink.BEGINNING
    task = _event_task(table, path_events[index])
    if isinstance(task, ReceiveTask | SendTask):
        return PathLink.MESSAGE
    return (
        PathLink.SEGMENT
        if isinstance(task, ComputeTask) and table.trace.blocking_event[path_events[index]] == path_events[index - 1]
        else PathLink.GROUP
    )


def _build_section(table: TraceTable, path_times: PathTimes, selection: slice) -> PathSection:
    passes: dict[ActionKind, MicrobatchRange] = {}
    other_names: dict[str, None] = {}
    for event in path_times.events[selection][(path_times.end > path_times.previous_end)[selection]].tolist():
        task = _event_task(table, event)
        if isinstance(task, CollectiveTask):
            other_names[task.comm_op.name] = None
        elif not isinstance(task, ComputeTask):
            continue
        elif task.action is None:
            other_names[task.segment.name] = None
        else:
            kind, microbatch = task.action.kind, task.action.microbatch
            previous = passes.get(kind, MicrobatchRange(kind, microbatch, microbatch))
            passes[kind] = MicrobatchRange(
                kind, min(previous.first_microbatch, microbatch), max(previous.last_microbatch, microbatch)
            )
    rank, link = (
        int(table.trace.rank[path_times.events[selection.start]]),
        _path_link(table, path_times.events, selection.start),
    )
    start, end = float(path_times.previous_end[selection.start]), float(path_times.end[selection][-1])
    return PathSection(
        rank, int(table.program.program_index[rank]), start, end, link, tuple(passes.values()), tuple(other_names)
    )


def _event_task(table: TraceTable, event: int) -> Task:
    trace, program = table.trace, table.program
    return program.programs[int(program.program_index[trace.rank[event]])].tasks[int(trace.task[event])]
