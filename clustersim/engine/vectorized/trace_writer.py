"""Trace writer of the vectorized engine: one event for every rank and task, in columns filled task by task."""

from dataclasses import dataclass
from typing import Any, Self

import numpy as np

from clustersim.common.arrays import FloatArray, IndexArray, IntArray
from clustersim.program.program import Program
from clustersim.trace.trace import ContentionDelays, Trace


@dataclass(frozen=True, slots=True, eq=False)
class BatchSpan:
    """Spans of the ranks of a batch in one task: [ranks] each. predecessor: trace events."""

    ready: FloatArray
    start: FloatArray
    end: FloatArray
    predecessor: IntArray


@dataclass(frozen=True, slots=True, eq=False)
class BatchEvents:
    """The events of one batch: [tasks, ranks] in every column. first_event: trace index of its first event."""

    first_event: int
    ranks: IntArray
    ready: FloatArray
    start: FloatArray
    end: FloatArray
    waited: FloatArray
    slowed: FloatArray
    predecessor: IndexArray
    blocking_event: IndexArray

    def write_span(self, task_id: int, span: BatchSpan) -> None:
        """Write the spans of a task."""
        self.ready[task_id], self.start[task_id], self.end[task_id] = span.ready, span.start, span.end
        self.predecessor[task_id] = span.predecessor

    def own_part(self, column: IndexArray) -> IndexArray:
        """The batch's part of a column over all events: [tasks, ranks], a view."""
        end = self.first_event + self.ready.size
        return column[self.first_event : end].reshape(self.ready.shape)

    def event_indices(self, task_id: int) -> IntArray:
        """Trace events of a task: [ranks]."""
        begin = self.first_event + task_id * len(self.ranks)
        return np.arange(begin, begin + len(self.ranks))


@dataclass(frozen=True, slots=True, eq=False)
class TraceWriter:
    """The events of all batches, one batch after the other."""

    batches: tuple[BatchEvents, ...]
    times: FloatArray
    event_links: IndexArray

    @classmethod
    def allocate(cls, program: Program, program_ranks: list[IntArray]) -> Self:
        """Space for the tasks of every program; program_ranks: the simulated ranks of each."""
        tasks = [len(program_tasks.tasks) for program_tasks in program.programs]
        sizes = [task_count * len(ranks) for task_count, ranks in zip(tasks, program_ranks, strict=True)]
        offsets = np.concatenate(([0], np.cumsum(sizes))).tolist()
        times, event_links = np.zeros((5, offsets[-1])), np.empty((2, offsets[-1]), dtype=_index_type(offsets[-1]))
        event_links[0], event_links[1] = -1, np.arange(offsets[-1])
        batches = [
            _batch_events(
                begin,
                ranks,
                times[:, begin:end].reshape(5, task_count, -1),
                event_links[:, begin:end].reshape(2, task_count, -1),
            )
            for begin, end, task_count, ranks in zip(offsets[:-1], offsets[1:], tasks, program_ranks, strict=True)
            if end > begin
        ]
        return cls(tuple(batches), times, event_links)

    def build_trace(self, program: Program, representative: IntArray) -> Trace:
        """The trace of all batches."""
        event_count = self.times.shape[1]
        task_count = max(len(rank_program.tasks) for rank_program in program.programs)
        rank, task = np.empty((2, event_count), dtype=_index_type(max(program.world_size, task_count)))
        stream = np.empty(event_count, dtype=np.int8)
        for batch in self.batches:
            batch.own_part(rank)[:] = batch.ranks
            batch.own_part(task)[:] = np.arange(len(batch.ready))[:, None]
            rank_program = program.programs[int(program.program_index[batch.ranks[0]])]
            batch.own_part(stream)[:] = np.array(rank_program.streams)[:, None]
        ready, start, end, waited, slowed = self.times
        predecessor, blocking = self.event_links
        return Trace(
            rank=rank,
            task=task,
            stream=stream,
            critical_predecessor=predecessor,
            blocking_event=blocking,
            ready=ready,
            start=start,
            end=end,
            waited=waited,
            slowed=slowed,
            contention=ContentionDelays.empty(),
            representative=representative,
        )


def _index_type(count: int) -> type[np.signedinteger[Any]]:
    """The narrowest type of indices of so many events, ranks or tasks."""
    return next(kind for kind in (np.int16, np.int32, np.int64) if count <= np.iinfo(kind).max)


def _batch_events(first_event: int, ranks: IntArray, times: FloatArray, event_links: IndexArray) -> BatchEvents:
    return BatchEvents(first_event, ranks, *times, *event_links)
