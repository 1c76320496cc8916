"""What happened? Spans, in columns.

One row per task that a simulated rank ran. Times are seconds from the start of the step:

    queued   the stream turned to the task (its predecessor on the stream had ended)
    ready    everything the task waits for on its own rank had ended
    start    it began: for a collective when the last member had come, for a transfer when the data could move
    end      it was done

    waited   seconds inside the span in which the rank waited for others (whom it meets inside a block)
    slowed   seconds by which communication on the rank's other streams made kernels inside the span longer, and by
        which exchanges beside them in one operation did, because they share links
    contended   seconds by which sharing links made exchanges inside the span longer that no kernel hides (`contention`)

so `ready - queued` is waiting on own work, `start - ready` is waiting for other ranks, and `end - start` is work or
transfer (but for what was waited inside).
`blocking_event` is, for a block in which ranks meet, the row of the same task on the one of them that waited least, for whom
the others waited; else the row itself.
`cause` is the row whose end allowed the start (-1 if nothing did: the step's beginning). Rows have no order to rely on.
Ranks of one class have equal timelines: `representative[r]` is the simulated rank that stands for rank r.
"""

from dataclasses import dataclass
from typing import Self

import numpy as np

from clustersim.common.arrays import FloatArray, IntArray


@dataclass(frozen=True, slots=True)
class ContentionDelays:
    """What sharing links changed: operation `operation` of the block of trace row `row`, in columns, by row.

    exposed, moved: seconds more than alone of its exchange that no kernel beside it in the operation hides (below 0
    where a kernel that is slowed hides more of it), and that it takes. Operations that took what they take alone are
    not here.
    """

    event: IntArray
    operation: IntArray
    exposed_delay: FloatArray
    transfer_delay: FloatArray

    @classmethod
    def empty(cls) -> Self:
        """Nobody shared links, or nobody felt it."""
        return cls(*np.zeros((2, 0), dtype=np.int64), *np.zeros((2, 0)))

    def lookup(self, events: IntArray) -> tuple[IntArray, IntArray]:
        """What belongs to some rows of the trace: which of these rows, and which entry."""
        begin, end = (np.searchsorted(self.event, events, side=side) for side in ("left", "right"))
        count = end - begin
        event_position = np.repeat(np.arange(len(events)), count)
        return event_position, np.arange(len(event_position)) - np.repeat(np.cumsum(count) - count - begin, count)


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
    contention: ContentionDelays
    critical_predecessor: IntArray
    blocking_event: IntArray
    representative: IntArray

    def __len__(self) -> int:
        return len(self.rank)

    @property
    def contended(self) -> FloatArray:
        """[n] seconds of each span."""
        seconds = np.bincount(self.contention.event, self.contention.exposed_delay, minlength=len(self))
        return seconds.astype(np.float64, copy=False)

    @property
    def makespan(self) -> float:
        """Seconds from the start of the step to the end of its last span."""
        return float(self.end.max()) if len(self) else 0.0

    @property
    def simulated_ranks(self) -> IntArray:
        """The ranks that have rows, ascending."""
        return np.unique(self.representative)

    @property
    def represented_counts(self) -> IntArray:
        """How many ranks each was simulated for, 0 for one that was not: [ranks]."""
        return np.bincount(self.representative, minlength=len(self.representative))

    def rank_events(self, rank: int, stream: int | None = None) -> IntArray:
        """Row numbers of one simulated rank (and stream), by start."""
        is_selected = self.rank == rank if stream is None else (self.rank == rank) & (self.stream == stream)
        events = np.flatnonzero(is_selected)
        return events[np.lexsort((self.end[events], self.start[events]))]


@dataclass(frozen=True, slots=True)
class OperationSpans:
    """Spans of single operations inside blocks, in columns: operation `operation` of task `task` of rank `rank`.

    exposed, moved: what sharing links added to it (`ContentionDelays`), seconds.
    """

    rank: IntArray
    task: IntArray
    operation: IntArray
    start: FloatArray
    end: FloatArray
    exposed_delay: FloatArray
    transfer_delay: FloatArray

    def __len__(self) -> int:
        return len(self.rank)

    @property
    def columns(self) -> tuple[IntArray, IntArray, IntArray, FloatArray, FloatArray, FloatArray, FloatArray]:
        """All columns."""
        return self.rank, self.task, self.operation, self.start, self.end, self.exposed_delay, self.transfer_delay
