"""What do the operations of each task take on many ranks that run the same program, and who meets for them?"""

from dataclasses import dataclass, field, replace
from typing import Final

import numpy as np

from clustersim.common.arrays import FloatArray, IntArray
from clustersim.cost.jitter import Jitter
from clustersim.cost.segment import BlockCost, BlockTiming
from clustersim.engine.vectorized.group_sync import Meeting
from clustersim.engine.vectorized.segment_eval import Outline, Pieces, outline
from clustersim.program.program import Program, RankProgram
from clustersim.program.task import Block
from clustersim.symmetry.refinement import Classes

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
    _known: dict[Block, tuple["_Timed", Outline | None]] = field(init=False, default_factory=dict)
    _factors: "_Factors | None" = field(init=False, default=None)

    @property
    def slowed(self) -> bool:
        """Whether collectives of the data stream slow any kernel of these ranks."""
        return self.cost.slows(self.ranks)

    def of(self, number: int, block: Block) -> tuple[Pieces, Outline | None]:
        """Pieces of the block of task `number`, and how it runs undisturbed (`outline`)."""
        timed, outlined = self._block(block)
        factors = self.factors(self.program.operations_before[number], len(block.operations))
        if factors is None:
            return timed.pieces, outlined
        varied = _varied(timed, timed.pieces, factors)
        return varied, outline(varied)

    def several(self, block: Block, factors: FloatArray | None) -> Pieces:
        """Pieces of several runs of a block; factors: [ranks, runs, operations] if there is jitter."""
        timed = self._block(block)[0]
        one = timed.pieces
        runs = replace(one, kernels=one.kernels[:, None], rest=one.rest[:, None], slowing=one.slowing[:, :, None])
        return runs if factors is None else _varied(timed, runs, factors)

    def factors(self, first: int, count: int) -> FloatArray | None:
        """Factors of some operations of the program, none before those that were asked for last: [ranks, count]."""
        if self.jitter is None:
            return None
        if self._factors is None:
            self._factors = _Factors(self.jitter, self.ranks)
        return self._factors.of(first, count)

    def _block(self, block: Block) -> tuple["_Timed", Outline | None]:
        known = self._known.get(block)
        if known is None:
            timed = self._timed(block)
            known = self._known[block] = timed, outline(timed.pieces)
        return known

    def _timed(self, block: Block) -> "_Timed":
        _, which, place = np.unique(self.cost.numbers(block)[self.ranks], return_index=True, return_inverse=True)
        timings = [self.cost.block(int(self.ranks[item]), block) for item in which]
        kernels = np.stack([timing.kernels for timing in timings])
        rest = np.stack([timing.rest(timing.kernels) for timing in timings])
        slowing = np.stack([self.cost.slowing(int(self.ranks[element]), block) for element in which], axis=1)
        roles = [operation.exchange.group if operation.exchange else None for operation in block.operations]
        meetings = tuple(None if role is None else self.meetings[role] for role in roles)
        if len(timings) > 1:
            place = place.reshape(-1)
            kernels, rest, slowing = kernels[place], rest[place], slowing[:, place]
        return _Timed(timings, place.reshape(-1), Pieces(len(self.ranks), kernels, rest, slowing, meetings))


@dataclass(frozen=True, slots=True, eq=False)
class _Timed:
    """A block on many ranks. timings: those that there are; number: [ranks] which of them each rank has."""

    timings: list[BlockTiming]
    number: IntArray
    pieces: Pieces


def _varied(timed: _Timed, pieces: Pieces, factors: FloatArray) -> Pieces:
    """Pieces with kernels that take other times; factors: [ranks, .., operations]."""
    kernels = pieces.kernels * factors
    if not any(timing.together for timing in timed.timings):
        return replace(pieces, kernels=kernels)
    rest = np.empty_like(kernels)
    for number, timing in enumerate(timed.timings):
        rest[timed.number == number] = timing.rest(kernels[timed.number == number])
    return replace(pieces, kernels=kernels, rest=rest)


class _Factors:
    """Factors of operations of many ranks, drawn some operations ahead: there may be 10^8 of them."""

    def __init__(self, jitter: Jitter, ranks: IntArray) -> None:
        self._jitter = jitter
        self._generators = [jitter.generator(rank) for rank in ranks.tolist()]
        self._first = 0
        self._drawn = np.empty((len(ranks), 0))

    def of(self, first: int, count: int) -> FloatArray:
        """Factors of operations `first` and on, none before those that were asked for last: [ranks, count]."""
        self._skip(first)
        begin, drawn = first - self._first, self._drawn
        missing = begin + count - drawn.shape[1]
        if missing > 0:
            fresh = np.empty((len(drawn), max(AHEAD, missing)))
            self._jitter.draw(self._generators, fresh)
            self._drawn, self._first, begin = np.concatenate((drawn[:, begin:], fresh), axis=1), first, 0
        return self._drawn[:, begin : begin + count]

    def _skip(self, first: int) -> None:
        """Draw what is not asked for in portions, and keep nothing of it."""
        end = self._first + self._drawn.shape[1]
        if first <= end:
            return
        for begin in range(end, first, AHEAD):
            self._jitter.draw(self._generators, np.empty((len(self._drawn), min(AHEAD, first - begin))))
        self._first, self._drawn = first, self._drawn[:, :0]


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
