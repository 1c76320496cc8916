"""Small programs and traces, written by hand."""

from dataclasses import dataclass, field

import numpy as np

from clustersim.common.dtypes import DType
from clustersim.cost.segment import SegmentTiming
from clustersim.cost.timing import Bottleneck, Provenance
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
from clustersim.results.trace_table import TraceTable, build_trace_table
from clustersim.trace.trace import ContentionDelays, Trace

KERNEL = Kernel("matmul", KernelKind.MATMUL, DType.BF16, flops=1e9, bytes=1e6)
F, B = ActionKind.FORWARD, ActionKind.BACKWARD


def exchange(role: str, name: str = "") -> CommOp:
    return CommOp(name or role, CollectiveType.ALL_REDUCE, role, 1e6)


def block(*works: WorkType) -> Segment:
    return Segment("kernels", tuple(Operation(KERNEL, work) for work in works))


WORK = block(WorkType.FORWARD)
"""A block of one forward kernel."""

FORWARD = ComputeTask(WORK, action=Action(0, F, 0))
BACKWARD = ComputeTask(block(WorkType.BACKWARD), action=Action(0, B, 0))
STEP = ComputeTask(block(WorkType.OPTIMIZER))


def receive(role: str = "pp_next") -> ReceiveTask:
    return ReceiveTask(exchange(role), Action(0, F, 0))


def send(role: str = "pp_next") -> SendTask:
    return SendTask(exchange(role), Action(0, F, 0))


def collective(role: str, name: str = "") -> CollectiveTask:
    return CollectiveTask(exchange(role, name))


@dataclass(frozen=True)
class Row:
    """One span of the trace: `cause` counts rows in the order in which they are written."""

    task: Task
    start: float
    end: float
    cause: int = -1
    stream: Stream = Stream.COMPUTE
    rank: int = 0
    waited: float = 0.0
    slowed: float = 0.0
    leader: int | None = None


@dataclass(frozen=True)
class Case:
    """A trace with its program. own: seconds of blocks where they are not as long as their rows."""

    rows: tuple[Row, ...]
    representative: tuple[int, ...] = (0,)
    staged: bool = False
    timings: dict[Segment, SegmentTiming] = field(default_factory=dict)

    @property
    def joined(self) -> TraceTable:
        return build_trace_table(self.trace, self.program)

    @property
    def trace(self) -> Trace:
        counts: dict[int, int] = {}
        numbers = []
        for row in self.rows:
            numbers.append(counts.get(row.rank, 0))
            counts[row.rank] = numbers[-1] + 1
        start = np.array([row.start for row in self.rows], dtype=float)
        return Trace(
            rank=np.array([row.rank for row in self.rows], dtype=np.int64),
            task=np.array(numbers, dtype=np.int64),
            stream=np.array([row.stream for row in self.rows], dtype=np.int64),
            queued=start,
            ready=start,
            start=start,
            end=np.array([row.end for row in self.rows], dtype=float),
            waited=np.array([row.waited for row in self.rows], dtype=float),
            slowed=np.array([row.slowed for row in self.rows], dtype=float),
            contention=ContentionDelays.empty(),
            critical_predecessor=np.array([row.cause for row in self.rows], dtype=np.int64),
            blocking_event=np.array(
                [n if row.leader is None else row.leader for n, row in enumerate(self.rows)], dtype=int
            ),
            representative=np.array(self.representative, dtype=np.int64),
        )

    @property
    def program(self) -> Program:
        ranks = len(self.representative)
        programs = tuple(self._rank_program(rank) for rank in range(ranks))
        roles = ["dp", "world", "tp"] + (["pp_next", "pp_previous"] if self.staged else [])
        groups = {role: ProcessGroups(role, np.arange(ranks)[None, :]) for role in roles}
        return Program(programs, np.array(self.representative, dtype=np.int64), groups)

    def timing_of(self, rank: int, wanted: Segment) -> SegmentTiming:
        """As written in `timings`, else one kernel as long as the rank's first row that runs the block."""
        if wanted in self.timings:
            return self.timings[wanted]
        rows = (row for row in self.rows if isinstance(row.task, ComputeTask) and row.task.segment is wanted)
        first = next(row for row in rows if row.rank == rank)
        return timing((first.end - first.start, 0.0))

    def _rank_program(self, rank: int) -> RankProgram:
        rows = [row for row in self.rows if row.rank == rank]
        return RankProgram(tuple(row.task for row in rows), tuple(row.stream for row in rows))


def timing(*pieces: tuple[float, float], provenance: tuple[Provenance, ...] | None = None) -> SegmentTiming:
    """A block's timing from (seconds, exposed seconds) of each operation."""
    durations = tuple(seconds for seconds, _ in pieces)
    return SegmentTiming(
        durations=durations,
        offsets=np.concatenate(([0.0], np.cumsum(durations))),
        exposed_comm=np.array([exposed for _, exposed in pieces]),
        overlap_delay=np.zeros(len(pieces)),
        launch_stalls=np.zeros(len(pieces)),
        overlaps={},
        provenance=provenance or (Provenance.ROOFLINE,) * len(pieces),
        bottleneck=(Bottleneck.COMPUTE,) * len(pieces),
        error=(None,) * len(pieces),
        in_situ_slowdown=(1.0,) * len(pieces),
    )


def nonzero(parts: dict[str, float]) -> dict[str, float]:
    return {name: seconds for name, seconds in parts.items() if seconds}
