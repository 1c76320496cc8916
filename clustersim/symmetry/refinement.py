"""Rank symmetry: which ranks provably do the same at the same time?

Colour refinement (1-WL) on ranks and process groups. The initial colour of a rank is its program, that of a
group the cost of its collectives. Then each group is refined by the colours of its members (in order where
order matters), each rank by the colours of its groups, until the number of colours is stable. In the stable
colouring, ranks of one colour run the same tasks, with groups of equal cost, against partners of equal
colours; by induction over event times their timelines are equal, since the engine's durations depend on
nothing else. One rank of each colour is simulated for all of them. Where traffic shares links, links are
coloured as well (`link_load_matrix`), and groups are also refined by the colours of the links that they load.

Reference: Berkholz, Bonsma, Grohe, "Tight lower and upper bounds for the complexity of canonical colour
refinement" (2017).
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from clustersim.common.arrays import FloatArray, IntArray
from clustersim.common.lru import LruCache
from clustersim.program.program import ProcessGroups, Program
from clustersim.symmetry.labels import compact_labels, label_rows, label_values, pair_labels
from clustersim.symmetry.link_load_matrix import NO_TRAFFIC, LinkColourRefinement, LinkTraffic

CACHE_BYTES: Final = 16_000_000
"""Size limit of the cache of colourings and of the inputs that are their keys, in bytes."""


@dataclass(frozen=True, slots=True)
class SymmetryClasses:
    """rank_colours: [ranks]; representative: [ranks] lowest rank of that colour; group_colours: by kind of group.

    link_colours: [links]; empty where links are not shared.
    """

    rank_colours: IntArray
    representative: IntArray
    group_colours: Mapping[str, IntArray]
    link_colours: IntArray = field(default_factory=lambda: np.zeros(0, dtype=np.int64))

    @property
    def count(self) -> int:
        """Number of rank classes, which is the number of ranks to simulate."""
        return int(self.rank_colours.max()) + 1

    @property
    def link_class_count(self) -> int:
        """Number of link classes, which is the number of links to simulate."""
        return int(self.link_colours.max(initial=-1)) + 1


_CACHE: Final = LruCache[SymmetryClasses](CACHE_BYTES)


def singleton_classes(program: Program, link_count: int = 0) -> SymmetryClasses:
    """Every rank, every group and every link in a class of its own."""
    ranks = np.arange(program.world_size)
    groups = {comm_group: np.arange(len(groups.members)) for comm_group, groups in program.groups.items()}
    return SymmetryClasses(ranks, ranks, groups, np.arange(link_count))


def symmetry_classes(
    program: Program,
    comm_seconds: Mapping[str, FloatArray],
    traffic: LinkTraffic = NO_TRAFFIC,
    *,
    device_model: IntArray | None = None,
) -> SymmetryClasses:
    """Coarsest stable colouring.

    comm_seconds: for each kind of group [groups, comm ops] seconds of every comm op in every group; kinds without
    an entry have equally fast groups. traffic: loads on shared links. device_model: [ranks] index, from 0 on, of
    the device model of each rank; ranks with different device models are never in one class. Recent results are
    cached: scenarios that are compared often do not differ in anything that distinguishes ranks.
    """
    rank_colours = (
        compact_labels(program.program_index)
        if device_model is None
        else pair_labels(program.program_index, device_model)
    )
    initial = {
        comm_group: _initial_colours(groups, comm_seconds.get(comm_group))
        for comm_group, groups in program.groups.items()
    }
    inputs = _refinement_inputs(program.groups, rank_colours, initial, traffic)
    if sum(array.nbytes for array in inputs) > CACHE_BYTES:
        return _refine_until_stable(program.groups, rank_colours, initial, traffic)
    shapes = tuple(
        (comm_group, process_groups.ordered, process_groups.members.shape)
        for comm_group, process_groups in program.groups.items()
    )
    matrix_counts = tuple((comm_group, len(matrices)) for comm_group, matrices in traffic.matrices.items())
    key = shapes, matrix_counts, *(array.tobytes() for array in inputs)
    return _CACHE.get_or_compute(key, lambda: _refine_until_stable(program.groups, rank_colours, initial, traffic))


def _refinement_inputs(
    groups: Mapping[str, ProcessGroups], rank_colours: IntArray, initial: Mapping[str, IntArray], traffic: LinkTraffic
) -> list[NDArray[Any]]:
    """All arrays that determine the stable colouring (the cache key)."""
    matrices = [matrix for group_matrices in traffic.matrices.values() for matrix in group_matrices]
    columns = [
        column for matrix in matrices for column in (matrix.group_index, matrix.link_index, matrix.seconds_per_byte)
    ]
    return [
        rank_colours,
        *(process_groups.members for process_groups in groups.values()),
        *initial.values(),
        traffic.link_colours,
        *columns,
    ]


def _refine_until_stable(
    groups: Mapping[str, ProcessGroups], rank_colours: IntArray, initial: Mapping[str, IntArray], traffic: LinkTraffic
) -> SymmetryClasses:
    """Refine the initial colours of ranks, groups and links until their number is stable."""
    links = LinkColourRefinement(
        traffic, {comm_group: len(process_groups.members) for comm_group, process_groups in groups.items()}
    )
    while True:
        colours_by_links = links.group_colours()
        group_colours = {
            comm_group: _refine_groups(
                process_groups, pair_labels(initial[comm_group], colours_by_links[comm_group]), rank_colours
            )
            for comm_group, process_groups in groups.items()
        }
        link_colour_count, refined = links.count, rank_colours
        links.refine(group_colours)
        for comm_group, process_groups in groups.items():
            refined = _refine_ranks(refined, process_groups, group_colours[comm_group])
        if refined.max() == rank_colours.max() and links.count == link_colour_count:
            return SymmetryClasses(
                rank_colours, lowest_members(rank_colours)[rank_colours], group_colours, links.colour
            )
        rank_colours = refined


def _initial_colours(groups: ProcessGroups, comm_seconds: FloatArray | None) -> IntArray:
    if comm_seconds is None or comm_seconds.size == 0:
        return np.zeros(len(groups.members), dtype=np.int64)
    return label_rows(np.stack([label_values(column) for column in comm_seconds.T], axis=1))


def _refine_groups(groups: ProcessGroups, initial: IntArray, rank_colours: IntArray) -> IntArray:
    """Group colours refined by the colours of the members."""
    member_colours = rank_colours[groups.members]
    mixed = np.flatnonzero((member_colours != member_colours[:, :1]).any(axis=1))
    # groups whose members share one colour are labelled by it, mixed groups by the colours of all members
    member_labels = member_colours[:, 0] + 1
    member_labels[mixed] = 0
    if len(mixed) > 1:
        mixed_labels = np.zeros(len(member_colours), dtype=np.int64)
        mixed_labels[mixed] = label_rows(
            member_colours[mixed] if groups.ordered else np.sort(member_colours[mixed], axis=1)
        )
        member_labels = pair_labels(member_labels, mixed_labels)
    return pair_labels(initial, member_labels)


def _refine_ranks(rank_colours: IntArray, groups: ProcessGroups, group_colours: IntArray) -> IntArray:
    """Rank colours refined by the colours of their groups of one kind."""
    member_indices = (0, 1) if groups.ordered else (None,)
    for member_index in member_indices:
        neighbour_colours = np.zeros(len(rank_colours), dtype=np.int64)
        members = groups.members if member_index is None else groups.members[:, member_index, None]
        neighbour_colours[members] = group_colours[:, None] + 1
        rank_colours = pair_labels(rank_colours, neighbour_colours)
    return rank_colours


def lowest_members(colours: IntArray) -> IntArray:
    """[colours] the lowest index that has each colour; colours: [n], from 0 on, each in use."""
    lowest = np.empty(int(colours.max(initial=-1)) + 1, dtype=np.int64)
    lowest[colours[::-1]] = np.arange(len(colours) - 1, -1, -1)  # of equal indices, numpy keeps the last
    return lowest
