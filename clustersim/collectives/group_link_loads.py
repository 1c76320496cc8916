"""Which links does each group of a communicator kind load by itself?

As `phase_cost`, but group by group: a link's load is that of one group's own flows. Contention with other
groups is left to the engine.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from clustersim.collectives.flow_routes import FlowPaths, FlowRoutes, LinkClasses
from clustersim.collectives.library import AlgorithmVariant, Library
from clustersim.collectives.phase_cost import effective_bandwidth
from clustersim.common.arrays import FloatArray, IntArray
from clustersim.hardware.rotation import FabricRotation
from clustersim.symmetry.link_load_matrix import NO_LINK_LOADS, LinkLoadMatrix
from clustersim.symmetry.rotation_orbits import GroupOrbits


class AsymmetricLoadsError(Exception):
    """A group loads the links of an orbit unequally, so it cannot represent its images."""


@dataclass(frozen=True, slots=True)
class GroupLinkLoads:
    """Link loads of one variant in groups that communicate without contention.

    seconds_per_byte: [groups] per byte of payload; fill_seconds_per_byte: [groups] per byte of a chunk while the
    pipeline fills; largest_flow: [groups] payloads that the largest flow carries, on the wire; load_matrix:
    seconds per byte for which each group keeps each link busy.
    """

    seconds_per_byte: FloatArray
    fill_seconds_per_byte: FloatArray
    largest_flow: FloatArray
    load_matrix: LinkLoadMatrix


def group_link_loads(
    classes: LinkClasses,
    library: Library,
    variant: AlgorithmVariant,
    flow_routes: Sequence[FlowRoutes],
    domain_count: int,
) -> GroupLinkLoads:
    """Sum the phases of a variant in groups over `domain_count` domains; classes: of the fabric's links."""
    bandwidth = effective_bandwidth(classes.table, library, variant, domain_count)
    group_count = len(flow_routes[0].paths[0].latency)
    per_byte, fill, largest_flow = np.zeros((3, group_count))
    matrices = [NO_LINK_LOADS]
    for phase_routes in flow_routes:
        load_matrix = _phase_load_matrix(phase_routes, classes, bandwidth)
        seconds = np.zeros(group_count)
        np.maximum.at(seconds, load_matrix.group_index, load_matrix.seconds_per_byte)
        per_byte += seconds
        fill += phase_routes.phase.fill_stages * seconds
        largest_flow += _largest_flow_share(phase_routes)
        matrices.append(load_matrix)
    return GroupLinkLoads(per_byte, fill, largest_flow / variant.efficiency, _sum_phases(matrices, per_byte))


def scatter_to_groups(loads_by_set: Sequence[tuple[IntArray, GroupLinkLoads]], group_count: int) -> GroupLinkLoads:
    """Loads of all groups from those of sets of groups (group indices, loads); groups in no set have zero load."""
    if len(loads_by_set) == 1 and len(loads_by_set[0][0]) == group_count:
        return loads_by_set[0][1]
    per_byte, fill, largest_flow = np.zeros((3, group_count))
    matrices = [NO_LINK_LOADS]
    for group_indices, loads in loads_by_set:
        per_byte[group_indices], fill[group_indices], largest_flow[group_indices] = (
            loads.seconds_per_byte,
            loads.fill_seconds_per_byte,
            loads.largest_flow,
        )
        matrices.append(
            LinkLoadMatrix(
                group_indices[loads.load_matrix.group_index],
                loads.load_matrix.link_index,
                loads.load_matrix.seconds_per_byte,
            )
        )
    return GroupLinkLoads(per_byte, fill, largest_flow, _concatenate(matrices))


def fold_loads(loads: GroupLinkLoads, orbits: GroupOrbits, rotation: FabricRotation) -> GroupLinkLoads:
    """Loads of all groups from those of the representatives of their orbits.

    The load matrix keeps the entries of representative groups on the first link of each orbit, where an entry counts
    the group's images, too. Raise AsymmetricLoadsError where a group and its images load the links of an orbit
    unequally.
    """
    orbit_of_group = orbits.orbit_of_group
    return GroupLinkLoads(
        loads.seconds_per_byte[orbit_of_group],
        loads.fill_seconds_per_byte[orbit_of_group],
        loads.largest_flow[orbit_of_group],
        _fold_matrix(loads.load_matrix, orbits, rotation),
    )


def _fold_matrix(matrix: LinkLoadMatrix, orbits: GroupOrbits, rotation: FabricRotation) -> LinkLoadMatrix:
    if not len(matrix.link_index):
        return NO_LINK_LOADS
    link_orbit = rotation.orbit_of_link[matrix.link_index]
    first = np.flatnonzero(np.diff(matrix.group_index * len(rotation.first_link) + link_orbit, prepend=-1))
    link_orbit, seconds = link_orbit[first], matrix.seconds_per_byte[first]
    counts = np.diff(first, append=len(matrix.link_index))
    if orbits.closed:
        orbit_size = rotation.period / rotation.multiplicity[link_orbit]
        if (counts != orbit_size).any() or (matrix.seconds_per_byte != np.repeat(seconds, counts)).any():
            raise AsymmetricLoadsError
    else:
        if (counts != 1).any():
            raise AsymmetricLoadsError
        seconds = seconds * rotation.multiplicity[link_orbit]
    return LinkLoadMatrix(orbits.representatives[matrix.group_index[first]], rotation.first_link[link_orbit], seconds)


def select_by_variant(loads_by_variant: Mapping[int, GroupLinkLoads], variant_index: IntArray) -> GroupLinkLoads:
    """Loads where groups use different variants: group g has those of variant_index[g], none if it is negative."""
    if len(loads_by_variant) == 1 and variant_index.min() >= 0:
        return next(iter(loads_by_variant.values()))
    per_byte, fill, largest_flow = np.zeros((3, len(variant_index)))
    matrices = [NO_LINK_LOADS]
    for index, loads in loads_by_variant.items():
        groups, entries = variant_index == index, variant_index[loads.load_matrix.group_index] == index
        per_byte[groups], fill[groups], largest_flow[groups] = (
            loads.seconds_per_byte[groups],
            loads.fill_seconds_per_byte[groups],
            loads.largest_flow[groups],
        )
        matrices.append(LinkLoadMatrix(*(column[entries] for column in _coo_columns(loads.load_matrix))))
    return GroupLinkLoads(per_byte, fill, largest_flow, _concatenate(matrices))


def _concatenate(matrices: Sequence[LinkLoadMatrix]) -> LinkLoadMatrix:
    return LinkLoadMatrix(*(np.concatenate(columns) for columns in zip(*map(_coo_columns, matrices), strict=True)))


def _coo_columns(load_matrix: LinkLoadMatrix) -> tuple[IntArray, IntArray, FloatArray]:
    return load_matrix.group_index, load_matrix.link_index, load_matrix.seconds_per_byte


def _largest_flow_share(phase_routes: FlowRoutes) -> FloatArray:
    """Payload share of each group's largest flow: [groups]."""
    flow_shares = [(paths.links >= 0).any(axis=(0, 2)) * paths.share for paths in phase_routes.paths]
    largest: FloatArray = np.max(flow_shares, axis=0)
    return largest


def _phase_load_matrix(phase_routes: FlowRoutes, classes: LinkClasses, bandwidth: FloatArray) -> LinkLoadMatrix:
    """Seconds per byte for which each group keeps each link busy in one phase. bandwidth: [classes] of links."""
    loaded_paths = [paths for paths in phase_routes.paths if paths.share > 0]
    link_count, shares = len(phase_routes.link_load), [paths.share for paths in loaded_paths]
    pairs_by_path = [_group_link_pairs(paths, link_count) for paths in loaded_paths]
    sizes, pairs = list(map(len, pairs_by_path)), np.concatenate([np.zeros(0, np.int64), *pairs_by_path])
    del pairs_by_path  # with a million GPUs, a sixth of all memory
    if len(set(shares)) == 1:
        loads = _count_duplicates(pairs, link_count, shares[0])
    else:
        loads = _sum_duplicates(pairs, np.repeat(shares, sizes), link_count)
    seconds = loads.seconds_per_byte / bandwidth[classes.class_of(loads.link_index)]
    return LinkLoadMatrix(loads.group_index, loads.link_index, seconds)


def _group_link_pairs(paths: FlowPaths, link_count: int) -> IntArray:
    """Group * link_count + link of all flows, hop by hop."""
    first_pair = np.arange(paths.links.shape[1])[:, None] * link_count
    return np.concatenate([(first_pair + links)[links >= 0] for links in paths.links])


def _sum_phases(matrices: Sequence[LinkLoadMatrix], max_seconds: FloatArray) -> LinkLoadMatrix:
    """Sum of load matrices of several phases; capped at the group's total, which rounding could exceed."""
    nonempty = [matrix for matrix in matrices if len(matrix.link_index)]
    if len(nonempty) < 2:
        return next(iter(nonempty), NO_LINK_LOADS)
    link_count = max(int(matrix.link_index.max()) for matrix in nonempty) + 1
    entries = _concatenate(nonempty)
    pairs = entries.group_index * link_count + entries.link_index
    total = _sum_duplicates(pairs, entries.seconds_per_byte, link_count)
    return LinkLoadMatrix(
        total.group_index, total.link_index, np.minimum(total.seconds_per_byte, max_seconds[total.group_index])
    )


def _count_duplicates(pairs: IntArray, link_count: int, share: float) -> LinkLoadMatrix:
    """As `_sum_duplicates` where all values are equal: counting sorted pairs is several times faster than summing."""
    pairs = np.sort(pairs)
    first = np.flatnonzero(np.diff(pairs, prepend=-1))
    group, link = np.divmod(pairs[first], link_count)
    return LinkLoadMatrix(group, link, np.diff(first, append=len(pairs)) * share)


def _sum_duplicates(pairs: IntArray, values: FloatArray, link_count: int) -> LinkLoadMatrix:
    """Sum values of equal group * link_count + link. They come as sorted runs, which a stable sort exploits."""
    order = np.argsort(pairs, kind="stable")
    pairs = pairs[order]
    first = np.diff(pairs, prepend=-1) != 0
    total = np.bincount(np.cumsum(first) - 1, values[order]).astype(np.float64)
    group, link = np.divmod(pairs[first], link_count)
    return LinkLoadMatrix(group, link, total)
