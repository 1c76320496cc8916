"""Trace table: a trace joined with the program that produced it.

Events refer to a rank and a task; here they are joined with the program, column by column, so that later
aggregations are sums over arrays. The ranks of one symmetry class share the events of the rank that was
simulated for them.

A trace may have millions of events. So what follows from an event's rank and task is looked up for some events at a
time, and sums over all of them are made class by class (`class_blocks`) or range by range (`event_ranges`).
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from math import inf
from typing import Final

import numpy as np

from clustersim.common.arrays import BoolArray, FloatArray, IntArray
from clustersim.common.interning import Interner
from clustersim.common.units import Seconds
from clustersim.cost.segment import SegmentTiming
from clustersim.program.action import ActionKind
from clustersim.program.program import PASS_KINDS, Program, TaskBody
from clustersim.program.task import CommOp, Segment
from clustersim.results.time_categories import (
    CATEGORY_BY_COMM_GROUP,
    CATEGORY_INDEX,
    PIPELINE_GROUPS,
    STAGE_CROSSING_GROUPS,
)
from clustersim.trace.trace import Trace

SegmentTimingLookup = Callable[[int, Segment], SegmentTiming]
"""(rank, segment) -> timing of the segment on that rank."""

TimeWindow = tuple[Seconds, Seconds]
"""(begin, end) in seconds."""
FULL_RUN: Final[TimeWindow] = (0.0, inf)

BLOCK_EVENTS: Final = 2**20
"""Events of a trace that are analysed at a time: analysis takes some 200 bytes for each of them."""
_FORWARD_KINDS: Final = [PASS_KINDS.index(ActionKind.FORWARD)]
_BACKWARD_KINDS: Final = [PASS_KINDS.index(kind) for kind in (ActionKind.BACKWARD, ActionKind.INPUT_GRADIENT)]


@dataclass(frozen=True, slots=True, eq=False)
class TaskColumns:
    """Attributes of every task of every program, in columns: one entry per task, programs concatenated.

    segment, comm_op: index into `TraceTable.segments`, `TraceTable.comm_ops`, -1 where it is the other;
    category: index of the exposed category of the comm op, -1 for segments; crosses_stages: its group spans
    pipeline stages; is_forward, is_backward: kind of the computed action; step: index of the step that it
    belongs to.
    """

    segment: IntArray
    comm_op: IntArray
    category: IntArray
    crosses_stages: BoolArray
    is_forward: BoolArray
    is_backward: BoolArray
    step: IntArray


@dataclass(frozen=True, slots=True, eq=False)
class TraceTable:
    """A trace with the program that it ran.

    step_count: number of steps of the program; makespan: seconds until the last event of all classes has ended, also
    of those that are not in this table; ranks: [classes] the simulated ranks; weights: [classes] number of ranks that
    each stands for; class_of_rank: [ranks] index into these, arbitrary where a rank has no events; task_offset: [ranks]
    entry of its first task in `tasks`.
    """

    trace: Trace
    program: Program
    step_count: int
    makespan: Seconds
    ranks: IntArray
    weights: IntArray
    class_of_rank: IntArray
    task_offset: IntArray
    tasks: TaskColumns
    segments: tuple[Segment, ...]
    comm_ops: tuple[CommOp, ...]

    def classes_of(self, events: IntArray | slice) -> IntArray:
        """Symmetry classes of some events."""
        classes: IntArray = self.class_of_rank[self.trace.rank[events]]
        return classes

    def entries_of(self, events: IntArray | slice) -> IntArray:
        """Indices into `tasks` of some events."""
        entries: IntArray = self.task_offset[self.trace.rank[events]] + self.trace.task[events]
        return entries

    @property
    def segment_index(self) -> IntArray:
        """[events] index into `segments`, or -1."""
        return self.tasks.segment[self.entries_of(slice(None))]

    @property
    def segment_run_counts(self) -> list[float]:
        """[segments] number of runs of each segment on all ranks."""
        counts = np.zeros(len(self.segments))
        for events in event_ranges(self.trace):
            segment = self.tasks.segment[self.entries_of(events)]
            weights = self.weights[self.classes_of(events)][segment >= 0]
            counts += np.bincount(segment[segment >= 0], weights=weights, minlength=len(self.segments))
        run_counts: list[float] = counts.tolist()
        return run_counts

    @property
    def comm_op_index(self) -> IntArray:
        """[events] index into `comm_ops`, or -1."""
        return self.tasks.comm_op[self.entries_of(slice(None))]


@dataclass(frozen=True, slots=True, eq=False)
class SegmentRunTotals:
    """Totals over all runs of one segment on one class: [pairs] each.

    counted_seconds: seconds that count; full_seconds: from start to end, of which waited, slowed: as in the
    trace; exposed_delay, hidden_delay: [pairs, categories] seconds that link sharing added to communication;
    run_count: number of runs.
    """

    rank_class: IntArray
    segment: IntArray
    counted_seconds: FloatArray
    full_seconds: FloatArray
    waited: FloatArray
    slowed: FloatArray
    exposed_delay: FloatArray
    hidden_delay: FloatArray
    run_count: IntArray


def event_ranges(trace: Trace) -> Iterator[slice]:
    """All events, `BLOCK_EVENTS` at a time."""
    return (slice(begin, begin + BLOCK_EVENTS) for begin in range(0, len(trace), BLOCK_EVENTS))


def has_pipeline(program: Program) -> bool:
    """Whether the program has a pipeline."""
    return any(comm_group in program.groups for comm_group in PIPELINE_GROUPS)


def build_trace_table(trace: Trace, program: Program, step_count: int = 1) -> TraceTable:
    """Join a trace with the program of `step_count` equal steps that it ran."""
    ranks, weights = np.unique(trace.representative, return_counts=True)
    class_of_rank = np.full(program.world_size, -1, dtype=np.int64)
    class_of_rank[ranks] = np.arange(len(ranks))
    task_offset = np.cumsum([0, *(len(rank_program.tasks) for rank_program in program.programs)])[program.program_index]
    bodies = Interner(body for rank_program in program.programs for body in rank_program.task_bodies)
    return TraceTable(
        trace=trace,
        program=program,
        step_count=step_count,
        makespan=trace.makespan,
        ranks=ranks,
        weights=weights,
        class_of_rank=class_of_rank,
        task_offset=task_offset,
        tasks=_task_columns(program, step_count, bodies),
        segments=tuple(body for body in bodies.values if isinstance(body, Segment)),
        comm_ops=tuple(body for body in bodies.values if isinstance(body, CommOp)),
    )


def _task_columns(program: Program, step_count: int, bodies: Interner[TaskBody]) -> TaskColumns:
    """Columns of the tasks; bodies: those of all programs."""
    crossing_groups = STAGE_CROSSING_GROUPS if has_pipeline(program) else frozenset()
    columns, counts = [], [0, 0]
    for body in bodies.values:
        if isinstance(body, Segment):
            columns.append((counts[0], -1, -1, 0))
        else:
            group = body.comm_group
            columns.append((-1, counts[1], CATEGORY_BY_COMM_GROUP[group].index, int(group in crossing_groups)))
        counts[isinstance(body, CommOp)] += 1
    body_indices = [
        np.array([*map(bodies.index_of, rank_program.task_bodies)], dtype=np.int64)[rank_program.body_index]
        for rank_program in program.programs
    ]
    segment, comm_op, category, crosses_stages = (
        np.array(columns, dtype=np.int64).reshape(-1, 4)[np.concatenate(body_indices)].T
    )
    pass_kinds = np.concatenate([rank_program.pass_kinds for rank_program in program.programs])
    return TaskColumns(
        segment=np.ascontiguousarray(segment),
        comm_op=np.ascontiguousarray(comm_op),
        category=np.ascontiguousarray(category),
        crosses_stages=crosses_stages > 0,
        is_forward=np.isin(pass_kinds, _FORWARD_KINDS),
        is_backward=np.isin(pass_kinds, _BACKWARD_KINDS),
        step=np.concatenate([rank_program.step_indices(step_count) for rank_program in program.programs]),
    )


def sum_segment_runs(table: TraceTable, events: IntArray, seconds: FloatArray) -> SegmentRunTotals:
    """Totals of the given events that run segments, by (class, segment).

    seconds: [events] how long each of them counts.
    """
    trace = table.trace
    segment = table.tasks.segment[table.entries_of(events)]
    events, seconds, segment = events[segment >= 0], seconds[segment >= 0], segment[segment >= 0]
    segment_count = max(1, len(table.segments))
    keys = table.classes_of(events) * segment_count + segment
    run_count = np.bincount(keys, minlength=len(table.ranks) * segment_count)
    pairs = np.flatnonzero(run_count)
    exposed, hidden = contention_by_category(table, events, np.searchsorted(pairs, keys), len(pairs))

    def sum_by_pair(values: FloatArray) -> FloatArray:
        """Sums by pair."""
        return np.bincount(keys, values, minlength=len(run_count))[pairs].astype(np.float64, copy=False)

    return SegmentRunTotals(
        rank_class=pairs // segment_count,
        segment=pairs % segment_count,
        run_count=run_count[pairs],
        counted_seconds=sum_by_pair(seconds),
        full_seconds=sum_by_pair(trace.end[events] - trace.start[events]),
        waited=sum_by_pair(trace.waited[events]),
        slowed=sum_by_pair(trace.slowed[events]),
        exposed_delay=exposed,
        hidden_delay=hidden,
    )


def contention_by_category(
    table: TraceTable, events: IntArray, pair_index: IntArray, pair_count: int
) -> tuple[FloatArray, FloatArray]:
    """Seconds that link sharing added to exposed, and to hidden, communication: [pairs, categories] each.

    events: runs of segments; pair_index: (class, segment) pair that each of them belongs to.
    """
    contention = table.trace.contention
    event_position, entry = contention.lookup(events)
    if not len(entry):
        zeros = np.broadcast_to(0.0, (pair_count, len(CATEGORY_INDEX)))
        return zeros, zeros
    exposed, hidden = np.zeros((2, pair_count, len(CATEGORY_INDEX)))
    target = (
        pair_index[event_position],
        _operation_categories(table, events[event_position], contention.operation[entry]),
    )
    np.add.at(exposed, target, contention.exposed_delay[entry])
    np.add.at(hidden, target, contention.transfer_delay[entry] - contention.exposed_delay[entry])
    return exposed, hidden


def _operation_categories(table: TraceTable, events: IntArray, operation: IntArray) -> IntArray:
    """Category index of the communication of operations, each inside the segment of an event: [n]."""
    operation_count = int(operation.max()) + 1
    keys, key_index = np.unique(
        table.tasks.segment[table.entries_of(events)] * operation_count + operation, return_inverse=True
    )
    comm_ops = [
        table.segments[key // operation_count].operations[key % operation_count].comm_op for key in keys.tolist()
    ]
    categories = np.array(
        [CATEGORY_BY_COMM_GROUP[comm_op.comm_group].index for comm_op in comm_ops if comm_op is not None]
    )
    operation_category: IntArray = categories[key_index.reshape(-1)]
    return operation_category


def timing_run_counts(
    table: TraceTable, totals: SegmentRunTotals, segment_timing: SegmentTimingLookup
) -> Iterator[tuple[Segment, SegmentTiming, float]]:
    """Every distinct (segment, timing) combination among the totals, and how often all ranks run it."""
    distinct, timing_index = distinct_timings(table, totals, segment_timing)
    run_counts = np.bincount(timing_index, totals.run_count * table.weights[totals.rank_class], minlength=len(distinct))
    for (segment, timing), count in zip(distinct, run_counts.tolist(), strict=True):
        yield segment, timing, count


def distinct_timings(
    table: TraceTable, totals: SegmentRunTotals, segment_timing: SegmentTimingLookup
) -> tuple[list[tuple[Segment, SegmentTiming]], IntArray]:
    """Distinct (segment, timing) combinations among the totals, and the index of each pair's: [pairs]."""
    index_by_key: dict[tuple[Segment, SegmentTiming], int] = {}
    timing_index = np.empty(len(totals.rank_class), dtype=np.int64)
    ranks = table.ranks[totals.rank_class].tolist()
    for pair_index, (rank, segment) in enumerate(zip(ranks, totals.segment.tolist(), strict=True)):
        key = table.segments[segment], segment_timing(rank, table.segments[segment])
        timing_index[pair_index] = index_by_key.setdefault(key, len(index_by_key))
    return [*index_by_key], timing_index
