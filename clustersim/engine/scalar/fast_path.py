"""What do pieces of a block take that follow each other, where nobody shares their links?

A piece of kernels is one phase; an exchange is its latency and then, if it moves anything, its load.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, chain, takewhile
from typing import NamedTuple

import numpy as np

from clustersim.common.units import Seconds
from clustersim.engine.kernel.network.fluid_network import Load
from clustersim.engine.recording.operation_log import Phases
from clustersim.engine.scalar.fluid_action import Paces
from clustersim.engine.scalar.sub_segment import Piece


class Phase(NamedTuple):
    """One of a piece. piece: its place in the course; load: what it asks of links, if it is the time that data move."""

    piece: int
    seconds: Seconds
    load: Load | None = None


@dataclass(frozen=True, slots=True, eq=False)
class Course:
    """Pieces that follow each other without a meeting, at least one of which asks something of links.

    first: [pieces + 1] the first phase of each, and how many phases there are; links: those that any of them loads;
    ends: when phases and operations begin.
    """

    pieces: tuple[Piece, ...]
    phases: tuple[Phase, ...]
    first: tuple[int, ...]
    links: tuple[int, ...]
    ends: Phases

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
        first = tuple(accumulate(map(len, phases), initial=0))
        return cls(some, every, first, tuple(links), _ends(some, every, whole))


def _ends(pieces: Sequence[Piece], phases: Sequence[Phase], whole: Paces) -> Phases:
    """When operations of pieces begin: exchanges with their phase, kernels behind the first one of their piece."""
    sizes = [piece.end - piece.begin for piece in pieces]
    first = np.searchsorted([phase.piece for phase in phases], np.arange(len(pieces) + 1))
    alone = np.array(whole.alone)
    behind = np.concatenate([alone[piece.begin : piece.end] - alone[piece.begin] for piece in pieces])
    seconds = tuple(phase.seconds for phase in phases)
    return Phases(seconds, np.repeat(first, [*sizes, 1]), behind)


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
