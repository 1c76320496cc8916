"""What do the operations of each task take on many ranks that run the same program, and who meets for them?"""

from dataclasses import dataclass, field, replace
from typing import Final

import numpy as np

from clustersim.cost.block import BlockCost, BlockTiming
from clustersim.cost.jitter import Jitter
from clustersim.engine.meeting import FloatArray, IntArray, Meeting
from clustersim.engine.play import Outline, Pieces, outline
from clustersim.program.program import Program, RankProgram
from clustersim.program.symmetry import Classes
from clustersim.program.task import Block

AHEAD: Final = 512
"""Operations whose factors are drawn at once."""


@dataclass(slots=True, eq=False)
class BlockPieces:
    """ranks: simulated ranks of one kind; meetings: for each role who of them meet, None where each is alone."""

    program: RankProgram
    ranks: IntArray
    cost: BlockCost
    jitter: Jitter | None
    meetings: dict[str, Meeting | None]
    slowdown: FloatArray = field(init=False)
    _known: dict[Block, tuple["_Timed", Outline | None]] = field(init=False, default_factory=dict)
    _factors: "_Factors | None" = field(init=False, default=None)

    def __post_init__(self) -> None:
        machines = self.cost.machines
        self.slowdown = np.array([kind.interference for kind in machines.kinds])[machines.of[self.ranks]]

    def of(self, number: int, block: Block) -> tuple[Pieces, Outline | None]:
        """Pieces of the block of task `number`, and how it runs undisturbed (`outline`)."""
        known = self._known.get(block)
        if known is None:
            timed = self._timed(block)
            known = self._known[block] = timed, outline(timed.pieces)
        if self.jitter is None:
            return known[0].pieces, known[1]
        varied = self._varied(self.jitter, known[0], self.program.operations_before[number])
        return varied, outline(varied)

    def _timed(self, block: Block) -> "_Timed":
        _, which, place = np.unique(self.cost.numbers(block)[self.ranks], return_index=True, return_inverse=True)
        timings = [self.cost.block(int(self.ranks[each]), block) for each in which]
        kernels = np.stack([timing.kernels for timing in timings])
        rest = np.stack([timing.rest(timing.kernels) for timing in timings])
        roles = [operation.exchange.group if operation.exchange else None for operation in block.operations]
        meetings = tuple(None if role is None else self.meetings[role] for role in roles)
        if len(timings) > 1:
            kernels, rest = kernels[place.reshape(-1)], rest[place.reshape(-1)]
        return _Timed(timings, place.reshape(-1), Pieces(kernels, rest, self.slowdown, meetings))

    def _varied(self, jitter: Jitter, timed: "_Timed", first: int) -> Pieces:
        if self._factors is None:
            self._factors = _Factors(jitter, self.ranks)
        kernels = timed.pieces.kernels * self._factors.of(first, len(timed.pieces.meetings))
        if not any(timing.together for timing in timed.timings):
            return replace(timed.pieces, kernels=kernels)
        rest = np.empty_like(kernels)
        for number, timing in enumerate(timed.timings):
            rest[timed.number == number] = timing.rest(kernels[timed.number == number])
        return replace(timed.pieces, kernels=kernels, rest=rest)


@dataclass(frozen=True, slots=True, eq=False)
class _Timed:
    """A block on many ranks. timings: those that there are; number: [ranks] which of them each rank has."""

    timings: list[BlockTiming]
    number: IntArray
    pieces: Pieces


class _Factors:
    """Factors of operations of many ranks, drawn some operations ahead: there may be 10^8 of them."""

    def __init__(self, jitter: Jitter, ranks: IntArray) -> None:
        self._jitter = jitter
        self._generators = [jitter.generator(rank) for rank in ranks.tolist()]
        self._first = 0
        self._drawn = np.empty((len(ranks), 0))

    def of(self, first: int, count: int) -> FloatArray:
        """Factors of operations `first` and on, none before those that were asked for last: [ranks, count]."""
        begin, drawn = first - self._first, self._drawn
        missing = begin + count - drawn.shape[1]
        if missing > 0:
            fresh = np.empty((len(drawn), max(AHEAD, missing)))
            self._jitter.draw(self._generators, fresh)
            kept = drawn[:, begin:], fresh[:, max(begin - drawn.shape[1], 0) :]
            self._drawn, self._first, begin = np.concatenate(kept, axis=1), first, 0
        return self._drawn[:, begin : begin + count]


def group_colours(program: Program, classes: Classes, role: str, ranks: IntArray) -> IntArray:
    """Colour of the group of a role that each of some simulated ranks is in; ranks of equal colours meet."""
    return classes.groups[role][program.rows[role][ranks]]


def meetings_of(program: Program, classes: Classes, ranks: IntArray) -> dict[str, Meeting | None]:
    """Who of some ranks meet in the groups of each role; None where each is alone."""
    found: dict[str, Meeting | None] = {}
    for role, rows in program.rows.items():
        if (rows[ranks] >= 0).all() and not program.groups[role].ordered:
            meeting = Meeting.of(group_colours(program, classes, role, ranks))
            found[role] = None if meeting.alone else meeting
    return found
