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
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from clustersim.common.arrays import FloatArray, IntArray
from clustersim.common.lru import Recent
from clustersim.program.program import Groups, Program
from clustersim.symmetry.labels import compact, joined, ranked, rows
from clustersim.symmetry.link_load_matrix import NO_TRAFFIC, LinkColours, Traffic

KEPT: Final = 16_000_000
"""Bytes of colourings, and of what they follow from, that are remembered."""


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


_RECENT: Final = Recent[Classes](KEPT)


def unfolded(program: Program, links: int = 0) -> Classes:
    """Every rank, every group and every one of `links` links its own class."""
    ranks = np.arange(program.ranks)
    groups = {role: np.arange(len(groups.members)) for role, groups in program.groups.items()}
    return Classes(ranks, ranks, groups, np.arange(links))


def classes(
    program: Program,
    costs: Mapping[str, FloatArray],
    traffic: Traffic = NO_TRAFFIC,
    *,
    machine: IntArray | None = None,
) -> Classes:
    """Coarsest stable colouring.

    costs: for each role [groups, exchanges] seconds that each exchange takes in each group; roles without an entry
    have equally fast groups. traffic: what crosses links that are shared. machine: [ranks] number, from 0 on, of the
    machine that each rank runs on; ranks of different machines are never alike. The last ones are remembered: steps
    that are compared often differ in nothing that tells ranks apart.
    """
    colour = compact(program.kind) if machine is None else joined(program.kind, machine)
    first = {role: _first_colours(groups, costs.get(role)) for role, groups in program.groups.items()}
    told = _told(program.groups, colour, first, traffic)
    if sum(array.nbytes for array in told) > KEPT:
        return _stable(program.groups, colour, first, traffic)
    shapes = tuple((role, group.ordered, group.members.shape) for role, group in program.groups.items())
    crossed = tuple((role, len(crossing)) for role, crossing in traffic.crossings.items())
    key = shapes, crossed, *(item.tobytes() for item in told)
    return _RECENT.of(key, lambda: _stable(program.groups, colour, first, traffic))


def _told(
    groups: Mapping[str, Groups], colour: IntArray, first: Mapping[str, IntArray], traffic: Traffic
) -> list[NDArray[Any]]:
    """All arrays from which the stable colouring follows."""
    crossings = [item for listed in traffic.crossings.values() for item in listed]
    columns = [column for crossing in crossings for column in (crossing.group, crossing.link, crossing.seconds)]
    return [colour, *(group.members for group in groups.values()), *first.values(), traffic.links, *columns]


def _stable(groups: Mapping[str, Groups], colour: IntArray, first: Mapping[str, IntArray], traffic: Traffic) -> Classes:
    """Refine first colours of ranks, groups and links until their number stands still."""
    links = LinkColours(traffic, {role: len(group.members) for role, group in groups.items()})
    while True:
        crossing = links.groups()
        by_role = {
            role: _group_colours(item, joined(first[role], crossing[role]), colour) for role, item in groups.items()
        }
        before, refined = links.count, colour
        links.refine(by_role)
        for role, element in groups.items():
            refined = _with_groups(refined, element, by_role[role])
        if refined.max() == colour.max() and links.count == before:
            return Classes(colour, _representatives(colour), by_role, links.colour)
        colour = refined


def _first_colours(groups: Groups, costs: FloatArray | None) -> IntArray:
    if costs is None or costs.size == 0:
        return np.zeros(len(groups.members), dtype=np.int64)
    return rows(np.stack([ranked(column) for column in costs.T], axis=1))


def _group_colours(groups: Groups, first: IntArray, colour: IntArray) -> IntArray:
    """Colours of groups refined by those of their members."""
    inside = colour[groups.members]
    mixed = np.flatnonzero((inside != inside[:, :1]).any(axis=1))
    # groups of one colour throughout are told apart by that colour; the others by all their members'
    told = inside[:, 0] + 1
    told[mixed] = 0
    if len(mixed) > 1:
        extra = np.zeros(len(inside), dtype=np.int64)
        extra[mixed] = rows(inside[mixed] if groups.ordered else np.sort(inside[mixed], axis=1))
        told = joined(told, extra)
    return joined(first, told)


def _with_groups(colour: IntArray, groups: Groups, group_colour: IntArray) -> IntArray:
    """Colours of ranks refined by the colours of their groups of one role."""
    places = (0, 1) if groups.ordered else (None,)
    for place in places:
        around = np.zeros(len(colour), dtype=np.int64)
        members = groups.members if place is None else groups.members[:, place, None]
        around[members] = group_colour[:, None] + 1
        colour = joined(colour, around)
    return colour


def _representatives(colour: IntArray) -> IntArray:
    lowest = np.full(int(colour.max(initial=-1)) + 1, len(colour))
    np.minimum.at(lowest, colour, np.arange(len(colour)))
    return lowest[colour]
