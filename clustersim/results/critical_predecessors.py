"""Because of what did a row of a trace start?

A task starts when all that it waits for has ended: the task before it in its stream, the tasks that it names, and for a
collective the other members. The trace's `cause` is the one that ended last. Where two of them end together, rounding
decides, and rounding differs with how a step is run (operations one by one, or blocks as one event), so the answer must
not depend on it: of what ended when the row started, to `TIE_TOLERANCE` of the makespan, the cause is the task before it in
its stream, else the first that it names.
"""

from dataclasses import dataclass
from typing import Final, Self

import numpy as np

from clustersim.common.arrays import IntArray
from clustersim.program.program import RankProgram
from clustersim.program.task import Stream
from clustersim.results.trace_table import TraceTable

TIE_TOLERANCE: Final = 1e-9
"""Part of the makespan within which ends are one moment: to so much is a step the same however it is run."""


@dataclass(frozen=True, slots=True, eq=False)
class PredecessorLookup:
    """Looks up the causes of rows.

    row: the trace row of every task of every class, classes one after the other; base: [classes] where each begins;
    needed: numbers of the tasks that each task waits for, in their order; first: [entries + 1] where each begins.
    """

    table: TraceTable
    event_of_task: IntArray
    class_offset: IntArray
    dependencies: IntArray
    dependency_offset: IntArray

    @classmethod
    def from_trace(cls, table: TraceTable) -> Self:
        """Of the rows of a trace."""
        program, trace = table.program, table.trace
        needs_by_task = [
            program_or_task for rank_program in program.programs for program_or_task in _task_dependencies(rank_program)
        ]
        task_counts = np.array([len(program_or_task.tasks) for program_or_task in program.programs])[
            program.program_index[table.ranks]
        ]
        class_offset = np.cumsum(task_counts) - task_counts
        event_of_task = np.full(int(task_counts.sum()), -1, dtype=np.int64)
        event_of_task[class_offset[table.rank_class] + trace.task] = np.arange(len(trace))
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
        """The cause of each of some rows, -1 for the step's beginning."""
        trace, entry = self.table.trace, self.table.entry[events]
        count = self.dependency_offset[entry + 1] - self.dependency_offset[entry]
        event_position = np.repeat(np.arange(len(events)), count)
        dependency_index = np.arange(len(event_position)) - np.repeat(
            np.cumsum(count) - count - self.dependency_offset[entry], count
        )
        candidates = self.event_of_task[
            self.class_offset[self.table.rank_class[events]][event_position] + self.dependencies[dependency_index]
        ]
        is_tied = np.abs(trace.end[candidates] - trace.start[events][event_position]) <= TIE_TOLERANCE * trace.makespan
        tied_events, first_tied = np.unique(event_position[is_tied], return_index=True)
        predecessor: IntArray = trace.critical_predecessor[events].copy()
        predecessor[tied_events] = candidates[is_tied][first_tied]
        return predecessor


def _task_dependencies(program: RankProgram) -> list[tuple[int, ...]]:
    """What every task waits for on its own rank: the one before it in its stream, and those that it names."""
    last_on_stream: dict[Stream, int] = {}
    needs: list[tuple[int, ...]] = []
    for task_id, (task, stream) in enumerate(zip(program.tasks, program.streams, strict=True)):
        previous = last_on_stream.get(stream)
        needs.append((*(() if previous is None else (previous,)), *task.depends_on))
        last_on_stream[stream] = task_id
    return needs
