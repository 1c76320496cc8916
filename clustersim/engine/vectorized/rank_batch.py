"""Rank batch: all simulated ranks that run the same program, as arrays.

Times are arrays over the ranks of the batch. On uncontended links, a span's times follow from those of its
dependencies by maxima and sums. So a batch may run a task as soon as these are known, however far apart its
ranks are in time, and needs no event queue. Collectives that overlap a segment, and slow it, must be known
before the segment runs: those of the rank's own overlapping streams that do not depend on it go first.
"""

from dataclasses import dataclass, field

import numpy as np

from clustersim.common.arrays import FloatArray, IntArray
from clustersim.engine.vectorized.overlap_timeline import OverlapTimeline
from clustersim.engine.vectorized.segment_durations import RankSegmentDurations
from clustersim.engine.vectorized.segment_eval import (
    NO_OVERLAP,
    OverlapInterval,
    OverlapIntervals,
    blocking_ranks,
    evaluate_segment,
    overlapping_intervals,
)
from clustersim.engine.vectorized.trace_writer import BatchEvents, BatchSpan
from clustersim.program.program import RankProgram
from clustersim.program.task import OVERLAPPING_STREAMS, Segment, Stream


@dataclass(frozen=True, slots=True, eq=False)
class ReadyTimes:
    """When the ranks of a batch can start a task, and the events that decide it: [ranks] each."""

    ready: FloatArray
    predecessor: IntArray


@dataclass(slots=True, eq=False)
class _OverlappingStream:
    """Collectives of a stream that overlaps segments. required_computes: `_required_computes` of each, in order.

    ended_count: how many ended before any segment that has not run.
    """

    task_ids: list[int]
    required_computes: list[int]
    ended_count: int = 0

    def concurrent_with(self, task_id: int) -> list[int]:
        """Collectives that do not depend on a compute task, without those that ended earlier."""
        end = self.ended_count
        while end < len(self.required_computes) and self.required_computes[end] < task_id:
            end += 1
        return self.task_ids[self.ended_count : end]


@dataclass(slots=True, eq=False)
class RankBatch:
    """The simulated ranks of one program, their segment durations, and the trace events that they write."""

    program: RankProgram
    events: BatchEvents
    durations: RankSegmentDurations
    done: list[bool] = field(init=False)
    _last_tasks: dict[Stream, int] = field(init=False, default_factory=dict)
    _overlapping: list[_OverlappingStream] = field(init=False, default_factory=list)

    def __post_init__(self) -> None:
        self.done = [False] * len(self.program.tasks)
        for stream in OVERLAPPING_STREAMS if self.durations.has_interference else ():
            tasks = [task_id for task_id, task_stream in enumerate(self.program.streams) if task_stream is stream]
            self._overlapping.append(_OverlappingStream(tasks, _required_computes(self.program, tasks)))

    @property
    def ranks(self) -> IntArray:
        """The simulated ranks of the batch."""
        return self.events.ranks

    def ready_times(self, task_id: int) -> ReadyTimes:
        """When a task can start, as far as its own rank is concerned."""
        events, stream = self.events, self.program.streams[task_id]
        previous = self._last_tasks.get(stream)
        ready = np.zeros(len(self.ranks)) if previous is None else events.end[previous]
        predecessor = np.full(len(self.ranks), -1) if previous is None else events.event_indices(previous)
        for dependency in self.program.tasks[task_id].depends_on:
            end = events.end[dependency]
            is_after = end > ready
            predecessor = np.where(is_after | (predecessor < 0), events.event_indices(dependency), predecessor)
            ready = np.where(is_after, end, ready)
        return ReadyTimes(ready, predecessor)

    def finish_task(self, task_id: int, span: BatchSpan) -> None:
        """Write the spans of a task."""
        self.events.write_span(task_id, span)
        self.done[task_id] = True
        self._last_tasks[self.program.streams[task_id]] = task_id

    def can_compute(self, task_id: int) -> bool:
        """Whether the times of all collectives that may overlap the segment of a compute task are known."""
        for overlapping in self._overlapping:
            while overlapping.ended_count < len(overlapping.task_ids) and self._has_ended(
                overlapping.task_ids[overlapping.ended_count]
            ):
                overlapping.ended_count += 1
        return all(
            self.done[collective]
            for overlapping in self._overlapping
            for collective in overlapping.concurrent_with(task_id)
        )

    def _has_ended(self, task_id: int) -> bool:
        """Whether a collective ended on every rank before the compute stream continues."""
        last = self._last_tasks.get(Stream.COMPUTE)
        if last is None or not self.done[task_id]:
            return False
        return bool((self.events.end[task_id] <= self.events.end[last]).all())

    def _overlap_intervals(self, task_id: int) -> OverlapIntervals:
        """When collectives that overlap a compute task are in flight, and the interference level meanwhile."""
        stream_tasks = [tasks for overlapping in self._overlapping if (tasks := overlapping.concurrent_with(task_id))]
        if len(stream_tasks) == 1:
            return [
                OverlapInterval(
                    self.events.start[collective], self.events.end[collective], self._interference_level(collective)
                )
                for collective in stream_tasks[0]
            ]
        if not stream_tasks:
            return NO_OVERLAP
        first, second = (self._timeline(tasks) for tasks in stream_tasks)
        merged = first.merge_timeline(second, self.durations.cost)
        return [
            OverlapInterval(*rank_intervals)
            for rank_intervals in zip(merged.begin.T, merged.end.T, np.maximum(merged.level, 1).T, strict=True)
        ]

    def _timeline(self, task_ids: list[int]) -> OverlapTimeline:
        start, end = self.events.start[task_ids].T, self.events.end[task_ids].T
        return OverlapTimeline(
            start, end, np.broadcast_to([self._interference_level(task_id) for task_id in task_ids], start.shape)
        )

    def _interference_level(self, task_id: int) -> int:
        """Interference level of kernels that overlap a collective."""
        return self.durations.cost.interference_level(self.program.tasks[task_id].comm_op)  # type: ignore[union-attr]

    def run_segment(self, task_id: int, segment: Segment) -> None:
        """Run a segment on all ranks."""
        times = self.ready_times(task_id)
        durations, summary = self.durations.durations_and_summary(task_id, segment)
        run = evaluate_segment(times.ready, durations) if summary is None else summary.evaluate(times.ready)
        if overlaps := overlapping_intervals(run, times.ready, self._overlap_intervals(task_id)):
            run = evaluate_segment(times.ready, durations, overlaps)
        for column, seconds in ((self.events.waited, run.waited), (self.events.slowed, run.slowed)):
            if seconds.any():  # zeros that are never written take no memory
                column[task_id] = seconds
        if durations.has_sync:
            self.events.blocking_event[task_id] = self.events.event_indices(task_id)[
                blocking_ranks(durations, run.waited)
            ]
        self.finish_task(task_id, BatchSpan(times.ready, times.ready, run.end, times.predecessor))


def _required_computes(program: RankProgram, task_ids: list[int]) -> list[int]:
    """For each task of one stream the last compute task that must have ended before it starts, or -1."""
    required: list[int] = []
    stream_required: dict[Stream, int] = {}
    for task_id, (task, stream) in enumerate(zip(program.tasks, program.streams, strict=True)):
        last_compute = max((required[dependency] for dependency in task.depends_on), default=-1)
        if stream is Stream.COMPUTE:
            required.append(task_id)
            continue
        if stream is not Stream.RECEIVE:
            last_compute = stream_required[stream] = max(last_compute, stream_required.get(stream, -1))
        required.append(last_compute)
    return [required[task_id] for task_id in task_ids]
