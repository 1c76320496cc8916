"""Critical predecessors: which earlier event allowed a trace event to start?

A task starts when everything that it waits for has ended: the previous task on its stream, its
dependencies, and for a collective the other members. The trace's `critical_predecessor` is the one that
ended last. Ties are broken there by rounding, which depends on the execution strategy (operation by
operation, or segments as one event). So ties within `TIE_TOLERANCE` of the makespan are broken here by
order instead: the previous task on the stream first, then the first dependency.
"""

from dataclasses import dataclass
from typing import Final, Self

import numpy as np

from clustersim.common.arrays import IntArray
from clustersim.program.program import RankProgram
from clustersim.program.task import Stream
from clustersim.results.trace_table import TraceTable

TIE_TOLERANCE: Final = 1e-9
"""Fraction of the makespan within which end times count as equal; execution strategies agree to this."""


@dataclass(frozen=True, slots=True, eq=False)
class PredecessorLookup:
    """Looks up critical predecessors of trace events.

    event_of_task: trace event of every task of every class, classes concatenated; class_offset: [classes] start
    of each class in it; dependencies: ids of the tasks that each task waits for, in order; dependency_offset:
    [entries + 1] start of each task's dependencies.
    """

    table: TraceTable
    event_of_task: IntArray
    class_offset: IntArray
    dependencies: IntArray
    dependency_offset: IntArray

    @classmethod
    def from_trace(cls, table: TraceTable) -> Self:
        """Lookup for the events of a trace."""
        program, trace = table.program, table.trace
        needs_by_task = [
            program_or_task for rank_program in program.programs for program_or_task in _task_dependencies(rank_program)
        ]
        task_counts = np.array([len(program_or_task.tasks) for program_or_task in program.programs])[
            program.program_index[table.ranks]
        ]
        class_offset = np.cumsum(task_counts) - task_counts
        event_of_task = np.full(int(task_counts.sum()), -1, dtype=np.int64)
        event_of_task[class_offset[table.classes_of(slice(None))] + trace.task] = np.arange(len(trace))
        dependency_offset = np.cumsum([0, *map(len, needs_by_task)])
        return cls(
            table,
            event_of_task,
            class_offset,
            np.array(
                [program_or_task for task_needs in needs_by_task for program_or_task in task_needs], dtype=np.int64
            ),
            dependency_offset,
        )

    def __call__(self, events: IntArray) -> IntArray:
        """The critical predecessor of each of some events, -1 for the start of the step."""
        trace, entry = self.table.trace, self.table.entries_of(events)
        count = self.dependency_offset[entry + 1] - self.dependency_offset[entry]
        event_position = np.repeat(np.arange(len(events)), count)
        dependency_index = np.arange(len(event_position)) - np.repeat(
            np.cumsum(count) - count - self.dependency_offset[entry], count
        )
        candidates = self.event_of_task[
            self.class_offset[self.table.classes_of(events)][event_position] + self.dependencies[dependency_index]
        ]
        difference = trace.end[candidates] - trace.start[events][event_position]
        is_tied = np.abs(difference) <= TIE_TOLERANCE * self.table.makespan
        tied_events, first_tied = np.unique(event_position[is_tied], return_index=True)
        predecessor = trace.critical_predecessor[events].astype(np.int64)
        predecessor[tied_events] = candidates[is_tied][first_tied]
        return predecessor


def _task_dependencies(program: RankProgram) -> list[tuple[int, ...]]:
    """Tasks that each task waits for on its own rank: the previous one on its stream, and its dependencies."""
    last_on_stream: dict[Stream, int] = {}
    needs: list[tuple[int, ...]] = []
    for task_id, (task, stream) in enumerate(zip(program.tasks, program.streams, strict=True)):
        previous = last_on_stream.get(stream)
        needs.append((*(() if previous is None else (previous,)), *task.depends_on))
        last_on_stream[stream] = task_id
    return needs
