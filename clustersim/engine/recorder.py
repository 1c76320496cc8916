"""Where do spans go while the engine runs?"""

from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Final, NamedTuple, Protocol

import numpy as np

from clustersim.arrays import FloatArray, IntArray
from clustersim.program.task import Stream
from clustersim.trace.store import Contention, OperationSpans, Trace
from clustersim.units import Seconds


class Lost(NamedTuple):
    """Seconds of a block: a rank waited for others, communication beside slowed its kernels."""

    waited: Seconds = 0.0
    slowed: Seconds = 0.0


class Longer(NamedTuple):
    """An operation whose exchange shares links: seconds more than if nobody shared them, nor slowed its kernel.

    kernel: that its kernel runs; exposed: that its exchange moves without the kernel; moved: that its exchange takes.
    """

    kernel: Seconds = 0.0
    exposed: Seconds = 0.0
    moved: Seconds = 0.0

    def felt(self, now: Seconds) -> "Longer":
        """The same without what is only rounding of the clock."""
        least = ROUNDING * now
        return Longer(*(each if abs(each) > least else 0.0 for each in self)) if max(map(abs, self)) > least else ALONE


class Inner(Protocol):
    """What is known of the ends of operations that ran one behind the other."""

    def reached(self, first: FloatArray, begin: int, until: int) -> FloatArray:
        """When operations from `begin` on begin, and that before `until` ends: [runs, until - begin + 1].

        first: [runs] when the first one of them begins.
        """


Place = tuple[int, int, int]
"""Of an operation: its rank, the rank's task, and where in the task's block."""
ALONE: Final = Longer()
ROUNDING: Final = 1e-12
"""Part of the clock below which a difference of two times says nothing: float64 keeps 2e-16, and times are sums."""


class Times(NamedTuple):
    """When a span was queued, ready, started and ended, and what was lost inside it."""

    queued: Seconds
    ready: Seconds
    start: Seconds
    end: Seconds
    waited: Seconds = 0.0
    slowed: Seconds = 0.0


@dataclass(slots=True)
class Recorder:
    """Appends rows; a row's number is its place."""

    whole: list[tuple[int, int, int, int]] = field(default_factory=list)
    times: list[Times] = field(default_factory=list)
    met: dict[tuple[int, int, Hashable], list[int]] = field(default_factory=dict)
    pieces: list[tuple[int, int, int, int]] = field(default_factory=list)
    piece_times: list[tuple[Seconds, Seconds]] = field(default_factory=list)
    piece_ends: list[Inner | None] = field(default_factory=list)
    longer: list[tuple[int, int, int, Seconds, Seconds]] = field(default_factory=list)

    def span(self, rank: int, task: int, stream: Stream, cause: int, times: Times) -> int:
        """Write the span of a task; return its row."""
        self.whole.append((rank, task, stream, cause))
        self.times.append(times)
        return len(self.whole) - 1

    def meet(self, task: int, groups: Sequence[Hashable], row: int) -> None:
        """Note that a span is of a block in which its rank met the members of groups, first come first."""
        for place, group in enumerate(groups):
            self.met.setdefault((place, task, group), []).append(row)

    def operation(self, place: Place, start: Seconds, end: Seconds, longer: Longer = ALONE) -> None:
        """Write the span of an operation: of a rank, inside a task's block, at this place."""
        if longer.exposed or longer.moved:
            self.longer.append((*place, longer.exposed, longer.moved))
        self.piece(place, place[-1] + 1, (start, end), None)

    def piece(self, place: Place, until: int, times: tuple[Seconds, Seconds], ends: Inner | None) -> None:
        """Write operations that ran one behind the other, from a place to before place `until`.

        times: of all of them; ends: of each of them, None of one alone.
        """
        self.pieces.append((*place, until))
        self.piece_times.append(times)
        self.piece_ends.append(ends)

    def trace(self, representative: IntArray) -> Trace:
        """All spans, in columns."""
        whole = np.array(self.whole, dtype=np.int64).reshape(-1, 4)
        times = np.array(self.times, dtype=np.float64).reshape(-1, 6)
        rank, task, stream, cause = np.ascontiguousarray(whole.T)
        queued, ready, start, end, waited, slowed = np.ascontiguousarray(times.T)
        return Trace(
            rank=rank, task=task, stream=stream, cause=cause,
            leader=self._leaders(waited),
            queued=queued, ready=ready, start=start, end=end, waited=waited, slowed=slowed,
            contention=self._contention(rank, task),
            representative=representative,
        )  # fmt: skip

    def _leaders(self, waited: FloatArray) -> IntArray:
        """For each row the one of those that met that waited least; through groups of several roles, role by role."""
        leader = np.arange(len(self.whole))
        for _, rows in sorted(self.met.items(), key=lambda met: met[0][0]):
            first = rows[int(np.argmin(waited[leader[rows]]))]
            leader[rows] = leader[first]
        return leader

    def _contention(self, rank: IntArray, task: IntArray) -> Contention:
        """What sharing links changed; rank, task: of each row."""
        if not self.longer:
            return Contention.none()
        *places, exposed, moved = np.array(self.longer, dtype=np.float64).T
        ranks, tasks, operation = (np.ascontiguousarray(each, dtype=np.int64) for each in places)
        many = int(task.max()) + 1
        keys = rank * many + task
        order = np.argsort(keys)
        row = order[np.searchsorted(keys[order], ranks * many + tasks)]
        by_row = np.argsort(row, kind="stable")
        return Contention(row[by_row], operation[by_row], exposed[by_row], moved[by_row])

    def operation_spans(self) -> OperationSpans:
        """Spans of single operations, where blocks were run piece by piece, in the order in which these ended."""
        rank, task, begin, until = np.array(self.pieces, dtype=np.int64).reshape(-1, 4).T
        first, last = np.array(self.piece_times, dtype=np.float64).reshape(-1, 2).T
        many = until - begin
        row = np.concatenate(([0], np.cumsum(many)))
        piece = np.repeat(np.arange(len(many)), many)
        start, end = first[piece], last[piece]
        for pieces, ends, some in self._long():
            times = ends.reached(first[pieces], *some)
            rows = row[pieces, None] + np.arange(times.shape[1] - 1)
            start[rows], end[rows[:, :-1]] = times[:, :-1], times[:, 1:-1]
        operation = np.arange(len(piece)) - row[piece] + begin[piece]
        return OperationSpans(rank[piece], task[piece], operation, start, end, *np.zeros((2, len(piece))))

    def _long(self) -> Iterator[tuple[IntArray, Inner, tuple[int, int]]]:
        """Pieces of the same several operations, what is known of their ends, and the first and behind the last."""
        alike: dict[tuple[int, int, int], list[int]] = {}
        for number, ((_, _, begin, until), ends) in enumerate(zip(self.pieces, self.piece_ends, strict=True)):
            if until - begin > 1:
                alike.setdefault((id(ends), begin, until), []).append(number)
        for (_, begin, until), numbers in alike.items():
            ends = self.piece_ends[numbers[0]]
            if ends is not None:
                yield np.array(numbers), ends, (begin, until)
