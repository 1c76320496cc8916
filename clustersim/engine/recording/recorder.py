"""Where do spans go while the engine runs?"""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Final, NamedTuple, Self

import numpy as np

from clustersim.common.arrays import FloatArray, IntArray
from clustersim.common.units import Seconds
from clustersim.engine.recording.operation_log import Inner, Written
from clustersim.engine.recording.unroll import LONGER, NAMES, NOTHING, PIECES, ROWS, Repeat, Sizes, Unrolled, caused
from clustersim.trace.trace import Contention, Trace


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
        least = ROUNDING * abs(now)
        return Longer(*(item if abs(item) > least else 0.0 for item in self)) if max(map(abs, self)) > least else ALONE


Place = tuple[int, int, int]
"""Of an operation: its rank, the rank's task, and where in the task's block."""
ALONE: Final = Longer()
ROUNDING: Final = 1e-12
"""Part of the clock below which a difference of two times says nothing: float64 keeps 2e-16, and times are sums."""


Row = tuple[int, int, int, int, Seconds, Seconds, Seconds, Seconds, Seconds, Seconds]
"""A span: rank, task, stream, cause; when it was queued, ready, started and ended; what was lost inside it (`Lost`).

The cause is the name of the row whose end allowed the start: its rank times `NAMES` plus its task; -1: nothing did.
"""
_COLUMNS: Final = 10
RANK, TASK, STREAM, CAUSE = range(4)
TIMES: Final = slice(4, 8)
LOST: Final = slice(8, 10)
"""Columns of a row. The first four are whole numbers, which float64 holds exactly."""


@dataclass(slots=True)
class Recorder:
    """Appends rows. A row is named by its rank and its task, as it may be written anywhere (`NAMES`)."""

    whole: list[Row] = field(default_factory=list)
    met: dict[tuple[int, int, Hashable], list[int]] = field(default_factory=dict)
    pieces: list[tuple[int, int, int, int]] = field(default_factory=list)
    piece_times: list[tuple[Seconds, Seconds]] = field(default_factory=list)
    piece_ends: list[Inner | None] = field(default_factory=list)
    longer: list[tuple[int, int, int, Seconds, Seconds]] = field(default_factory=list)
    repeats: list[Repeat] = field(default_factory=list)
    later: Seconds = 0.0
    _repeated: Sizes = NOTHING

    @property
    def rows(self) -> int:
        """How many there are, with those that are repeated."""
        return len(self.whole) + self._repeated.rows

    @property
    def sizes(self) -> Sizes:
        """How much is written, with what is repeated."""
        return self.written_down.plus(self._repeated)

    @property
    def written_down(self) -> Sizes:
        """How much is written, without what is repeated."""
        return Sizes(len(self.whole), len(self.pieces), len(self.longer))

    def span(self, row: Row) -> None:
        """Write the span of a task."""
        self.whole.append(row)

    def repeat(self, repeat: Repeat) -> None:
        """Let what was written last be written again, a few times; what follows is that much later."""
        self.repeats.append(repeat)
        self._repeated = self._repeated.plus(repeat.size, repeat.times)
        self.later += repeat.seconds * repeat.times

    def meet(self, rank: int, task: int, groups: Sequence[Hashable]) -> None:
        """Note that a span is of a block in which its rank met the members of groups, first come first."""
        for place, group in enumerate(groups):
            self.met.setdefault((place, task, group), []).append(rank * NAMES + task)

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
        rows = np.fromiter(chain.from_iterable(self.whole), np.float64, _COLUMNS * len(self.whole))
        columns = rows.reshape(-1, _COLUMNS)
        if self.repeats:
            unrolled = Unrolled.of(self.repeats, columns[:, RANK].astype(np.int64), ROWS)
            columns = columns[unrolled.source]
            columns[:, CAUSE] = caused(self.repeats, columns[:, CAUSE].astype(np.int64))
            columns[:, TASK] += unrolled.further
            columns[:, TIMES] += unrolled.later[:, None]
        rank, task, stream, cause = np.ascontiguousarray(columns[:, : TIMES.start].T, dtype=np.int64)
        queued, ready, start, end, waited, slowed = np.ascontiguousarray(columns[:, TIMES.start :].T)
        named = _Named.of(rank, task)
        return Trace(
            rank=rank, task=task, stream=stream, cause=np.where(cause < 0, -1, named.rows(cause)),
            leader=self._leaders(named, waited),
            queued=queued, ready=ready, start=start, end=end, waited=waited, slowed=slowed,
            contention=self._contention(named),
            representative=representative,
        )  # fmt: skip

    def _leaders(self, named: "_Named", waited: FloatArray) -> IntArray:
        """For each row the one of those that met that waited least; through groups of several roles, role by role."""
        leader = np.arange(len(waited))
        for _, names in sorted(self.met.items(), key=lambda met: met[0][0]):
            rows = named.rows(np.array(names))
            first = rows[int(np.argmin(waited[leader[rows]]))]
            leader[rows] = leader[first]
        return leader

    def _contention(self, named: "_Named") -> Contention:
        """What sharing links changed."""
        if not self.longer:
            return Contention.none()
        longer = np.array(self.longer, dtype=np.float64)
        if self.repeats:
            unrolled = Unrolled.of(self.repeats, longer[:, RANK].astype(np.int64), LONGER)
            longer = longer[unrolled.source]
            longer[:, TASK] += unrolled.further
        *places, exposed, moved = longer.T
        ranks, tasks, operation = (np.ascontiguousarray(item, dtype=np.int64) for item in places)
        row = named.rows(ranks * NAMES + tasks)
        by_row = np.argsort(row, kind="stable")
        return Contention(row[by_row], operation[by_row], exposed[by_row], moved[by_row])

    def written(self) -> Written:
        """The operations inside blocks that were run piece by piece."""
        written = Written.of_pieces(self.pieces, self.piece_times, self.piece_ends)
        if not self.repeats:
            return written
        unrolled = Unrolled.of(self.repeats, written.rank, PIECES)
        return written.repeated(unrolled.source, unrolled.further, unrolled.later)


@dataclass(frozen=True, slots=True)
class _Named:
    """Where the row of each name is. number: [ranks] of simulated ranks; row: [simulated ranks, tasks]."""

    number: IntArray
    row: IntArray

    @classmethod
    def of(cls, rank: IntArray, task: IntArray) -> Self:
        """Rows by their rank and task."""
        there = np.bincount(rank) > 0
        number = np.cumsum(there) - 1
        row = np.full((int(there.sum()), int(task.max(initial=-1)) + 1), -1)
        row[number[rank], task] = np.arange(len(rank))
        return cls(number, row)

    def rows(self, names: IntArray) -> IntArray:
        """The rows of names; of none (-1) any."""
        rows: IntArray = self.row[self.number[names // NAMES], names % NAMES % self.row.shape[1]]
        return rows
