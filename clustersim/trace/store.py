"""What happened? Spans, in columns.

One row per task that a simulated rank ran. Times are seconds from the start of the step:

    queued   the stream turned to the task (its predecessor on the stream had ended)
    ready    everything the task waits for on its own rank had ended
    start    it began: for a collective when the last member had come, for a transfer when the data could move
    end      it was done

    waited   seconds inside the span in which the rank waited for others (whom it meets inside a block)
    slowed   seconds by which communication on the rank's other streams made kernels inside the span longer, and by
        which exchanges beside them in one operation did, because they share links
    contended   seconds by which sharing links made exchanges inside the span longer that no kernel hides (below 0
        where a kernel that is slowed hides more of the exchange beside it than it would alone)

so `ready - queued` is waiting on own work, `start - ready` is waiting for other ranks, and `end - start` is work or
transfer (but for what was waited inside).
`leader` is, for a block in which ranks meet, the row of the same task on the one of them that waited least, for whom
the others waited; else the row itself.
`cause` is the row whose end allowed the start (-1 if nothing did: the step's beginning). Rows have no order to rely on.
Ranks of one class have equal timelines: `representative[r]` is the simulated rank that stands for rank r.
"""

from collections.abc import Set
from dataclasses import dataclass

import numpy as np

from clustersim.arrays import FloatArray, IntArray


@dataclass(frozen=True, slots=True)
class Trace:
    """Columns of one length n; representative: [ranks]."""

    rank: IntArray
    task: IntArray
    stream: IntArray
    queued: FloatArray
    ready: FloatArray
    start: FloatArray
    end: FloatArray
    waited: FloatArray
    slowed: FloatArray
    contended: FloatArray
    cause: IntArray
    leader: IntArray
    representative: IntArray

    def __len__(self) -> int:
        return len(self.rank)

    @property
    def makespan(self) -> float:
        """Seconds from the start of the step to the end of its last span."""
        return float(self.end.max()) if len(self) else 0.0

    @property
    def simulated_ranks(self) -> IntArray:
        """The ranks that have rows, ascending."""
        return np.unique(self.representative)

    def rows(self, rank: int, stream: int | None = None) -> IntArray:
        """Row numbers of one simulated rank (and stream), by start."""
        chosen = self.rank == rank if stream is None else (self.rank == rank) & (self.stream == stream)
        rows = np.flatnonzero(chosen)
        return rows[np.lexsort((self.end[rows], self.start[rows]))]


@dataclass(frozen=True, slots=True)
class OperationSpans:
    """Spans of single operations inside blocks, in columns: operation `operation` of task `task` of rank `rank`.

    exposed, moved: of an exchange on shared links, seconds more than alone that no kernel beside it in the operation
    hides, and that it takes.
    """

    rank: IntArray
    task: IntArray
    operation: IntArray
    start: FloatArray
    end: FloatArray
    exposed: FloatArray
    moved: FloatArray

    def __len__(self) -> int:
        return len(self.rank)

    @property
    def columns(self) -> tuple[IntArray, IntArray, IntArray, FloatArray, FloatArray, FloatArray, FloatArray]:
        """All columns."""
        return self.rank, self.task, self.operation, self.start, self.end, self.exposed, self.moved

    def of(self, rank: int, tasks: Set[int]) -> "OperationSpans":
        """Those of some tasks of one rank."""
        own = np.flatnonzero(self.rank == rank)
        chosen = own[np.isin(self.task[own], list(tasks))]
        rank_, task, operation, *times = (column[chosen] for column in self.columns)
        return OperationSpans(rank_, task, operation, *times)
