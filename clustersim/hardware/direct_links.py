"""How are the GPUs of a node joined where no switch stands between them?

Some pairs have links of their own, one or more, and others none: the fully connected xGMI of MI300X, the hybrid cube
mesh of DGX-1. A transfer takes its pair's links alone, so one pair has a part of what a GPU sends in all; where there
are none, the GPU between that has most of them passes it on (NCCL's PATH_NVB). A collective is free to choose its
neighbours: the library looks for rings over the members' links that share none in the same direction, and gives each an
equal part of the payload. What a pair carries of it is the part of the rings that pass it.

Assumption: as many rings as can be found are used. Where all pairs of a group have equally many links, rings can use
all of them evenly (the directed cycles through all members do, taken together); else they are searched, as NCCL does.
Where there is no ring at all, the members' own order is the ring, and GPUs between pass its messages on.
Reference: NVIDIA DGX-1 system architecture WP-08437-002 (three rings of single links); NVIDIA/nccl src/graph/search.cc
and paths.cc (v2.30); AMD CDNA 3 architecture whitepaper (seven links to seven GPUs).
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Final, Protocol, runtime_checkable

import numpy as np

from clustersim.common.arrays import FloatArray, IntArray
from clustersim.common.pickling import FieldState

MOST_PLACES: Final = 16
MOST_SEARCHED: Final = 8  # places of a domain whose pairs differ
_MOST_STEPS: Final = 20_000  # of a search for rings; the largest set that was found by then is taken

Ring = tuple[int, ...]
"""Places in the order in which data passes them, the smallest first."""


@dataclass(frozen=True)
class PairLinks(FieldState):
    """counts: [places][places] links between two places of a domain, as many both ways.

    Not slotted: tables are worked out once, when first asked for.
    """

    counts: tuple[tuple[int, ...], ...]

    @classmethod
    def full(cls, places: int) -> "PairLinks":
        """One link for every pair."""
        return cls(tuple(tuple(int(here != there) for there in range(places)) for here in range(places)))

    @classmethod
    def listed(cls, places: int, links: Sequence[tuple[int, int]]) -> "PairLinks":
        """A link for every pair that is listed; pairs that are listed twice have two."""
        counts = np.zeros((places, places), np.int64)
        for here, there in links:
            counts[here, there] += 1
            counts[there, here] += 1
        return cls(tuple(map(tuple, counts.tolist())))

    def first(self, places: int) -> "PairLinks":
        """The links among the first so many places."""
        return PairLinks(tuple(row[:places] for row in self.counts[:places]))

    @property
    def places(self) -> int:
        """GPUs of a domain."""
        return len(self.counts)

    @cached_property
    def count(self) -> IntArray:
        """Links of each pair: [places, places]."""
        return np.array(self.counts, np.int64)

    @property
    def per_gpu(self) -> int:
        """Links of the GPU that has most."""
        return int(self.count.sum(axis=1).max())

    @cached_property
    def widths(self) -> tuple[int, ...]:
        """The numbers of links that linked pairs have."""
        return tuple(int(width) for width in np.unique(self.count) if width)

    def pairs(self, width: int) -> IntArray:
        """Pairs of so many links, [pairs, 2], the lower place first, in the order of the higher one."""
        high, low = np.nonzero(np.tril(self.count) == width)
        return np.stack([low, high], axis=1)

    @cached_property
    def number(self) -> IntArray:
        """Which of the pairs of equally many links each is: [places, places]; -1 where there are no links."""
        number = np.full_like(self.count, -1)
        for width in self.widths:
            low, high = self.pairs(width).T
            number[low, high] = number[high, low] = np.arange(len(low))
        return number

    @cached_property
    def over(self) -> IntArray:
        """The place by which data gets from one to the other, [places, places]: the other itself where they are linked.

        -1 where no place between has links to both.
        """
        narrower = np.minimum(self.count[:, :, None], self.count[None, :, :])  # from, by way of, to
        best = np.where(narrower.max(axis=1) > 0, narrower.argmax(axis=1), -1)
        there = np.arange(self.places)
        linked = (self.count > 0) | (there[:, None] == there[None, :])
        return np.where(linked, there[None, :], best)

    def shares(self, members: int) -> FloatArray | None:
        """Part of what each member sends that goes to each other one, [places, places]; rows of members sum to 1.

        members: a bit for each place; None where no ring leads through all.
        """
        if members not in self._shares:
            self._shares[members] = self._spread([place for place in range(self.places) if members >> place & 1])
        return self._shares[members]

    @cached_property
    def _shares(self) -> dict[int, FloatArray | None]:
        return {}

    def _spread(self, group: Sequence[int]) -> FloatArray | None:
        inside = self.count[np.ix_(group, group)]
        rows, columns = np.ix_(group, group)
        shares = np.zeros(self.count.shape)
        others = inside[~np.eye(len(group), dtype=np.bool_)]
        if (others == others[:1]).all():
            if not others.any():
                return None
            shares[rows, columns] = (1.0 - np.eye(len(group))) / (len(group) - 1)
            return shares
        rings = most_rings(inside)
        for ring in rings:
            for here, there in zip(ring, (*ring[1:], ring[0]), strict=True):
                shares[group[here], group[there]] += 1.0 / len(rings)
        return shares if rings else None


@runtime_checkable
class Paired(Protocol):
    """A fabric that knows the links of its pairs of GPUs."""

    @property
    def pairs(self) -> PairLinks | None:
        """None where switches join the GPUs of a domain."""

    def seats(self, gpus: IntArray) -> IntArray:
        """Where GPUs stand in the machine (any shape): seat modulo `pairs.places` is the place in a domain."""

    def seated(self, seats: IntArray) -> IntArray:
        """The GPUs that stand there (any shape); the inverse of `seats`."""


def most_rings(counts: IntArray) -> list[Ring]:
    """The largest set of rings through all places that share no link in the same direction; counts: links of pairs.

    >>> most_rings(np.array([[0, 1, 1], [1, 0, 2], [1, 2, 0]]))
    [(0, 1, 2), (0, 2, 1)]
    """
    known, bound = list(_rings(counts)), int(counts.sum(axis=1).min())
    best: list[Ring] = []
    steps = 0
    waiting: list[tuple[int, list[Ring], IntArray]] = [(0, [], counts)]
    while waiting and len(best) < bound and steps < _MOST_STEPS:
        start, taken, left = waiting.pop()
        steps += 1
        best = max(best, taken, key=len)
        for number in range(len(known) - 1, start - 1, -1):  # the first one is looked at first
            rest = _without(left, known[number])
            if rest is not None and len(taken) + 1 + int(rest.sum(axis=1).min()) > len(best):
                waiting.append((number, [*taken, known[number]], rest))
    return best


def _rings(counts: IntArray, begun: Ring = (0,)) -> Iterator[Ring]:
    """Every ring from place 0 through all others over pairs that have links."""
    if len(begun) == len(counts):
        if counts[begun[-1], 0]:
            yield begun
        return
    for place in np.flatnonzero(counts[begun[-1]]).tolist():
        if place not in begun:
            yield from _rings(counts, (*begun, place))


def _without(left: IntArray, ring: Ring) -> IntArray | None:
    """What a ring leaves of the links in each direction; None if it needs one that is taken."""
    rest = left.copy()
    rest[list(ring), [*ring[1:], ring[0]]] -= 1
    return rest if rest.min() >= 0 else None
