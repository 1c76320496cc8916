"""What do pieces of a block take that follow each other, where nobody shares their links?

A piece of kernels is one phase; an exchange is its latency and then, if it moves anything, its load. Phases are added
up one by one, as a clock would that stopped at each of them, so that their times are equal to the last digit.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, chain, takewhile
from typing import NamedTuple

import numpy as np

from clustersim.arrays import FloatArray
from clustersim.engine.network.network import Load
from clustersim.engine.piece import Piece
from clustersim.engine.stretch import Paces
from clustersim.units import Seconds


class Phase(NamedTuple):
    """One of a piece. piece: its place in the course; load: what it asks of links, if it is the time that data move."""

    piece: int
    seconds: Seconds
    load: Load | None = None


@dataclass(frozen=True, slots=True, eq=False)
class Course:
    """Pieces that follow each other without a meeting, at least one of which asks something of links.

    first: [pieces + 1] the first phase of each, and how many phases there are; links: those that any of them loads;
    offsets: [operations] where each begins in its piece.
    """

    pieces: tuple[Piece, ...]
    phases: tuple[Phase, ...]
    first: tuple[int, ...]
    links: tuple[int, ...]
    offsets: FloatArray

    @classmethod
    def of(cls, pieces: Sequence[Piece], whole: Paces) -> "Course | None":
        """The pieces up to one that cannot be in a course; None where these load no links, or are only one.

        whole: paces of their block.
        """
        some = tuple(takewhile(_passes, pieces))
        phases = [tuple(_phases(place, piece)) for place, piece in enumerate(some)]
        every = tuple(chain.from_iterable(phases))
        links = dict.fromkeys(link for phase in every if phase.load for link in phase.load.numbers)
        if not links or len(some) == 1:
            return None
        ends = np.array(whole.alone)
        offsets = [ends[piece.begin : piece.end] - ends[piece.begin] for piece in some]
        first = tuple(accumulate(map(len, phases), initial=0))
        return cls(some, every, first, tuple(links), np.concatenate(offsets))

    def times(self, start: Seconds) -> list[Seconds]:
        """When each phase begins, and the last one ends, if the course begins at `start`."""
        return list(accumulate((phase.seconds for phase in self.phases), initial=start))

    def reached(self, first: FloatArray, begin: int, until: int) -> FloatArray:
        """When operations begin, and the last one ends, in runs that begin at `first`: [runs, until - begin + 1].

        begin, until: places in the block, of the course's first operation and behind the last one of a piece.
        """
        seconds = np.array([phase.seconds for phase in self.phases])
        every = np.broadcast_to(seconds, (len(first), len(seconds)))
        times = np.add.accumulate(np.hstack([first[:, None], every]), axis=1)
        sizes = [piece.end - piece.begin for piece in self.pieces if piece.end <= until]
        phase = np.repeat(self.first[: len(sizes)], sizes)
        begins = times[:, phase] + self.offsets[: len(phase)]
        return np.hstack([begins, times[:, self.first[len(sizes)], None]])


def _passes(piece: Piece) -> bool:
    """Whether a piece meets nobody, always lasts as long, and loads links at full speed if nobody else does."""
    if piece.met is not None or piece.paces is None:
        return False
    transfer = piece.transfer
    return transfer is None or (transfer.beside is None and (transfer.load is None or transfer.load.alone))


def _phases(place: int, piece: Piece) -> Iterator[Phase]:
    transfer = piece.transfer
    if transfer is not None:
        yield Phase(place, transfer.latency)
        if transfer.load is not None:
            yield Phase(place, transfer.load.seconds, transfer.load)
    elif piece.paces is not None:
        yield Phase(place, piece.paces.alone[-1])
