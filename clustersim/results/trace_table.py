"""What does each row of a trace stand for?

Rows name a rank and a task; here they are joined with the program, column by column, so that later folds are sums over
arrays. The ranks of one class share the rows of the rank that was simulated for them.
"""

from collections.abc import Callable
from dataclasses import dataclass
from math import inf
from typing import Final

import numpy as np

from clustersim.common.arrays import BoolArray, FloatArray, IntArray
from clustersim.common.units import Seconds
from clustersim.cost.segment import SegmentTiming
from clustersim.program.action import Action, ActionKind
from clustersim.program.program import Program
from clustersim.program.task import CommOp, ComputeTask, Segment, Task
from clustersim.results.time_categories import (
    CATEGORY_BY_COMM_GROUP,
    CATEGORY_INDEX,
    PIPELINE_GROUPS,
    STAGE_CROSSING_GROUPS,
)
from clustersim.trace.trace import Trace

SegmentTimingLookup = Callable[[int, Segment], SegmentTiming]
"""Timing of a block on a rank."""

TimeWindow = tuple[Seconds, Seconds]
"""From when to when."""
FULL_RUN: Final[TimeWindow] = (0.0, inf)

_FORWARD_KINDS = frozenset({ActionKind.FORWARD})
_BACKWARD_KINDS = frozenset({ActionKind.BACKWARD, ActionKind.INPUT_GRADIENT})


@dataclass(frozen=True, slots=True, eq=False)
class TaskColumns:
    """What each task of each program is, in columns: one entry a task, programs one after the other.

    block, exchange: index into `segments`, `comm_ops`, -1 where it is the other; part: place of the exchange's
    exposed part, -1 for blocks; crosses: its group spans pipeline stages; forward, backward: computes such an action;
    step: number of the step that it belongs to.
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

    steps: how many the program has; ranks: [classes] the simulated ranks; weights: [classes] how many ranks each stands
    for; owner: [rows] class; entry: [rows] place in `tasks`. Columns over rows that follow from the entry are looked up
    when asked for, because a trace may have millions of rows.
    """

    trace: Trace
    program: Program
    step_count: int
    ranks: IntArray
    weights: IntArray
    rank_class: IntArray
    entry: IntArray
    tasks: TaskColumns
    segments: tuple[Segment, ...]
    comm_ops: tuple[CommOp, ...]

    @property
    def segment_index(self) -> IntArray:
        """[rows] index into `blocks`, or -1."""
        return self.tasks.segment[self.entry]

    @property
    def segment_run_counts(self) -> list[float]:
        """[blocks] how often all ranks together run each."""
        segment_index = self.segment_index
        is_segment = segment_index >= 0
        weights = self.weights[self.rank_class[is_segment]]
        counts: list[float] = np.bincount(
            segment_index[is_segment], weights=weights, minlength=len(self.segments)
        ).tolist()
        return counts

    @property
    def comm_op_index(self) -> IntArray:
        """[rows] index into `exchanges`, or -1."""
        return self.tasks.comm_op[self.entry]


@dataclass(frozen=True, slots=True, eq=False)
class SegmentRunTotals:
    """All runs of one block on one class, together: [pairs] each.

    seconds: counted; full: from their starts to their ends, of which waited, slowed: as in the trace; exposed, hidden:
    [pairs, parts] seconds of exchanges more than alone, because they shared links; runs: how many.
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


def has_pipeline(program: Program) -> bool:
    """Whether the program has a pipeline."""
    return any(comm_group in program.groups for comm_group in PIPELINE_GROUPS)


def build_trace_table(trace: Trace, program: Program, step_count: int = 1) -> TraceTable:
    """Join a trace with the program of some equal steps that it ran."""
    ranks, weights = np.unique(trace.representative, return_counts=True)
    indexer = _TaskIndexer({}, {}, {}, [])
    task_count = sum(len(rank_program.tasks) for rank_program in program.programs)
    task_kind = np.fromiter(
        (indexer.task_kind(task) for item in program.programs for task in item.tasks), np.int64, task_count
    )
    segment, comm_op, is_forward, is_backward = np.array(indexer.columns, dtype=np.int64).reshape(-1, 4)[task_kind].T
    comm_ops = tuple(indexer.comm_ops)
    crossing_groups = STAGE_CROSSING_GROUPS if has_pipeline(program) else frozenset()
    tasks = TaskColumns(
        segment=np.ascontiguousarray(segment), comm_op=np.ascontiguousarray(comm_op),
        is_forward=is_forward > 0, is_backward=is_backward > 0,
        category=_lookup_by_comm_op(comm_op, [CATEGORY_BY_COMM_GROUP[element.comm_group].index for element in comm_ops], -1),
        crosses_stages=_lookup_by_comm_op(comm_op, [int(entry.comm_group in crossing_groups) for entry in comm_ops], 0) > 0,
        step=np.concatenate([each.step_indices(step_count) for each in program.programs]),
    )  # fmt: skip
    class_of_rank = np.full(program.world_size, -1, dtype=np.int64)
    class_of_rank[ranks] = np.arange(len(ranks))
    program_offset = np.cumsum([0, *(len(each.tasks) for each in program.programs)])[program.program_index]
    return TraceTable(
        trace=trace, program=program, step_count=step_count, ranks=ranks, weights=weights, tasks=tasks,
        rank_class=class_of_rank[trace.rank], entry=program_offset[trace.rank] + trace.task,
        segments=tuple(indexer.segments), comm_ops=comm_ops,
    )  # fmt: skip


def sum_segment_runs(table: TraceTable, events: IntArray, seconds: FloatArray) -> SegmentRunTotals:
    """Group those of some trace rows that run blocks by class and block. seconds: how long each of them counts."""
    trace = table.trace
    segment = table.tasks.segment[table.entry[events]]
    events, seconds, segment = events[segment >= 0], seconds[segment >= 0], segment[segment >= 0]
    segment_count = max(1, len(table.segments))
    keys = table.rank_class[events] * segment_count + segment
    run_count = np.bincount(keys, minlength=len(table.ranks) * segment_count)
    pairs = np.flatnonzero(run_count)
    exposed, hidden = contention_by_category(table, events, np.searchsorted(pairs, keys), len(pairs))

    def sum_by_pair(values: FloatArray) -> FloatArray:
        """Sums by pair."""
        return np.bincount(keys, values, minlength=len(run_count))[pairs].astype(np.float64, copy=False)

    return SegmentRunTotals(
        rank_class=pairs // segment_count, segment=pairs % segment_count, run_count=run_count[pairs], counted_seconds=sum_by_pair(seconds),
        full_seconds=sum_by_pair(trace.end[events] - trace.start[events]),
        waited=sum_by_pair(trace.waited[events]), slowed=sum_by_pair(trace.slowed[events]),
        exposed_delay=exposed, hidden_delay=hidden,
    )  # fmt: skip


def contention_by_category(
    table: TraceTable, events: IntArray, pair_index: IntArray, pair_count: int
) -> tuple[FloatArray, FloatArray]:
    """Seconds more than alone in which shared links let exchanges be exposed, and hidden: [pairs, parts] each.

    row: runs of blocks; pair: to which of so many pairs each of them belongs.
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
    """The part of what exchanges of operations expose, each inside the block of a row: [n]."""
    operation_count = int(operation.max()) + 1
    keys, key_index = np.unique(
        table.tasks.segment[table.entry[events]] * operation_count + operation, return_inverse=True
    )
    comm_ops = [
        table.segments[key // operation_count].operations[key % operation_count].comm_op for key in keys.tolist()
    ]
    categories = np.array(
        [CATEGORY_BY_COMM_GROUP[comm_op.comm_group].index for comm_op in comm_ops if comm_op is not None]
    )
    operation_category: IntArray = categories[key_index.reshape(-1)]
    return operation_category


def distinct_timings(
    table: TraceTable, totals: SegmentRunTotals, segment_timing: SegmentTimingLookup
) -> tuple[list[tuple[Segment, SegmentTiming]], IntArray]:
    """The different blocks and timings among runs, and which of them each pair has: [pairs]."""
    index_by_key: dict[tuple[int, int], int] = {}
    distinct: list[tuple[Segment, SegmentTiming]] = []
    timing_index = np.empty(len(totals.rank_class), dtype=np.int64)
    ranks = table.ranks[totals.rank_class].tolist()
    for pair_index, (rank, segment) in enumerate(zip(ranks, totals.segment.tolist(), strict=True)):
        timing = segment_timing(rank, table.segments[segment])
        key = segment, id(timing)
        if key not in index_by_key:
            index_by_key[key] = len(distinct)
            distinct.append((table.segments[segment], timing))  # keeps the timing alive, so ids stay apart
        timing_index[pair_index] = index_by_key[key]
    return distinct, timing_index


@dataclass(frozen=True, slots=True)
class _TaskIndexer:
    """Numbers given to blocks, exchanges and kinds of tasks as they are met.

    kinds: by what tasks share, told apart by identity, as to hash exchanges by value takes longer; columns: of each
    kind the block's and the exchange's number, and whether it computes forward or backward.
    """

    segments: dict[Segment, int]
    comm_ops: dict[CommOp, int]
    kinds: dict[tuple[int, ActionKind | None], int]
    columns: list[tuple[int, int, bool, bool]]

    def task_kind(self, task: Task) -> int:
        """The kind of a task."""
        if isinstance(task, ComputeTask):
            key = id(task.segment), None if task.action is None else task.action.kind
        else:
            key = id(task.comm_op), None
        kind = self.kinds.get(key)
        if kind is None:
            kind = self.kinds[key] = len(self.columns)
            self.columns.append(self._columns(task))
        return kind

    def _columns(self, task: Task) -> tuple[int, int, bool, bool]:
        if isinstance(task, ComputeTask):
            segment = self.segments.setdefault(task.segment, len(self.segments))
            return segment, -1, _has_kind(task.action, _FORWARD_KINDS), _has_kind(task.action, _BACKWARD_KINDS)
        return -1, self.comm_ops.setdefault(task.comm_op, len(self.comm_ops)), False, False


def _has_kind(action: Action | None, kinds: frozenset[ActionKind]) -> bool:
    return action is not None and action.kind in kinds


def _lookup_by_comm_op(comm_op: IntArray, values: list[int], default: int) -> IntArray:
    """Look values up by exchange number; the last one of the table serves -1."""
    return np.array([*values, default], dtype=np.int64)[comm_op]
