"""Because of what did a row of a trace start?

A task starts when all that it waits for has ended: the task before it in its stream, the tasks that it names, and for a
collective the other members. The trace's `cause` is the one that ended last. Where two of them end together, rounding
decides, and rounding differs with how a step is run (operations one by one, or blocks as one event), so the answer must
not depend on it: of what ended when the row started, to `TOGETHER` of the makespan, the cause is the task before it in
its stream, else the first that it names.
"""

from dataclasses import dataclass
from typing import Final, Self

import numpy as np

from clustersim.common.arrays import IntArray
from clustersim.program.program import RankProgram
from clustersim.program.task import Stream
from clustersim.results.trace_table import Rows

TOGETHER: Final = 1e-9
"""Part of the makespan within which ends are one moment: to so much is a step the same however it is run."""


@dataclass(frozen=True, slots=True, eq=False)
class Causes:
    """Looks up the causes of rows.

    row: the trace row of every task of every class, classes one after the other; base: [classes] where each begins;
    needed: numbers of the tasks that each task waits for, in their order; first: [entries + 1] where each begins.
    """

    rows: Rows
    row: IntArray
    base: IntArray
    needed: IntArray
    first: IntArray

    @classmethod
    def of(cls, rows: Rows) -> Self:
        """Of the rows of a trace."""
        program, trace = rows.program, rows.trace
        needs = [item for one in program.programs for item in _needs(one)]
        sizes = np.array([len(rank_program.tasks) for rank_program in program.programs])[
            program.program_index[rows.ranks]
        ]
        base = np.cumsum(sizes) - sizes
        row = np.full(int(sizes.sum()), -1, dtype=np.int64)
        row[base[rows.owner] + trace.task] = np.arange(len(trace))
        first = np.cumsum([0, *map(len, needs)])
        return cls(rows, row, base, np.array([element for need in needs for element in need], dtype=np.int64), first)

    def __call__(self, chosen: IntArray) -> IntArray:
        """The cause of each of some rows, -1 for the step's beginning."""
        trace, entry = self.rows.trace, self.rows.entry[chosen]
        count = self.first[entry + 1] - self.first[entry]
        which = np.repeat(np.arange(len(chosen)), count)
        place = np.arange(len(which)) - np.repeat(np.cumsum(count) - count - self.first[entry], count)
        found = self.row[self.base[self.rows.owner[chosen]][which] + self.needed[place]]
        together = np.abs(trace.end[found] - trace.start[chosen][which]) <= TOGETHER * trace.makespan
        of, at = np.unique(which[together], return_index=True)
        cause: IntArray = trace.critical_predecessor[chosen].copy()
        cause[of] = found[together][at]
        return cause


def _needs(program: RankProgram) -> list[tuple[int, ...]]:
    """What every task waits for on its own rank: the one before it in its stream, and those that it names."""
    last: dict[Stream, int] = {}
    needs: list[tuple[int, ...]] = []
    for number, (task, stream) in enumerate(zip(program.tasks, program.streams, strict=True)):
        before = last.get(stream)
        needs.append((*(() if before is None else (before,)), *task.depends_on))
        last[stream] = number
    return needs
