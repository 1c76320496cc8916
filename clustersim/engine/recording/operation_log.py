"""Which operations inside blocks did the engine write, and when did each of them run?

Blocks that are not one event are written piece by piece. When each operation of a piece ran follows from when the piece
began, so it is worked out of those pieces that are asked for.
"""

from collections.abc import Iterator, Sequence, Set
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Protocol, Self

import numpy as np

from clustersim.common.arrays import FloatArray, IntArray
from clustersim.common.units import Seconds
from clustersim.trace.trace import OperationSpans


class Inner(Protocol):
    """What is known of the ends of operations that ran one behind the other."""

    def reached(self, first: FloatArray, begin: int, until: int) -> FloatArray:
        """When operations from `begin` on begin, and that before `until` ends: [runs, until - begin + 1].

        first: [runs] when the first one of them begins.
        """


@dataclass(frozen=True, slots=True, eq=False)
class Phases:
    """Operations of which some begin where a phase does, and others so long behind (an `Inner`).

    seconds: [phases]; phase: [operations + 1] in which each begins, and how many phases there are; behind: [operations]
    seconds after the phase has begun. Phases are added up one by one, as a clock would that stopped at each of them, so
    that times are equal to the last digit.
    """

    seconds: tuple[Seconds, ...]
    phase: IntArray
    behind: FloatArray

    def times(self, start: Seconds) -> list[Seconds]:
        """When each phase begins, and the last one ends, if the first begins at `start`."""
        return list(accumulate(self.seconds, initial=start))

    def reached(self, first: FloatArray, begin: int, until: int) -> FloatArray:
        """See `Inner`; `begin` is the first of all operations, `until` one that begins with its phase, or the end."""
        every = np.broadcast_to(np.array(self.seconds), (len(first), len(self.seconds)))
        times = np.add.accumulate(np.hstack([first[:, None], every]), axis=1)
        count = until - begin
        begins = times[:, self.phase[:count]] + self.behind[:count]
        return np.hstack([begins, times[:, self.phase[count], None]])


@dataclass(frozen=True, slots=True, eq=False)
class Written:
    """Pieces: operations `begin` to before `until` of the block of a rank's task, from `first` to `last`.

    All but ends are [pieces]; ends: distinct ones; inner: which of these a piece has, -1 for a single operation.
    """

    rank: IntArray
    task: IntArray
    begin: IntArray
    until: IntArray
    first: FloatArray
    last: FloatArray
    inner: IntArray
    ends: tuple[Inner, ...]

    @classmethod
    def of_pieces(
        cls,
        pieces: Sequence[tuple[int, int, int, int]],
        times: Sequence[tuple[Seconds, Seconds]],
        ends: Sequence[Inner | None],
    ) -> Self:
        """Pieces as they ran: their places, their times, their ends."""
        numbers: dict[int, int] = {}
        inner = [-1 if end is None else numbers.setdefault(id(end), len(numbers)) for end in ends]
        distinct = {id(item): item for item in ends if item is not None}
        rank, task, begin, until = np.array(pieces, dtype=np.int64).reshape(-1, 4).T
        first, last = np.array(times, dtype=np.float64).reshape(-1, 2).T
        which = np.array(inner, dtype=np.int64)
        return cls(rank, task, begin, until, first, last, which, tuple(distinct[element] for element in numbers))

    def repeated(self, source: IntArray, further: IntArray, later: FloatArray) -> Self:
        """Pieces again: [n] which of these each is, by how much its task's number is higher, its seconds later."""
        rank, begin, until, inner = (array[source] for array in (self.rank, self.begin, self.until, self.inner))
        first, last, task = self.first[source] + later, self.last[source] + later, self.task[source] + further
        return replace(self, rank=rank, task=task, begin=begin, until=until, first=first, last=last, inner=inner)

    def __len__(self) -> int:
        """How many operations."""
        return int((self.until - self.begin).sum())

    def of(self, rank: int, tasks: Set[int]) -> OperationSpans:
        """The operations of some tasks of one rank, in the order in which their pieces ended."""
        own = np.flatnonzero(self.rank == rank)
        return self._spans(own[np.isin(self.task[own], list(tasks))])

    def _spans(self, pieces: IntArray) -> OperationSpans:
        """The operations of some pieces."""
        begin, many = self.begin[pieces], (self.until - self.begin)[pieces]
        row = np.concatenate(([0], np.cumsum(many)))
        piece = np.repeat(np.arange(len(many)), many)
        start, end = self.first[pieces][piece], self.last[pieces][piece]
        for some in self._alike(pieces):
            ends, (first, *_) = self.ends[self.inner[pieces[some[0]]]], pieces[some]
            times = ends.reached(self.first[pieces[some]], int(self.begin[first]), int(self.until[first]))
            rows = row[some, None] + np.arange(times.shape[1] - 1)
            start[rows], end[rows[:, :-1]] = times[:, :-1], times[:, 1:-1]
        operation = np.arange(len(piece)) - row[piece] + begin[piece]
        own = pieces[piece]
        return OperationSpans(self.rank[own], self.task[own], operation, start, end, *np.zeros((2, len(piece))))

    def _alike(self, pieces: IntArray) -> Iterator[IntArray]:
        """Places among some pieces of those of the same several operations with the same ends."""
        long = np.flatnonzero(self.until[pieces] - self.begin[pieces] > 1)
        told = np.stack([column[pieces[long]] for column in (self.inner, self.begin, self.until)], axis=1)
        _, which = np.unique(told, axis=0, return_inverse=True)
        order = np.argsort(which.reshape(-1), kind="stable")
        cuts = np.flatnonzero(np.diff(which.reshape(-1)[order])) + 1
        yield from (long[some] for some in np.split(order, cuts) if len(some))
