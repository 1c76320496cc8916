"""Simulation trace: one event (span) for every task of every simulated rank, in columns.

Times are seconds from the start of the step:

    ready    everything that the task depends on, on its own rank, had ended
    start    it began: a collective when its last member had arrived, a transfer when its data could move
    end      it was done

    waited     seconds inside the span in which the rank waited for others (synchronization inside a segment)
    slowed     seconds inside the span by which communication slowed kernels: that of the rank's other streams,
        and overlapped communication of the same operation that takes longer because links are shared
    contended  seconds inside the span by which link sharing delayed communication that no kernel hides

so `start - ready` is waiting for other ranks, and `end - start` is computation or transfer, except for `waited`. When
the stream reached the task, from when on it waited for own tasks, follows from the others (`Trace.queued_times`).
`blocking_event` is, for a segment in which ranks synchronize, the event of the same task on the rank that waited
least, for which the others waited; otherwise the event itself. `critical_predecessor` is the event whose end allowed
the start (-1: none, it could start with the step). The order of events is unspecified. Ranks of one symmetry class
have equal timelines: `representative[r]` is the simulated rank that stands for rank r.
"""

from dataclasses import dataclass
from typing import Self

import numpy as np

from clustersim.common.arrays import FloatArray, IndexArray, IntArray
from clustersim.program.task import Stream


@dataclass(frozen=True, slots=True)
class ContentionDelays:
    """Delays by link sharing, in columns: of operation `operation` in the segment of trace event `event`, by event.

    exposed_delay: additional seconds, against uncontended links, of its communication that no overlapped kernel
    hides (negative where a slowed kernel hides more of it); transfer_delay: additional seconds of the transfer
    itself. Operations without any delay have no entry.
    """

    event: IntArray
    operation: IntArray
    exposed_delay: FloatArray
    transfer_delay: FloatArray

    @classmethod
    def empty(cls) -> Self:
        """No delays: links are not shared, or sharing delayed nothing."""
        return cls(*np.zeros((2, 0), dtype=np.int64), *np.zeros((2, 0)))

    def lookup(self, events: IntArray) -> tuple[IntArray, IntArray]:
        """Entries of some trace events: (position in `events`, index of the entry), one pair for each entry."""
        if not len(self.event):
            return np.zeros(0, dtype=np.int64), np.zeros(0, dtype=np.int64)
        begin, end = (np.searchsorted(self.event, events, side=side) for side in ("left", "right"))
        count = end - begin
        event_position = np.repeat(np.arange(len(events)), count)
        return event_position, np.arange(len(event_position)) - np.repeat(np.cumsum(count) - count - begin, count)


@dataclass(frozen=True, slots=True)
class Trace:
    """Events in columns of one length n; representative: [ranks].

    Integers that the vectorized engine writes are as narrow as their values: do arithmetic with others.
    """

    rank: IndexArray
    task: IndexArray
    stream: IndexArray
    ready: FloatArray
    start: FloatArray
    end: FloatArray
    waited: FloatArray
    slowed: FloatArray
    contention: ContentionDelays
    critical_predecessor: IndexArray
    blocking_event: IndexArray
    representative: IntArray

    def __len__(self) -> int:
        return len(self.rank)

    @property
    def contended(self) -> FloatArray:
        """[n] exposed delay of each event by link sharing."""
        seconds = np.bincount(self.contention.event, self.contention.exposed_delay, minlength=len(self))
        return seconds.astype(np.float64, copy=False)

    def queued_times(self, events: IntArray) -> FloatArray:
        """[events] seconds at which the stream reached each: the end of the stream's event before, else 0.

        A receive is posted beforehand, so its stream reaches it when it starts. events: with each, all earlier ones of
        its stream.
        """
        order = np.lexsort((self.task[events], self.stream[events], self.rank[events]))
        events = events[order]
        rank, stream = self.rank[events], self.stream[events]
        follows = (rank[1:] == rank[:-1]) & (stream[1:] == stream[:-1])
        queued = np.zeros(len(events))
        queued[order[1:]] = np.where(follows, self.end[events[:-1]], 0.0)
        is_receive = stream == Stream.RECEIVE
        queued[order[is_receive]] = self.start[events[is_receive]]
        return queued

    @property
    def makespan(self) -> float:
        """Seconds from the start of the step to the end of its last span."""
        return float(self.end.max()) if len(self) else 0.0

    @property
    def simulated_ranks(self) -> IntArray:
        """The ranks that have events, ascending."""
        return np.unique(self.representative)

    @property
    def represented_counts(self) -> IntArray:
        """[ranks] number of ranks that each simulated rank stands for, 0 for ranks that were not simulated."""
        return np.bincount(self.representative, minlength=len(self.representative))

    def rank_events(self, rank: int, stream: int | None = None) -> IntArray:
        """Event indices of one simulated rank (and stream), by start time."""
        is_selected = self.rank == rank if stream is None else (self.rank == rank) & (self.stream == stream)
        events = np.flatnonzero(is_selected)
        return events[np.lexsort((self.end[events], self.start[events]))]


@dataclass(frozen=True, slots=True)
class OperationSpans:
    """Spans of single operations inside segments, in columns: operation `operation` of task `task` of rank `rank`.

    exposed_delay, transfer_delay: seconds that link sharing added (`ContentionDelays`).
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
