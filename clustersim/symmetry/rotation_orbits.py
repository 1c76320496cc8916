"""Which ranks, process groups and links are images of each other under rotation of local ranks?

Where rotating the GPUs of all nodes by one is an automorphism of the fabric (`hardware.rotation`), it often is one of
the whole step: all ranks of a node run the same program on the same device, and each process group is mapped to
another of its kind (data-parallel groups, pipeline pairs) or to itself (a tensor-parallel group that fills a node).
Then all members of an orbit do the same at the same time, as the coarsest stable colouring (`refinement`) is invariant
under automorphisms; so it is computed for one member of each orbit: an eighth of the ranks, of most groups and of
most links with nodes of eight GPUs.

Example: tp 8 on nodes of 8 GPUs, dp 4, pp 2. 64 ranks are 8 orbits; the 16 groups of dp are 2 orbits of 8; the 8
groups of tp are 8 orbits of one group each, whose members are one orbit of ranks.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np

from clustersim.common.arrays import FloatArray, IntArray
from clustersim.hardware.rotation import FabricRotation
from clustersim.program.program import BALANCED_LOADS, ProcessGroups, Program
from clustersim.symmetry.labels import compact_labels
from clustersim.symmetry.link_load_matrix import LinkLoadMatrix, LinkTraffic
from clustersim.symmetry.refinement import SymmetryClasses, lowest_members, symmetry_classes


@dataclass(frozen=True, slots=True, eq=False)
class GroupOrbits:
    """Orbits of the groups of one kind. representatives: [orbits] the group on local rank 0 of each.

    orbit_of_group: [groups] index in `representatives`; closed: each group consists of complete nodes, and is mapped
    to itself.
    """

    representatives: IntArray
    orbit_of_group: IntArray
    closed: bool = False

    @property
    def representative_of_group(self) -> IntArray:
        """[groups] the group that represents each."""
        return self.representatives[self.orbit_of_group]


@dataclass(frozen=True, slots=True, eq=False)
class StepOrbits:
    """Orbits of everything that a step uses. groups: by kind of process group."""

    rotation: FabricRotation
    groups: Mapping[str, GroupOrbits]


def find_step_orbits(program: Program, rotation: FabricRotation, device_model: IntArray) -> StepOrbits | None:
    """The orbits of a program's ranks and groups; None where the rotation is not recognized as an automorphism.

    device_model: [ranks] index of the device model of each rank.
    """
    if program.world_size % rotation.period or program.expert_loads is not BALANCED_LOADS:
        return None
    if not all(_is_constant_within_nodes(labels, rotation) for labels in (program.program_index, device_model)):
        return None
    orbits: dict[str, GroupOrbits] = {}
    for comm_group, process_groups in program.groups.items():
        group_orbits = find_group_orbits(process_groups.members, rotation)
        if group_orbits is None and not process_groups.ordered:
            group_orbits = _closed_orbits(process_groups.members, rotation)
        if group_orbits is None:
            return None
        orbits[comm_group] = group_orbits
    return StepOrbits(rotation, orbits)


def find_group_orbits(members: IntArray, rotation: FabricRotation) -> GroupOrbits | None:
    """Orbits of groups [groups, size] if those on local rank 0 represent all others; else None."""
    local_ranks, first_members = np.arange(rotation.period), members[:, 0]
    representatives = np.flatnonzero(first_members % rotation.period == 0)
    if (
        len(representatives) * rotation.period != len(members)
        or (members[representatives] % rotation.period != 0).any()
    ):
        return None
    group_of_leader = np.full(int(first_members.max(initial=0)) + rotation.period, -1)
    group_of_leader[first_members] = np.arange(len(members))
    image_groups = group_of_leader[first_members[representatives][:, None] + local_ranks]
    if any(
        (members[image_groups[:, local_rank]] != members[representatives] + local_rank).any()
        for local_rank in local_ranks.tolist()
    ):
        return None
    orbit_of_group = np.empty(len(members), dtype=np.int64)
    orbit_of_group[image_groups] = np.arange(len(representatives))[:, None]
    return GroupOrbits(representatives, orbit_of_group)


def _closed_orbits(members: IntArray, rotation: FabricRotation) -> GroupOrbits | None:
    """One orbit for each group [groups, size] if all consist of complete nodes; else None."""
    if members.shape[1] % rotation.period:
        return None
    nodes = np.sort(members, axis=1).reshape(len(members), -1, rotation.period)
    if (nodes != nodes[:, :, :1] + np.arange(rotation.period)).any() or (nodes[:, :, 0] % rotation.period).any():
        return None
    groups = np.arange(len(members))
    return GroupOrbits(groups, groups, closed=True)


def _is_constant_within_nodes(labels: IntArray, rotation: FabricRotation) -> bool:
    by_node = labels.reshape(-1, rotation.period)
    return bool((by_node == by_node[:, :1]).all())


def classes_by_orbit(
    program: Program,
    group_features: Mapping[str, FloatArray],
    traffic: LinkTraffic,
    device_model: IntArray,
    orbits: StepOrbits,
) -> SymmetryClasses:
    """As `symmetry_classes`, computed for one member of each orbit.

    traffic: loads of representative groups on representative links (`collectives.group_link_loads.fold_loads`).
    """
    period, loaded_links = orbits.rotation.period, _loaded_links(traffic)
    classes = symmetry_classes(
        Program(
            (),
            program.program_index[::period],
            {
                comm_group: _quotient_groups(process_groups, orbits.groups[comm_group], period)
                for comm_group, process_groups in program.groups.items()
            },
        ),
        {
            comm_group: features[orbits.groups[comm_group].representatives]
            for comm_group, features in group_features.items()
        },
        _quotient_traffic(traffic, loaded_links, orbits),
        device_model=device_model[::period],
    )
    return _expand_classes(classes, loaded_links, orbits)


def _quotient_groups(process_groups: ProcessGroups, group_orbits: GroupOrbits, period: int) -> ProcessGroups:
    return replace(process_groups, members=process_groups.members[group_orbits.representatives] // period)


def _loaded_links(traffic: LinkTraffic) -> IntArray:
    is_loaded = np.zeros(len(traffic.link_colours), dtype=np.bool_)
    for matrices in traffic.matrices.values():
        for matrix in matrices:
            is_loaded[matrix.link_index] = True
    return np.flatnonzero(is_loaded)


def _quotient_traffic(traffic: LinkTraffic, loaded_links: IntArray, orbits: StepOrbits) -> LinkTraffic:
    """The traffic with groups and links counted by orbit, of links that are loaded at all."""
    compact_index = np.empty(len(traffic.link_colours), dtype=np.int64)
    compact_index[loaded_links] = np.arange(len(loaded_links))
    matrices = {
        comm_group: tuple(
            LinkLoadMatrix(
                orbits.groups[comm_group].orbit_of_group[matrix.group_index],
                compact_index[matrix.link_index],
                matrix.seconds_per_byte,
            )
            for matrix in group_matrices
        )
        for comm_group, group_matrices in traffic.matrices.items()
    }
    return LinkTraffic(traffic.link_colours[loaded_links], matrices)


def _expand_classes(classes: SymmetryClasses, loaded_links: IntArray, orbits: StepOrbits) -> SymmetryClasses:
    """Classes of all ranks, groups and links from those of representatives; all links without load have one colour."""
    rotation = orbits.rotation
    rank_colours = np.repeat(classes.rank_colours, rotation.period)
    orbit_colours = np.zeros(len(rotation.first_link), dtype=np.int64)
    orbit_colours[rotation.orbit_of_link[loaded_links]] = classes.link_colours + 1
    return SymmetryClasses(
        rank_colours,
        lowest_members(rank_colours)[rank_colours],
        {
            comm_group: colours[orbits.groups[comm_group].orbit_of_group]
            for comm_group, colours in classes.group_colours.items()
        },
        compact_labels(orbit_colours[rotation.orbit_of_link[:-1]]),
    )
