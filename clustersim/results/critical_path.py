"""Which chain of tasks makes the step as long as it is?

Every row names the row whose end allowed its start (`cause`). Walking causes back from the row that ends last gives a
chain in which each row starts when the one before it ends; where it does not, the time between is an explicit wait.
Where a rank waited inside a block for another, the chain goes on with that rank's run of the block (`leader`), before
what the rank itself did last.
Shortening a task off the chain cannot shorten the step; shortening one on it may, until another chain takes over.
"""

from dataclasses import dataclass
from typing import Self

import numpy as np

from clustersim.common.arrays import FloatArray, IntArray
from clustersim.common.units import Seconds
from clustersim.results.time_breakdown import run_parts
from clustersim.results.time_categories import PARTS, Part
from clustersim.results.trace_table import Rows, TimingOf, block_runs
from clustersim.trace.trace import Trace


def critical_path(trace: Trace) -> IntArray:
    """Rows of the chain that ends last, from first to last. Of rows that end equally late, the first one counts."""
    if len(trace) == 0:
        return np.empty(0, dtype=np.int64)
    path = [int(trace.end.argmax())]
    while len(path) < 2 * len(trace):
        leader = int(trace.blocking_event[path[-1]])
        if leader != path[-1]:
            path.append(leader)
        if (cause := int(trace.critical_predecessor[leader])) < 0:
            break
        path.append(cause)
    return np.array(path[::-1], dtype=np.int64)


@dataclass(frozen=True, slots=True, eq=False)
class Course:
    """The path's rows with, of each, when the one before it ended, when the row itself began, and when it ended."""

    row: IntArray
    before: FloatArray
    begin: FloatArray
    end: FloatArray

    @classmethod
    def of(cls, trace: Trace, row: IntArray) -> Self:
        """From rows of the trace, first to last."""
        end = trace.end[row]
        leads = (trace.blocking_event[row[1:]] == row[:-1]) & (row[1:] != row[:-1])
        end[:-1][leads] = np.minimum(end[:-1], end[1:])[leads]  # what a leader does after those it led is off the path
        end = np.maximum.accumulate(end)
        before = np.concatenate(([0.0], end))[: len(row)]
        return cls(row, before, np.clip(trace.start[row], before, end), end)


def path_parts(rows: Rows, course: Course, timing_of: TimingOf) -> FloatArray:
    """Seconds of the path by the program of the rank that it was on, summing to the makespan: [kinds, parts].

    Blocks count by their operations, messages and collectives as exposed, time between rows of the path as wait.
    """
    parts = np.zeros((len(rows.program.programs), len(PARTS)))
    runs = block_runs(rows, course.row, course.end - course.begin)
    np.add.at(parts, rows.program.program_index[rows.ranks[runs.owner]], run_parts(rows, runs, timing_of))
    kind, part = rows.program.program_index[rows.trace.rank[course.row]], rows.tasks.part[rows.entry[course.row]]
    moves = part >= 0
    np.add.at(parts, (kind[moves], part[moves]), (course.end - course.begin)[moves])
    np.add.at(parts[:, Part.WAIT.place], kind, course.begin - course.before)
    return parts


def path_summary(rows: Rows, timing_of: TimingOf) -> dict[str, Seconds]:
    """Seconds of the critical path by part, summing to the makespan; of several steps: to the mean step time."""
    seconds = path_parts(rows, Course.of(rows.trace, critical_path(rows.trace)), timing_of).sum(axis=0)
    return {part.value: float(value) / rows.steps for part, value in zip(PARTS, seconds, strict=True)}
