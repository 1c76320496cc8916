"""Programs of two to four ranks, written by hand, and what they did as (who, when)."""

from collections.abc import Mapping, Sequence

import numpy as np

from clustersim.common.dtypes import DType
from clustersim.engine.engine import simulate_program
from clustersim.model.kernels import Kernel, KernelKind
from clustersim.program.action import Action, ActionKind
from clustersim.program.program import ProcessGroups, Program, RankProgram
from clustersim.program.task import (
    CollectiveTask,
    CollectiveType,
    CommOp,
    ComputeTask,
    Operation,
    ReceiveTask,
    Segment,
    SendTask,
    Stream,
    Task,
    WorkType,
)
from clustersim.symmetry.refinement import SymmetryClasses, singleton_classes
from clustersim.trace.trace import Trace
from tests.engine.fake_costs import UnitCost

Step = tuple[Stream, Task]
NEXT = "pp_next"


def tag(microbatch: int = 0) -> Action:
    return Action(1, ActionKind.FORWARD, microbatch)


def exchange(role: str, seconds: float, kind: CollectiveType = CollectiveType.ALL_REDUCE) -> CommOp:
    return CommOp(role, kind, role, seconds)


def block(*pieces: float | CommOp) -> Segment:
    """Kernels of so many seconds, and exchanges between them."""
    return Segment("block", tuple(Operation(_piece(piece), WorkType.FORWARD) for piece in pieces))


def _piece(piece: float | CommOp) -> Kernel | CommOp:
    if isinstance(piece, CommOp):
        return piece
    return Kernel("kernel", KernelKind.MATMUL, DType.BF16, flops=piece, bytes=0.0)


def compute(*pieces: float | CommOp, after: tuple[int, ...] = ()) -> Step:
    return Stream.COMPUTE, ComputeTask(block(*pieces), after)


def meet(seconds: float, *, role: str = "dp", after: tuple[int, ...] = ()) -> Step:
    return Stream.DP, CollectiveTask(exchange(role, seconds), after)


def send(seconds: float, microbatch: int = 0, *, after: tuple[int, ...] = ()) -> Step:
    return Stream.SEND_NEXT, SendTask(exchange(NEXT, seconds, CollectiveType.SEND_RECV), tag(microbatch), after)


def receive(seconds: float, microbatch: int = 0) -> Step:
    return Stream.RECEIVE, ReceiveTask(exchange(NEXT, seconds, CollectiveType.SEND_RECV), tag(microbatch))


def program(ranks: Sequence[Sequence[Step]], groups: Mapping[str, list[list[int]]] | None = None) -> Program:
    """One program for each rank. groups: members by role; NEXT is a role of ordered pairs."""
    programs = tuple(RankProgram(tuple(t for _, t in steps), tuple(s for s, _ in steps)) for steps in ranks)
    return Program(programs, np.arange(len(ranks)), _groups(groups or {}))


def replicated(steps: Sequence[Step], ranks: int, groups: Mapping[str, list[list[int]]]) -> Program:
    """The same program for every rank."""
    one = program([steps], groups)
    return Program(one.programs, np.zeros(ranks, dtype=np.int64), one.groups)


def _groups(groups: Mapping[str, list[list[int]]]) -> dict[str, ProcessGroups]:
    return {role: ProcessGroups(role, np.array(members), ordered=role == NEXT) for role, members in groups.items()}


def played(made: Program, classes: SymmetryClasses | None = None, *, coalesce: bool = True) -> Trace:
    """The trace of a program at unit costs."""
    return simulate_program(made, classes or singleton_classes(made), UnitCost(made).blocks, coalesce=coalesce)[0]


def spans(trace: Trace) -> list[tuple[int, int, float, float]]:
    """(rank, task, start, end) in the order in which they ended."""
    columns = trace.rank, trace.task, trace.start, trace.end
    return list(zip(*(column.tolist() for column in columns), strict=True))


def waits(trace: Trace, rank: int, task: int) -> tuple[float, float, float, float]:
    """(queued, ready, start, end) of one task."""
    row = row_of(trace, rank, task)
    return tuple(float(column[row]) for column in (trace.queued, trace.ready, trace.start, trace.end))  # type: ignore[return-value]


def row_of(trace: Trace, rank: int, task: int) -> int:
    (row,) = np.flatnonzero((trace.rank == rank) & (trace.task == task))
    return int(row)


def cause_of(trace: Trace, rank: int, task: int) -> tuple[int, int] | None:
    """(rank, task) of the span that allowed this one's start."""
    cause = int(trace.critical_predecessor[row_of(trace, rank, task)])
    return None if cause < 0 else (int(trace.rank[cause]), int(trace.task[cause]))
