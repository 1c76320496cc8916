"""Programs of two to four ranks, written by hand, and readers of their traces."""

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

StreamTask = tuple[Stream, Task]
PP_NEXT = "pp_next"


def make_tag(microbatch: int = 0) -> Action:
    return Action(1, ActionKind.FORWARD, microbatch)


def make_comm_op(comm_group: str, seconds: float, collective: CollectiveType = CollectiveType.ALL_REDUCE) -> CommOp:
    return CommOp(comm_group, collective, comm_group, seconds)


def make_segment(*bodies: float | CommOp) -> Segment:
    """Kernels of given seconds, and communication operations between them."""
    return Segment("block", tuple(Operation(_operation_body(body), WorkType.FORWARD) for body in bodies))


def _operation_body(body: float | CommOp) -> Kernel | CommOp:
    if isinstance(body, CommOp):
        return body
    return Kernel("kernel", KernelKind.MATMUL, DType.BF16, flops=body, bytes=0.0)


def compute(*bodies: float | CommOp, depends_on: tuple[int, ...] = ()) -> StreamTask:
    return Stream.COMPUTE, ComputeTask(make_segment(*bodies), depends_on)


def all_reduce(seconds: float, *, comm_group: str = "dp", depends_on: tuple[int, ...] = ()) -> StreamTask:
    return Stream.DP, CollectiveTask(make_comm_op(comm_group, seconds), depends_on)


def send(seconds: float, microbatch: int = 0, *, depends_on: tuple[int, ...] = ()) -> StreamTask:
    return Stream.SEND_NEXT, SendTask(
        make_comm_op(PP_NEXT, seconds, CollectiveType.SEND_RECV), make_tag(microbatch), depends_on
    )


def receive(seconds: float, microbatch: int = 0) -> StreamTask:
    return Stream.RECEIVE, ReceiveTask(make_comm_op(PP_NEXT, seconds, CollectiveType.SEND_RECV), make_tag(microbatch))


def make_program(ranks: Sequence[Sequence[StreamTask]], groups: Mapping[str, list[list[int]]] | None = None) -> Program:
    """One program for each rank. groups: members by communication group type; PP_NEXT has ordered pairs."""
    programs = tuple(RankProgram(tuple(t for _, t in steps), tuple(s for s, _ in steps)) for steps in ranks)
    return Program(programs, np.arange(len(ranks)), _groups(groups or {}))


def make_replicated_program(steps: Sequence[StreamTask], ranks: int, groups: Mapping[str, list[list[int]]]) -> Program:
    """The same program for every rank."""
    single = make_program([steps], groups)
    return Program(single.programs, np.zeros(ranks, dtype=np.int64), single.groups)


def _groups(groups: Mapping[str, list[list[int]]]) -> dict[str, ProcessGroups]:
    return {
        comm_group: ProcessGroups(comm_group, np.array(members), ordered=comm_group == PP_NEXT)
        for comm_group, members in groups.items()
    }


def simulate_unit_costs(program: Program, classes: SymmetryClasses | None = None, *, coalesce: bool = True) -> Trace:
    """The trace of a program at unit costs."""
    return simulate_program(
        program, classes or singleton_classes(program), UnitCost(program).segment_cost, coalesce=coalesce
    )[0]


def trace_spans(trace: Trace) -> list[tuple[int, int, float, float]]:
    """(rank, task, start, end) in the order in which they ended."""
    columns = trace.rank, trace.task, trace.start, trace.end
    return list(zip(*(column.tolist() for column in columns), strict=True))


def task_times(trace: Trace, rank: int, task: int) -> tuple[float, float, float, float]:
    """(queued, ready, start, end) of one task."""
    event = event_index(trace, rank, task)
    queued = trace.queued_times(np.arange(len(trace)))
    return tuple(float(column[event]) for column in (queued, trace.ready, trace.start, trace.end))  # type: ignore[return-value]


def event_index(trace: Trace, rank: int, task: int) -> int:
    (event,) = np.flatnonzero((trace.rank == rank) & (trace.task == task))
    return int(event)


def cause_task(trace: Trace, rank: int, task: int) -> tuple[int, int] | None:
    """(rank, task) of the event that allowed this one's start."""
    cause = int(trace.critical_predecessor[event_index(trace, rank, task)])
    return None if cause < 0 else (int(trace.rank[cause]), int(trace.task[cause]))
