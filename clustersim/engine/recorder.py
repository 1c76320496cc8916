"""Where do spans go while the engine runs?"""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Final, NamedTuple

import numpy as np

from clustersim.arrays import FloatArray, IntArray
from clustersim.engine.written import Inner, Written
from clustersim.trace.store import Contention, Trace
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


Place = tuple[int, int, int]
"""Of an operation: its rank, the rank's task, and where in the task's block."""
ALONE: Final = Longer()
ROUNDING: Final = 1e-12
"""Part of the clock below which a difference of two times says nothing: float64 keeps 2e-16, and times are sums."""


Row = tuple[int, int, int, int, Seconds, Seconds, Seconds, Seconds, Seconds, Seconds]
"""A span: rank, task, stream, cause; when it was queued, ready, started and ended; what was lost inside it (`Lost`)."""
_COLUMNS: Final = 10
_NUMBERS: Final = 4
"""How many columns a row has, and how many of them, the first, are whole numbers, which float64 holds exactly."""


@dataclass(slots=True)
class Recorder:
    """Appends rows; a row's number is its place."""

    whole: list[Row] = field(default_factory=list)
    met: dict[tuple[int, int, Hashable], list[int]] = field(default_factory=dict)
    pieces: list[tuple[int, int, int, int]] = field(default_factory=list)
    piece_times: list[tuple[Seconds, Seconds]] = field(default_factory=list)
    piece_ends: list[Inner | None] = field(default_factory=list)
    longer: list[tuple[int, int, int, Seconds, Seconds]] = field(default_factory=list)

    @property
    def rows(self) -> int:
        """How many there are."""
        return len(self.whole)

    def span(self, row: Row) -> int:
        """Write the span of a task; return its row."""
        self.whole.append(row)
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
        rows = np.fromiter(chain.from_iterable(self.whole), np.float64, _COLUMNS * self.rows).reshape(-1, _COLUMNS)
        rank, task, stream, cause = np.ascontiguousarray(rows[:, :_NUMBERS].T, dtype=np.int64)
        queued, ready, start, end, waited, slowed = np.ascontiguousarray(rows[:, _NUMBERS:].T)
        return Trace(
            rank=rank, task=task, stream=stream, cause=cause,
            leader=self._leaders(waited),
            queued=queued, ready=ready, start=start, end=end, waited=waited, slowed=slowed,
            contention=self._contention(rank, task),
            representative=representative,
        )  # fmt: skip

    def _leaders(self, waited: FloatArray) -> IntArray:
        """For each row the one of those that met that waited least; through groups of several roles, role by role."""
        leader = np.arange(self.rows)
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

    def written(self) -> Written:
        """The operations inside blocks that were run piece by piece."""
        return Written.of_pieces(self.pieces, self.piece_times, self.piece_ends)
