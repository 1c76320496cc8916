"""What does a trace look like whose middle was not run, because it repeats what was run before?

A recorder notes where its last rows begin to be repeated and how often (`Repeat`); rows that follow were written with
the clock as it was, and with the numbers that their tasks really have. `Unrolled` says of every row of the whole trace
which written row it is, and by how much its time, its task and its cause are later.

Example: rows a b c d e f, of which c d are written when they are found to repeat twice more, 1 s each time. The whole
is a b c d c' d' c'' d'' e f, where c' is c one second and one period of tasks later, and e and f are two seconds later
than they were written. What is repeated may hold repeats itself: layers within microbatches.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final, NamedTuple, Self

import numpy as np

from clustersim.common.arrays import FloatArray, IntArray
from clustersim.common.units import Seconds


class Sizes(NamedTuple):
    """Lengths of a recorder's lists."""

    rows: int
    pieces: int
    longer: int

    def plus(self, other: "Sizes", times: int = 1) -> "Sizes":
        """Both together, the other one several times."""
        return Sizes(*(own + item * times for own, item in zip(self, other, strict=True)))


NAMES: Final = 1 << 24
"""More tasks than any rank has: the name of a row is its rank times this, plus its task."""
NOTHING: Final = Sizes(0, 0, 0)
ROWS, PIECES, LONGER = range(3)
"""Places in it."""


@dataclass(frozen=True, slots=True)
class Repeat:
    """What lies from `begin` to `end`, counted with earlier repeats, is there `times` more.

    written: how much was really written until then; seconds: from one time to the next; tasks: [ranks] by how much
    numbers of tasks go up; first: [ranks] the first task of each in it.
    """

    begin: Sizes
    end: Sizes
    written: Sizes
    times: int
    seconds: Seconds
    tasks: IntArray
    first: IntArray

    def named(self, names: IntArray, times: IntArray | int) -> IntArray:
        """Names of rows so many times later; those from before it and the period before it stay what they are.

        What is repeated follows from what is of the same period or of the one before, but for what was there already.
        """
        rank, task = names // NAMES, names % NAMES
        there = (names < 0) | (task < self.first[rank] - self.tasks[rank])
        return np.where(there, names, names + times * self.tasks[rank])

    @property
    def size(self) -> Sizes:
        """How much is there each time."""
        return self.end.plus(self.begin, -1)


@dataclass(slots=True)
class Unrolled:
    """source: which written row each of the whole trace is; later: seconds; further: numbers of tasks."""

    source: IntArray
    later: FloatArray
    further: IntArray
    _filled: int = field(default=0)

    @classmethod
    def of(cls, repeats: Sequence[Repeat], rank: IntArray, kind: int) -> Self:
        """All rows of a list; rank: [written] of each that was written."""
        many = len(rank) + sum(repeat.size[kind] * repeat.times for repeat in repeats)
        made = cls(np.zeros(many, dtype=np.int64), np.zeros(many), np.zeros(many, dtype=np.int64))
        done, later = 0, 0.0
        for item in repeats:
            made._written(done, item.written[kind], later)
            made._repeated(item, kind, rank)
            done, later = item.written[kind], later + item.times * item.seconds
        made._written(done, len(rank), later)
        return made

    def _written(self, first: int, last: int, later: Seconds) -> None:
        """Rows from `first` to before `last` as they were written, by some seconds later."""
        place = slice(self._filled, self._filled + last - first)
        self.source[place], self.later[place] = np.arange(first, last), later
        self._filled = place.stop

    def _repeated(self, repeat: Repeat, kind: int, rank: IntArray) -> None:
        own = slice(repeat.begin[kind], repeat.end[kind])
        many = own.stop - own.start
        place = slice(self._filled, self._filled + many * repeat.times)
        turn = np.repeat(np.arange(1, repeat.times + 1), many)
        self.source[place] = source = np.tile(self.source[own], repeat.times)
        self.later[place] = np.tile(self.later[own], repeat.times) + turn * repeat.seconds
        self.further[place] = np.tile(self.further[own], repeat.times) + turn * repeat.tasks[rank[source]]
        self._filled = place.stop


def caused(repeats: Sequence[Repeat], found: IntArray) -> IntArray:
    """Names of the rows that allowed the starts of all rows, from those of the written ones that they are: [rows]."""
    for repeat in repeats:
        many = repeat.size.rows
        own = np.tile(found[repeat.begin.rows : repeat.end.rows], repeat.times)
        turn = np.repeat(np.arange(1, repeat.times + 1), many)
        found[repeat.end.rows : repeat.end.rows + many * repeat.times] = repeat.named(own, turn)
    return found
