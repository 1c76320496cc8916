"""Operation-level trace: when did each operation inside the segments of a rank run?

The trace has the start of every segment. From there its operations can be evaluated again, with the ranks
that synchronize inside and the collectives that overlapped it, so operation spans need not be stored for all
ranks.

Once their starts are known, runs are independent: all runs of a segment are evaluated together, as arrays. A
run in which the rank waited for nobody needs no other rank.
"""

from collections.abc import Iterator, Set
from dataclasses import dataclass
from typing import Final, Self

import numpy as np

from clustersim.common.arrays import BoolArray, FloatArray, IntArray
from clustersim.cost.jitter import Jitter
from clustersim.cost.segment import SegmentCost
from clustersim.engine.recording.operation_log import OperationSpanLog
from clustersim.engine.vectorized.overlap_timeline import OverlapTimeline
from clustersim.engine.vectorized.segment_durations import RankSegmentDurations, find_group_syncs, rank_group_colours
from clustersim.engine.vectorized.segment_eval import OverlapInterval, OverlapIntervals, evaluate_operations
from clustersim.program.program import Program, RankProgram
from clustersim.program.task import OVERLAPPING_STREAMS, CollectiveTask, ComputeTask, Segment, Stream
from clustersim.symmetry.refinement import SymmetryClasses
from clustersim.trace.trace import OperationSpans, Trace

MAX_BATCH_OPERATIONS: Final = 1_000_000
"""Operations of all ranks that are evaluated in one batch, so that each array takes about 8 MB."""


@dataclass(frozen=True, slots=True, eq=False)
class OperationTraceReader:
    """Reconstructs operation spans of a simulation. operation_log: those that the engine recorded itself."""

    program: Program
    classes: SymmetryClasses
    cost: SegmentCost
    jitter: Jitter | None
    trace: Trace
    operation_log: OperationSpanLog

    def rank_spans(self, rank: int, tasks: Set[int] | None = None) -> OperationSpans:
        """Every operation in the segments of a rank, or of the given tasks only, in execution order."""
        simulated = int(self.trace.representative[rank])
        program = self.program.programs[int(self.program.program_index[simulated])]
        is_selected = np.array([isinstance(task, ComputeTask) for task in program.tasks], dtype=bool)
        if tasks is not None:
            is_selected &= np.isin(np.arange(len(is_selected)), list(tasks))
        table, selected_tasks = _OperationTable.allocate(program, is_selected), np.flatnonzero(is_selected)
        recorded = self.operation_log.task_spans(simulated, set(selected_tasks.tolist()))
        table.write_times(recorded.task, recorded.operation, recorded.start, recorded.end)
        is_selected[recorded.task] = False
        rank_array = np.array([simulated])
        events = _task_events(self.trace, rank_array)[0]
        delays = self.trace.contention
        position, entry = delays.lookup(events[selected_tasks])
        table.write_delays(
            selected_tasks[position], delays.operation[entry], delays.exposed_delay[entry], delays.transfer_delay[entry]
        )
        waited = self.trace.waited[events] != 0.0
        self._reevaluate(table, simulated, rank_array, np.flatnonzero(is_selected & ~waited))
        if (is_selected & waited).any():
            self._reevaluate(
                table, simulated, self._synchronized_ranks(simulated), np.flatnonzero(is_selected & waited)
            )
        return table.operation_spans(simulated)

    def _synchronized_ranks(self, rank: int) -> IntArray:
        """The simulated ranks that this one synchronizes with inside segments, transitively; itself included."""
        simulated = self.trace.simulated_ranks
        candidates = simulated[self.program.program_index[simulated] == self.program.program_index[rank]]
        comm_groups = {
            comm_op.comm_group
            for comm_op in self.program.programs[int(self.program.program_index[rank])].segment_comm_ops
        }
        reached = candidates == rank
        while True:
            previous_count = int(reached.sum())
            for comm_group in comm_groups:
                colour = rank_group_colours(self.program, self.classes, comm_group, candidates)
                reached |= np.isin(colour, colour[reached])
            if int(reached.sum()) == previous_count:
                synchronized: IntArray = candidates[reached]
                return synchronized

    def _reevaluate(self, table: "_OperationTable", rank: int, ranks: IntArray, tasks: IntArray) -> None:
        """Evaluate the segments of these tasks again, on this rank and those that it synchronizes with."""
        if not len(tasks):
            return
        program, rank_index = table.program, int(np.flatnonzero(ranks == rank)[0])
        source = RankSegmentDurations(
            program, ranks, self.cost, self.jitter, find_group_syncs(self.program, self.classes, ranks)
        )
        times = _RankTimes.from_trace(self.trace, program, ranks, self.cost if source.has_interference else None)
        operation_offsets = np.array(program.operation_offsets)
        chunk = operation_offsets[tasks] // max(MAX_BATCH_OPERATIONS // len(ranks), 1)
        for chunk_tasks in np.split(tasks, np.flatnonzero(np.diff(chunk)) + 1):
            first_operation = int(operation_offsets[chunk_tasks[0]])
            chunk_factors = source.draw_factors(
                first_operation, int(operation_offsets[chunk_tasks[-1] + 1]) - first_operation
            )
            for segment, runs in times.batch_runs(program, chunk_tasks):
                operations = np.arange(len(segment.operations))
                factors = (
                    None
                    if chunk_factors is None
                    else chunk_factors[:, operation_offsets[runs, None] - first_operation + operations]
                )
                durations = source.batched_durations(segment, factors)
                _, begins, ends = evaluate_operations(times.start[:, runs], durations, times.overlap_intervals(runs))
                table.write_times(runs[:, None], operations, begins[rank_index], ends[rank_index])


@dataclass(frozen=True, slots=True, eq=False)
class _OperationTable:
    """Operations of some tasks of a program. first_entry: [tasks + 1] entry of each task's first operation.

    times: [4, entries] begin, end, exposed and transfer delay (`OperationSpans`).
    """

    program: RankProgram
    first_entry: IntArray
    times: FloatArray

    @classmethod
    def allocate(cls, program: RankProgram, is_selected: BoolArray) -> Self:
        """Space for the operations of the selected tasks: [tasks]."""
        sizes = np.where(is_selected, np.diff(program.operation_offsets), 0)
        first_entry = np.concatenate(([0], np.cumsum(sizes)))
        return cls(program, first_entry, np.zeros((4, int(first_entry[-1]))))

    def write_times(self, task: IntArray, operation: IntArray, begin: FloatArray, end: FloatArray) -> None:
        """Write begin and end of operations: arrays that broadcast to one shape."""
        entries = self.first_entry[task] + operation
        self.times[0, entries], self.times[1, entries] = begin, end

    def write_delays(
        self, task: IntArray, operation: IntArray, exposed_delay: FloatArray, transfer_delay: FloatArray
    ) -> None:
        """Write the delays of operations by link sharing: [n] each."""
        entries = self.first_entry[task] + operation
        self.times[2, entries], self.times[3, entries] = exposed_delay, transfer_delay

    def operation_spans(self, rank: int) -> OperationSpans:
        """All entries, as those of a rank."""
        sizes = np.diff(self.first_entry)
        task = np.repeat(np.arange(len(sizes)), sizes)
        return OperationSpans(
            np.full(len(task), rank), task, np.arange(len(task)) - self.first_entry[task], *self.times
        )


@dataclass(frozen=True, slots=True, eq=False)
class _RankTimes:
    """When some ranks ran their tasks, and which DP and EP collectives overlapped them.

    start: [ranks, tasks]; overlap_begin, overlap_end: [ranks, collectives + 1] one after the other, the last is
    padding (never in flight); level: [ranks, collectives + 1] interference level of kernels; first_overlap,
    last_overlap: [tasks] range of collectives, end excluded, that overlap a task on any rank.
    """

    start: FloatArray
    overlap_begin: FloatArray
    overlap_end: FloatArray
    level: IntArray
    first_overlap: IntArray
    last_overlap: IntArray

    @classmethod
    def from_trace(cls, trace: Trace, program: RankProgram, ranks: IntArray, cost: SegmentCost | None) -> Self:
        """Times of ranks that run the program; cost: None where overlapping collectives do not slow kernels."""
        events = _task_events(trace, ranks)
        start, end = trace.start[events], trace.end[events]
        overlap_begin, overlap_end, level = _overlaps(program, start, end, cost)
        first_overlap = [
            np.searchsorted(rank_bounds, rank_times, side="right")
            for rank_bounds, rank_times in zip(overlap_end, start, strict=True)
        ]
        last_overlap = [
            np.searchsorted(rank_bounds, rank_times, side="left")
            for rank_bounds, rank_times in zip(overlap_begin, end, strict=True)
        ]
        never = np.full((len(ranks), 1), np.inf)
        overlap_begin, overlap_end = np.hstack([overlap_begin, never]), np.hstack([overlap_end, -never])
        level = np.hstack([level, np.ones((len(ranks), 1), dtype=np.int64)])
        return cls(
            start, overlap_begin, overlap_end, level, np.min(first_overlap, axis=0), np.max(last_overlap, axis=0)
        )

    def batch_runs(self, program: RankProgram, tasks: IntArray) -> Iterator[tuple[Segment, IntArray]]:
        """Runs of one segment, those with and those without overlapping collectives separately."""
        batches: dict[tuple[Segment, bool], list[int]] = {}
        for task_id, is_overlapped in zip(
            tasks.tolist(), (self.last_overlap > self.first_overlap)[tasks].tolist(), strict=True
        ):
            task = program.tasks[task_id]
            if isinstance(task, ComputeTask):
                batches.setdefault((task.segment, is_overlapped), []).append(task_id)
        for (segment, _), task_ids in batches.items():
            yield segment, np.array(task_ids)

    def overlap_intervals(self, tasks: IntArray) -> OverlapIntervals:
        """Collectives that overlap the runs, padded to the largest number: [ranks, runs] each."""
        max_overlaps = int((self.last_overlap - self.first_overlap)[tasks].max())
        overlap_indices = [
            np.minimum(self.first_overlap[tasks] + offset, self.overlap_begin.shape[1] - 1)
            for offset in range(max_overlaps)
        ]
        return [
            OverlapInterval(self.overlap_begin[:, index], self.overlap_end[:, index], self.level[:, index])
            for index in overlap_indices
        ]


def _overlaps(
    program: RankProgram, start: FloatArray, end: FloatArray, cost: SegmentCost | None
) -> tuple[FloatArray, FloatArray, IntArray]:
    """When collectives overlapped segments, one after the other, and the interference level: [ranks, n] each."""
    dp_timeline, ep_timeline = (_stream_timeline(program, stream, start, end, cost) for stream in OVERLAPPING_STREAMS)
    if cost is None or not ep_timeline.level.size:
        return dp_timeline.begin, dp_timeline.end, dp_timeline.level
    merged = dp_timeline.merge_timeline(ep_timeline, cost)
    return merged.begin, merged.end, np.maximum(merged.level, 1)


def _stream_timeline(
    program: RankProgram, stream: Stream, start: FloatArray, end: FloatArray, cost: SegmentCost | None
) -> OverlapTimeline:
    """Collectives of a stream; start, end: [ranks, tasks]; cost: None where they do not slow kernels."""
    levels = {} if cost is None else dict(_collective_levels(program, stream, cost))
    tasks, level = np.array([*levels], dtype=np.int64), np.array([*levels.values()], dtype=np.int64)
    return OverlapTimeline(start[:, tasks], end[:, tasks], np.broadcast_to(level, (len(start), len(level))))


def _collective_levels(program: RankProgram, stream: Stream, cost: SegmentCost) -> Iterator[tuple[int, int]]:
    """Collectives of a stream, and the interference level of kernels that overlap each."""
    for task_id, (task, task_stream) in enumerate(zip(program.tasks, program.streams, strict=True)):
        if task_stream is stream and isinstance(task, CollectiveTask):
            yield task_id, cost.interference_level(task.comm_op)


def _task_events(trace: Trace, ranks: IntArray) -> IntArray:
    """Trace events of all tasks of simulated ranks that run one program: [ranks, tasks]."""
    events = np.flatnonzero(np.isin(trace.rank, ranks))
    order = np.lexsort((trace.task[events], trace.rank[events]))
    return events[order].reshape(len(ranks), -1)
