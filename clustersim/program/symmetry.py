"""Which ranks provably do the same at the same time?

Colour refinement on ranks and groups. A rank's first colour is its program, a group's what its collectives cost. Then
a group takes on the colours of its members (in order where order matters), a rank the colours of its groups, until the
number of colours stands still. In the stable colouring, ranks of one colour run the same tasks, with groups of the same
cost, against partners of the same colours; by induction over event times their timelines are equal, since the engine's
durations depend on nothing else. One rank of each colour is run for all of them. Where traffic shares links, links are
coloured too (`traffic`), and groups also take on the colours of the links that they cross.

Reference: Berkholz, Bonsma, Grohe, "Tight lower and upper bounds for the complexity of canonical colour refinement"
(2017).
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from clustersim.program.program import Groups, Program
from clustersim.program.traffic import NO_TRAFFIC, LinkColours, Traffic

IntArray = NDArray[np.int64]
FloatArray = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Classes:
    """colour: [ranks]; representative: [ranks] the lowest rank of each rank's colour; groups: colour of every group.

    links: [links] colour of every link; empty where links are not shared.
    """

    colour: IntArray
    representative: IntArray
    groups: Mapping[str, IntArray]
    links: IntArray = field(default_factory=lambda: np.zeros(0, dtype=np.int64))

    @property
    def count(self) -> int:
        """How many classes there are, so how many ranks must be simulated."""
        return int(self.colour.max()) + 1


def unfolded(program: Program, links: int = 0) -> Classes:
    """Every rank, every group and every one of `links` links its own class."""
    ranks = np.arange(program.ranks)
    groups = {role: np.arange(len(groups.members)) for role, groups in program.groups.items()}
    return Classes(ranks, ranks, groups, np.arange(links))


def classes(program: Program, costs: Mapping[str, FloatArray], traffic: Traffic = NO_TRAFFIC) -> Classes:
    """Coarsest stable colouring.

    costs: for each role [groups, exchanges] seconds that each exchange takes in each group; roles without an entry
    have equally fast groups. traffic: what crosses links that are shared.
    """
    colour = _compact(program.kind)
    links = LinkColours(traffic, {role: len(groups.members) for role, groups in program.groups.items()})
    first = {role: _first_colours(groups, costs.get(role)) for role, groups in program.groups.items()}
    while True:
        crossing = links.groups()
        by_role = {
            role: _group_colours(groups, _joined(first[role], crossing[role]), colour)
            for role, groups in program.groups.items()
        }
        before, refined = links.count, colour
        links.refine(by_role)
        for role, groups in program.groups.items():
            refined = _with_groups(refined, groups, by_role[role])
        if refined.max() == colour.max() and links.count == before:
            return Classes(colour, _representatives(colour), by_role, links.colour)
        colour = refined


def _first_colours(groups: Groups, costs: FloatArray | None) -> IntArray:
    if costs is None or costs.size == 0:
        return np.zeros(len(groups.members), dtype=np.int64)
    return np.unique(costs, axis=0, return_inverse=True)[1].reshape(-1).astype(np.int64)


def _group_colours(groups: Groups, first: IntArray, colour: IntArray) -> IntArray:
    """Colours of groups refined by those of their members."""
    inside = colour[groups.members]
    if not groups.ordered:
        inside = np.sort(inside, axis=1)
    refined = _joined(first, inside[:, 0])
    mixed = np.flatnonzero((inside != inside[:, :1]).any(axis=1))
    if len(mixed):
        # groups of one colour throughout are told apart by that colour; the others by all their members'
        rows = np.unique(inside[mixed], axis=0, return_inverse=True)[1].reshape(-1)
        extra = np.zeros(len(inside), dtype=np.int64)
        extra[mixed] = rows + 1
        refined = _joined(refined, extra)
    return refined


def _with_groups(colour: IntArray, groups: Groups, group_colour: IntArray) -> IntArray:
    """Colours of ranks refined by the colours of their groups of one role."""
    places = (0, 1) if groups.ordered else (None,)
    for place in places:
        row = groups.row_of(len(colour), place=place)
        colour = _joined(colour, np.where(row < 0, 0, group_colour[row] + 1))
    return colour


def _joined(left: IntArray, right: IntArray) -> IntArray:
    """One colour for each pair of colours, without collisions: colours stay below the number of ranks."""
    return _compact(left * (int(right.max()) + 1) + right)


def _compact(colour: IntArray) -> IntArray:
    return np.unique(colour, return_inverse=True)[1].reshape(-1).astype(np.int64)


def _representatives(colour: IntArray) -> IntArray:
    return np.unique(colour, return_index=True)[1][colour]
