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
from clustersim.results.time_categories import PART_OF_ROLE, PIPELINE_ROLES, PLACES, STAGE_CROSSING_ROLES
from clustersim.trace.trace import Trace

TimingOf = Callable[[int, Segment], SegmentTiming]
"""Timing of a block on a rank."""

Span = tuple[Seconds, Seconds]
"""From when to when."""
WHOLE: Final[Span] = (0.0, inf)

_FORWARDS = frozenset({ActionKind.FORWARD})
_BACKWARDS = frozenset({ActionKind.BACKWARD, ActionKind.INPUT_GRADIENT})


@dataclass(frozen=True, slots=True, eq=False)
class Tasks:
    """What each task of each program is, in columns: one entry a task, programs one after the other.

    block, exchange: index into `Rows.blocks`, `Rows.exchanges`, -1 where it is the other; part: place of the exchange's
    exposed part, -1 for blocks; crosses: its group spans pipeline stages; forward, backward: computes such an action;
    step: number of the step that it belongs to.
    """

    block: IntArray
    exchange: IntArray
    part: IntArray
    crosses: BoolArray
    forward: BoolArray
    backward: BoolArray
    step: IntArray


@dataclass(frozen=True, slots=True, eq=False)
class Rows:
    """A trace with the program that it ran.

    steps: how many the program has; ranks: [classes] the simulated ranks; weights: [classes] how many ranks each stands
    for; owner: [rows] class; entry: [rows] place in `tasks`. Columns over rows that follow from the entry are looked up
    when asked for, because a trace may have millions of rows.
    """

    trace: Trace
    program: Program
    steps: int
    ranks: IntArray
    weights: IntArray
    owner: IntArray
    entry: IntArray
    tasks: Tasks
    blocks: tuple[Segment, ...]
    exchanges: tuple[CommOp, ...]

    @property
    def block(self) -> IntArray:
        """[rows] index into `blocks`, or -1."""
        return self.tasks.block[self.entry]

    @property
    def runs(self) -> list[float]:
        """[blocks] how often all ranks together run each."""
        block = self.block
        computes = block >= 0
        weights = self.weights[self.owner[computes]]
        counts: list[float] = np.bincount(block[computes], weights=weights, minlength=len(self.blocks)).tolist()
        return counts

    @property
    def exchange(self) -> IntArray:
        """[rows] index into `exchanges`, or -1."""
        return self.tasks.exchange[self.entry]


@dataclass(frozen=True, slots=True, eq=False)
class BlockRuns:
    """All runs of one block on one class, together: [pairs] each.

    seconds: counted; full: from their starts to their ends, of which waited, slowed: as in the trace; exposed, hidden:
    [pairs, parts] seconds of exchanges more than alone, because they shared links; runs: how many.
    """

    owner: IntArray
    block: IntArray
    seconds: FloatArray
    full: FloatArray
    waited: FloatArray
    slowed: FloatArray
    exposed: FloatArray
    hidden: FloatArray
    runs: IntArray


def staged(program: Program) -> bool:
    """Whether the program has a pipeline."""
    return any(role in program.groups for role in PIPELINE_ROLES)


def read_rows(trace: Trace, program: Program, steps: int = 1) -> Rows:
    """Join a trace with the program of some equal steps that it ran."""
    ranks, weights = np.unique(trace.representative, return_counts=True)
    numbers = _Numbers({}, {}, {}, [])
    every = sum(len(rank_program.tasks) for rank_program in program.programs)
    kind = np.fromiter((numbers.of(task) for item in program.programs for task in item.tasks), np.int64, every)
    block, exchange, forward, backward = np.array(numbers.columns, dtype=np.int64).reshape(-1, 4)[kind].T
    exchanges = tuple(numbers.exchanges)
    crossing = STAGE_CROSSING_ROLES if staged(program) else frozenset()
    tasks = Tasks(
        block=np.ascontiguousarray(block), exchange=np.ascontiguousarray(exchange),
        forward=forward > 0, backward=backward > 0,
        part=_of_exchange(exchange, [PART_OF_ROLE[comm_op.comm_group].place for comm_op in exchanges], -1),
        crosses=_of_exchange(exchange, [int(element.comm_group in crossing) for element in exchanges], 0) > 0,
        step=np.concatenate([entry.step_indices(steps) for entry in program.programs]),
    )  # fmt: skip
    owner = np.full(program.world_size, -1, dtype=np.int64)
    owner[ranks] = np.arange(len(ranks))
    first = np.cumsum([0, *(len(each.tasks) for each in program.programs)])[program.program_index]
    return Rows(
        trace=trace, program=program, steps=steps, ranks=ranks, weights=weights, tasks=tasks,
        owner=owner[trace.rank], entry=first[trace.rank] + trace.task,
        blocks=tuple(numbers.blocks), exchanges=exchanges,
    )  # fmt: skip


def block_runs(rows: Rows, row: IntArray, seconds: FloatArray) -> BlockRuns:
    """Group those of some trace rows that run blocks by class and block. seconds: how long each of them counts."""
    trace = rows.trace
    block = rows.tasks.block[rows.entry[row]]
    row, seconds, block = row[block >= 0], seconds[block >= 0], block[block >= 0]
    many = max(1, len(rows.blocks))
    keys = rows.owner[row] * many + block
    runs = np.bincount(keys, minlength=len(rows.ranks) * many)
    pairs = np.flatnonzero(runs)
    exposed, hidden = contention_parts(rows, row, np.searchsorted(pairs, keys), len(pairs))

    def together(values: FloatArray) -> FloatArray:
        """Sums by pair."""
        return np.bincount(keys, values, minlength=len(runs))[pairs].astype(np.float64, copy=False)

    return BlockRuns(
        owner=pairs // many, block=pairs % many, runs=runs[pairs], seconds=together(seconds),
        full=together(trace.end[row] - trace.start[row]),
        waited=together(trace.waited[row]), slowed=together(trace.slowed[row]),
        exposed=exposed, hidden=hidden,
    )  # fmt: skip


def contention_parts(rows: Rows, row: IntArray, pair: IntArray, pairs: int) -> tuple[FloatArray, FloatArray]:
    """Seconds more than alone in which shared links let exchanges be exposed, and hidden: [pairs, parts] each.

    row: runs of blocks; pair: to which of so many pairs each of them belongs.
    """
    contention = rows.trace.contention
    which, entry = contention.lookup(row)
    if not len(entry):
        nothing = np.broadcast_to(0.0, (pairs, len(PLACES)))
        return nothing, nothing
    exposed, hidden = np.zeros((2, pairs, len(PLACES)))
    to = pair[which], _part_of_operations(rows, row[which], contention.operation[entry])
    np.add.at(exposed, to, contention.exposed_delay[entry])
    np.add.at(hidden, to, contention.transfer_delay[entry] - contention.exposed_delay[entry])
    return exposed, hidden


def _part_of_operations(rows: Rows, row: IntArray, operation: IntArray) -> IntArray:
    """The part of what exchanges of operations expose, each inside the block of a row: [n]."""
    many = int(operation.max()) + 1
    keys, which = np.unique(rows.tasks.block[rows.entry[row]] * many + operation, return_inverse=True)
    exchanges = [rows.blocks[key // many].operations[key % many].comm_op for key in keys.tolist()]
    parts = np.array([PART_OF_ROLE[exchange.comm_group].place for exchange in exchanges if exchange is not None])
    found: IntArray = parts[which.reshape(-1)]
    return found


def timings(rows: Rows, runs: BlockRuns, timing_of: TimingOf) -> tuple[list[tuple[Segment, SegmentTiming]], IntArray]:
    """The different blocks and timings among runs, and which of them each pair has: [pairs]."""
    found: dict[tuple[int, int], int] = {}
    different: list[tuple[Segment, SegmentTiming]] = []
    which = np.empty(len(runs.owner), dtype=np.int64)
    ranks = rows.ranks[runs.owner].tolist()
    for pair, (rank, number) in enumerate(zip(ranks, runs.block.tolist(), strict=True)):
        timing = timing_of(rank, rows.blocks[number])
        key = number, id(timing)
        if key not in found:
            found[key] = len(different)
            different.append((rows.blocks[number], timing))  # keeps the timing alive, so ids stay apart
        which[pair] = found[key]
    return different, which


@dataclass(frozen=True, slots=True)
class _Numbers:
    """Numbers given to blocks, exchanges and kinds of tasks as they are met.

    kinds: by what tasks share, told apart by identity, as to hash exchanges by value takes longer; columns: of each
    kind the block's and the exchange's number, and whether it computes forward or backward.
    """

    blocks: dict[Segment, int]
    exchanges: dict[CommOp, int]
    kinds: dict[tuple[int, ActionKind | None], int]
    columns: list[tuple[int, int, bool, bool]]

    def of(self, task: Task) -> int:
        """The kind of a task."""
        if isinstance(task, ComputeTask):
            key = id(task.segment), None if task.action is None else task.action.kind
        else:
            key = id(task.comm_op), None
        known = self.kinds.get(key)
        if known is None:
            known = self.kinds[key] = len(self.columns)
            self.columns.append(self._columns(task))
        return known

    def _columns(self, task: Task) -> tuple[int, int, bool, bool]:
        if isinstance(task, ComputeTask):
            number = self.blocks.setdefault(task.segment, len(self.blocks))
            return number, -1, _is(task.action, _FORWARDS), _is(task.action, _BACKWARDS)
        return -1, self.exchanges.setdefault(task.comm_op, len(self.exchanges)), False, False


def _is(action: Action | None, kinds: frozenset[ActionKind]) -> bool:
    return action is not None and action.kind in kinds


def _of_exchange(exchange: IntArray, values: list[int], otherwise: int) -> IntArray:
    """Look values up by exchange number; the last one of the table serves -1."""
    return np.array([*values, otherwise], dtype=np.int64)[exchange]
