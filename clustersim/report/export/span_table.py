"""What happened on a rank, span by span? The table that every exporter reads.

One row for each pass, collective and message, by start time, followed by one for each operation inside it.
Columns have one length and are computed once for each simulated rank; descriptions are shared by all spans
that have the same.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Final

import numpy as np
from numpy.typing import ArrayLike, NDArray

from clustersim.common.arrays import BoolArray, FloatArray, IntArray
from clustersim.common.lru import LruCache, unit_size
from clustersim.common.units import Seconds
from clustersim.program.program import RankProgram
from clustersim.program.task import ComputeTask, Segment, Stream, Task
from clustersim.report.export.rank_selection import TraceRank
from clustersim.report.export.span_descriptions import (
    SpanDescription,
    describe_comm_task,
    describe_operation,
    describe_pass,
)
from clustersim.results.simulation_result import SimulationResult
from clustersim.trace.trace import Trace

_CACHED_TABLES: Final = 8  # simulated ranks whose tables are cached: ranks of several classes alternate


@dataclass(frozen=True, slots=True)
class SpanTable:
    """Spans of a simulated rank. program: its program; descriptions: distinct descriptions of spans.

    event: [n] trace event, for an operation that of its pass; task: [n] task index in the program; operation:
    [n] index in the pass, -1 for a task itself; description: [n] index into descriptions; start, end: [n]
    seconds; kernel_start, kernel_end: [n] seconds at which its kernel began, behind waiting for the host's launch, and
    ended; transfer_start: [n] seconds at which its comm op
    began to transfer data.
    """

    trace: Trace
    program: RankProgram
    descriptions: list[SpanDescription]
    event: IntArray
    task: IntArray
    operation: IntArray
    description: IntArray
    start: FloatArray
    end: FloatArray
    kernel_start: FloatArray
    kernel_end: FloatArray
    transfer_start: FloatArray

    def __len__(self) -> int:
        return len(self.event)

    @property
    def is_task(self) -> BoolArray:
        """[n] whether it is a task, not an operation inside one."""
        return np.asarray(self.operation < 0)

    @property
    def stream(self) -> IntArray:
        """[n] stream of the rank that runs it."""
        return self.trace.stream[self.event]

    @property
    def queued(self) -> FloatArray:
        """[n] seconds at which its stream reached a task; NaN for operations inside tasks."""
        queued = np.full(len(self), np.nan)
        queued[self.is_task] = self.trace.queued_times(self.event[self.is_task])
        return queued

    def task_column(self, column: NDArray[Any], fill: float) -> NDArray[Any]:
        """[n] a column of the trace; `fill` for operations inside tasks."""
        return np.where(self.is_task, column[self.event], fill)

    def select(self, selection: BoolArray | IntArray | slice) -> "SpanTable":
        """Selected rows, in order."""
        columns = ("event", "task", "operation", "description", "start", "end")
        names = (*columns, "kernel_start", "kernel_end", "transfer_start")
        return replace(self, **{name: getattr(self, name)[selection] for name in names})

    def first_tasks(self, task_count: int) -> "SpanTable":
        """The first `task_count` tasks with their operations."""
        next_task = np.flatnonzero(self.is_task)[task_count : task_count + 1]
        return self.select(slice(0, int(next_task[0]))) if len(next_task) else self


@dataclass(frozen=True, slots=True)
class TraceExport:
    """Exported ranks of a result. max_tasks: limit for each rank, for a sample; table_cache: recent tables."""

    result: SimulationResult
    ranks: tuple[TraceRank, ...]
    max_tasks: int | None = None
    table_cache: LruCache[SpanTable] = field(default_factory=lambda: LruCache(_CACHED_TABLES, unit_size))

    def __iter__(self) -> Iterator[tuple[TraceRank, SpanTable]]:
        """Each rank with the span table of its representative."""
        for rank in self.ranks:
            table = self.table_cache.get_or_compute(
                (rank.representative,), partial(build_span_table, self.result, rank.representative)
            )
            yield rank, table if self.max_tasks is None else table.first_tasks(self.max_tasks)


def build_span_table(result: SimulationResult, rank: int) -> SpanTable:
    """Build the table of a simulated rank."""
    trace, program = result.trace, result.program.programs[int(result.program.program_index[rank])]
    events, operations, operation_offsets = (
        trace.rank_events(rank),
        result.operation_spans(rank),
        np.array(program.operation_offsets),
    )
    span_counts = 1 + np.diff(operation_offsets)[trace.task[events]]
    event = np.repeat(events, span_counts)
    operation = np.arange(len(event)) - np.repeat(np.cumsum(span_counts) - span_counts, span_counts) - 1
    task, operation_spans = trace.task[event], np.flatnonzero(operation >= 0)
    operation_index = operation_offsets[task[operation_spans]] + operation[operation_spans]
    start, end = trace.start[event], trace.end[event]
    start[operation_spans], end[operation_spans] = operations.start[operation_index], operations.end[operation_index]
    kernel_start, kernel_end, transfer_start = start.copy(), end.copy(), start.copy()
    descriptions = _SpanDescriptions(result, rank, program)
    description = descriptions.by_task[task]
    description[operation_spans] = descriptions.by_operation[operation_index]
    exposed_seconds, transfer_seconds = (
        descriptions.exposed_seconds[operation_index] + operations.exposed_delay[operation_index],
        descriptions.transfer_seconds[operation_index] + operations.transfer_delay[operation_index],
    )
    kernel_end[operation_spans] = np.maximum(end[operation_spans] - exposed_seconds, start[operation_spans])
    durations = (end - start)[operation_spans]  # of which waiting has the same share where both are slowed
    kernel_start[operation_spans] = np.minimum(
        start[operation_spans]
        + durations * descriptions.stall_shares[operation_index]
        + descriptions.stall_seconds[operation_index],
        kernel_end[operation_spans],
    )
    transfer_start[operation_spans] = np.maximum(end[operation_spans] - transfer_seconds, start[operation_spans])
    return SpanTable(
        trace,
        program,
        descriptions.descriptions,
        event,
        task,
        operation,
        description,
        start,
        end,
        kernel_start,
        kernel_end,
        transfer_start,
    )


def to_nanoseconds(seconds: ArrayLike) -> IntArray:
    """Integer nanoseconds, as trace viewers use them."""
    return np.rint(np.multiply(seconds, 1e9)).astype(np.int64)


def resolve_message_cause(trace: Trace, events: IntArray) -> IntArray:
    """Cause of some trace events; if that is the arrival of a message, the cause of its send."""
    cause = trace.critical_predecessor[events]
    is_receive = (cause >= 0) & (trace.stream[cause] == Stream.RECEIVE)
    return np.where(is_receive, trace.critical_predecessor[cause], cause)


class _SpanDescriptions:
    """Descriptions of a rank's spans, and durations inside its operations.

    by_task: [tasks] description index; of all operations, pass by pass: by_operation: description index;
    exposed_seconds: of its comm op, not overlapped by its own kernel; transfer_seconds: of its comm op,
    infinite if it is the whole operation; stall_shares: of its kernel, in
    which the GPU waits for the launch; stall_seconds: the same where a comm op is overlapped.
    """

    def __init__(self, result: SimulationResult, rank: int, program: RankProgram) -> None:
        self._result, self._rank = result, rank
        self.descriptions: list[SpanDescription] = []
        self._ids: dict[object, int] = {}
        self.by_task = np.array([*map(self._task_id, program.tasks, program.body_index.tolist())])
        segments = [task.segment for task in program.tasks if isinstance(task, ComputeTask)]
        by_segment = {
            segment: np.array([*self._segment_operations(segment)]).reshape(-1, 5)
            for segment in dict.fromkeys(segments)
        }
        ids, self.exposed_seconds, self.transfer_seconds, self.stall_shares, self.stall_seconds = np.concatenate(
            [np.empty((0, 5)), *(by_segment[segment] for segment in segments)]
        ).T
        self.by_operation = ids.astype(np.int64)

    def _task_id(self, task: Task, body_index: int) -> int:
        """Description index of a task, which runs this one of the program's `task_bodies`."""
        if isinstance(task, ComputeTask):
            return self._id_of((task.segment, task.action and task.action.kind), lambda: describe_pass(task))
        timing = self._result.cost.comm_timing_by_group
        return self._id_of((type(task), body_index), lambda: describe_comm_task(task, timing(task.comm_op)))

    def _segment_operations(self, segment: Segment) -> Iterator[tuple[int, Seconds, Seconds, float, Seconds]]:
        """Description index, exposed and transfer seconds, share and seconds of waiting, of each operation."""
        timing = self._result.cost.time_segment(self._rank, segment)
        kernels, nominal, stalls = timing.kernel_seconds, np.array(timing.durations), timing.launch_stalls
        stall_shares = np.divide(stalls, nominal, out=np.zeros(len(nominal)), where=nominal > 0.0).tolist()
        for index, operation in enumerate(segment.operations):
            overlap, comm_op = timing.overlaps.get(index), operation.comm_op
            key = (operation, timing.bottleneck[index], timing.provenance[index])
            algorithm = "" if comm_op is None else self._result.cost.comm_timing_by_group(comm_op).algorithm
            description_id = self._id_of(key, partial(describe_operation, operation, timing, index, algorithm))
            if overlap is None:
                yield description_id, 0.0, np.inf, stall_shares[index], 0.0
            else:
                yield (
                    description_id,
                    float(timing.exposed_comm[index]),
                    overlap.comm_duration(float(kernels[index]), overlap.comm_seconds),
                    0.0,
                    float(stalls[index]),
                )

    def _id_of(self, key: object, describe: Callable[[], SpanDescription]) -> int:
        if key not in self._ids:
            self._ids[key] = len(self.descriptions)
            self.descriptions.append(describe())
        return self._ids[key]
