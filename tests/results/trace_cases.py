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


def comm_op(comm_group: str, name: str = "") -> CommOp:
    return CommOp(name or comm_group, CollectiveType.ALL_REDUCE, comm_group, 1e6)


def segment(*work_types: WorkType) -> Segment:
    return Segment("kernels", tuple(Operation(KERNEL, work_type) for work_type in work_types))


FORWARD_SEGMENT = segment(WorkType.FORWARD)
"""A segment of one forward kernel."""

FORWARD = ComputeTask(FORWARD_SEGMENT, action=Action(0, F, 0))
BACKWARD = ComputeTask(segment(WorkType.BACKWARD), action=Action(0, B, 0))
OPTIMIZER_STEP = ComputeTask(segment(WorkType.OPTIMIZER))


def receive_task(comm_group: str = "pp_next") -> ReceiveTask:
    return ReceiveTask(comm_op(comm_group), Action(0, F, 0))


def send_task(comm_group: str = "pp_next") -> SendTask:
    return SendTask(comm_op(comm_group), Action(0, F, 0))


def collective_task(comm_group: str, name: str = "") -> CollectiveTask:
    return CollectiveTask(comm_op(comm_group, name))


@dataclass(frozen=True)
class SpanEvent:
    """One span of a trace; `critical_predecessor` is an index into the events in the order in which they are listed."""

    task: Task
    start: float
    end: float
    critical_predecessor: int = -1
    stream: Stream = Stream.COMPUTE
    rank: int = 0
    waited: float = 0.0
    slowed: float = 0.0
    blocking_event: int | None = None


@dataclass(frozen=True)
class TraceCase:
    """A trace with its program. timings: of segments whose timing is not the duration of their events."""

    events: tuple[SpanEvent, ...]
    representative: tuple[int, ...] = (0,)
    has_pipeline: bool = False
    timings: dict[Segment, SegmentTiming] = field(default_factory=dict)

    @property
    def trace_table(self) -> TraceTable:
        return build_trace_table(self.trace, self.program)

    @property
    def trace(self) -> Trace:
        counts: dict[int, int] = {}
        task_ids = []
        for event in self.events:
            task_ids.append(counts.get(event.rank, 0))
            counts[event.rank] = task_ids[-1] + 1
        start = np.array([event.start for event in self.events], dtype=float)
        return Trace(
            rank=np.array([event.rank for event in self.events], dtype=np.int64),
            task=np.array(task_ids, dtype=np.int64),
            stream=np.array([event.stream for event in self.events], dtype=np.int64),
            ready=start,
            start=start,
            end=np.array([event.end for event in self.events], dtype=float),
            waited=np.array([event.waited for event in self.events], dtype=float),
            slowed=np.array([event.slowed for event in self.events], dtype=float),
            contention=ContentionDelays.empty(),
            critical_predecessor=np.array([event.critical_predecessor for event in self.events], dtype=np.int64),
            blocking_event=np.array(
                [n if event.blocking_event is None else event.blocking_event for n, event in enumerate(self.events)],
                dtype=int,
            ),
            representative=np.array(self.representative, dtype=np.int64),
        )

    @property
    def program(self) -> Program:
        ranks = len(self.representative)
        programs = tuple(self._rank_program(rank) for rank in range(ranks))
        comm_groups = ["dp", "world", "tp"] + (["pp_next", "pp_previous"] if self.has_pipeline else [])
        groups = {comm_group: ProcessGroups(comm_group, np.arange(ranks)[None, :]) for comm_group in comm_groups}
        return Program(programs, np.array(self.representative, dtype=np.int64), groups)

    def segment_timing(self, rank: int, segment: Segment) -> SegmentTiming:
        """The timing listed in `timings`, else one kernel as long as the rank's first event that runs the segment."""
        if segment in self.timings:
            return self.timings[segment]
        events = (
            event for event in self.events if isinstance(event.task, ComputeTask) and event.task.segment is segment
        )
        first_event = next(event for event in events if event.rank == rank)
        return build_timing((first_event.end - first_event.start, 0.0))

    def _rank_program(self, rank: int) -> RankProgram:
        events = [event for event in self.events if event.rank == rank]
        return RankProgram(tuple(event.task for event in events), tuple(event.stream for event in events))


def build_timing(
    *operation_seconds: tuple[float, float], provenance: tuple[Provenance, ...] | None = None
) -> SegmentTiming:
    """A segment's timing from (seconds, exposed communication seconds) of each operation."""
    durations = tuple(seconds for seconds, _ in operation_seconds)
    return SegmentTiming(
        durations=durations,
        offsets=np.concatenate(([0.0], np.cumsum(durations))),
        exposed_comm=np.array([exposed for _, exposed in operation_seconds]),
        overlap_delay=np.zeros(len(operation_seconds)),
        launch_stalls=np.zeros(len(operation_seconds)),
        overlaps={},
        provenance=provenance or (Provenance.ROOFLINE,) * len(operation_seconds),
        bottleneck=(Bottleneck.COMPUTE,) * len(operation_seconds),
        error=(None,) * len(operation_seconds),
        in_situ_slowdown=(1.0,) * len(operation_seconds),
    )


def nonzero(seconds_by_category: dict[str, float]) -> dict[str, float]:
    return {name: seconds for name, seconds in seconds_by_category.items() if seconds}
