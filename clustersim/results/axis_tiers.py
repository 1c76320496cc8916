"""Locality of a layout's axes: which network tiers do its groups cross?

For every axis with more than one rank: the distance between its ranks, and the links between neighbours of
a group. Rings and pipelines send between neighbours; the last member of a group neighbours the first,
except in a pipeline whose placement does not connect its ends. Other algorithms may reach further.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from clustersim.common.arrays import IntArray, SmallIntArray
from clustersim.hardware.topology import LINK_KINDS, NETWORK_KINDS, Fabric, FabricTier, LinkKind
from clustersim.parallel.layout import Layout
from clustersim.parallel.mesh import DENSE_MESH, EXPERT_MESH, MESHES, PIPELINE, Axis, Mesh
from clustersim.program.placement import Placement

_NETWORK_KINDS: Final = [LINK_KINDS.index(kind) for kind in NETWORK_KINDS]
_SWITCH_TIERS: Final = ("leaf", "switch", "spine", "core", "site")
_INTRA_NODE_TIERS: Final = {
    LinkKind.NVLINK: ("nvswitch", "gpu"),
    LinkKind.PCIE: ("host", "nic", "nvswitch", "gpu"),
    LinkKind.HOST: ("host", "nic", "gpu"),
}
"""The tier to which links inside a node lead up: the first of these that is present."""


@dataclass(frozen=True, slots=True)
class TierCrossing:
    """Links of a kind between neighbours. fraction: of the neighbour pairs that have them on their path.

    switch_level: number of network switch levels above the node that such a link leads up to, 0 inside it.
    """

    kind: LinkKind
    switch_level: int
    fraction: float

    def tier_index(self, tiers: Sequence[FabricTier]) -> int:
        """Index of the tier to which such links lead up, counted from the GPUs as 0. tiers: of the cluster."""
        kinds = [tier.kind for tier in tiers]
        if self.switch_level == 0:
            return kinds.index(next(kind for kind in _INTRA_NODE_TIERS[self.kind] if kind in kinds))
        switches = [index for index, kind in enumerate(kinds) if kind in _SWITCH_TIERS] or [len(kinds) - 1]
        return switches[min(self.switch_level, len(switches)) - 1]


@dataclass(frozen=True, slots=True)
class AxisLocality:
    """The groups of one axis on a cluster.

    group_size: GPUs of a group; stride: ranks from one member to the next; max_nodes: nodes spanned by the
    widest group; crossings: links between neighbours, lowest tier first.
    """

    axis: str
    group_size: int
    group_count: int
    stride: int
    max_nodes: int
    crossings: tuple[TierCrossing, ...]


def axis_localities(layout: Layout, fabric: Fabric, placement: Placement) -> tuple[AxisLocality, ...]:
    """Localities of the axes that have groups, in the layout's order, then those of experts."""
    return tuple(_axis_localities(layout, fabric, placement))


def _axis_localities(layout: Layout, fabric: Fabric, placement: Placement) -> Iterator[AxisLocality]:
    for mesh, axis in _mesh_axes(layout):
        size = mesh.degrees[axis.name]
        if size > 1:
            groups = mesh.groups_along(axis)
            stride = int(groups[0, 1] - groups[0, 0])
            kinds = _neighbour_link_kinds(
                groups, fabric, is_ring=axis is not PIPELINE or (size - 1, 0) in placement.edges(1)
            )
            crossings = (*_intra_node_crossings(kinds), *_network_crossings(kinds))
            yield AxisLocality(axis.name, size, len(groups), stride, _max_node_count(groups, fabric), crossings)


def _mesh_axes(layout: Layout) -> Iterator[tuple[Mesh, Axis]]:
    """Each axis with its mesh; of the expert mesh only axes that are not also in the dense one."""
    for name in (DENSE_MESH, EXPERT_MESH):
        if mesh := layout.meshes.get(name):
            axes = {axis.name: axis for axis in MESHES[name] if name == DENSE_MESH or axis is not PIPELINE}
            yield from ((mesh, axes[degree]) for degree in mesh.degrees if degree in axes)


def _neighbour_link_kinds(groups: IntArray, fabric: Fabric, *, is_ring: bool) -> SmallIntArray:
    """Kinds of the links between neighbours along their paths, -1 for none: [pairs, hops]."""
    pairs = slice(None) if is_ring else slice(-1)
    sources, targets = groups[:, pairs].reshape(-1), np.roll(groups, -1, axis=1)[:, pairs].reshape(-1)
    links = fabric.find_paths(sources, targets).links
    kinds: SmallIntArray = np.where(links >= 0, fabric.links.kind[links], -1)
    return kinds


def _intra_node_crossings(kinds: SmallIntArray) -> Iterator[TierCrossing]:
    for kind_index, kind in enumerate(LINK_KINDS):
        fraction = float((kinds == kind_index).any(axis=1).mean())
        if kind_index not in _NETWORK_KINDS and fraction > 0.0:
            yield TierCrossing(kind, 0, fraction)


def _network_crossings(kinds: SmallIntArray) -> Iterator[TierCrossing]:
    """Links between nodes: paths have as many links up as down; the first half leads up from switch to switch.

    All links that lead out of a site count as one level.
    """
    is_network = np.isin(kinds, _NETWORK_KINDS)
    switch_levels = (is_network.sum(axis=1) + 1) // 2
    for level in range(1, int(switch_levels.max(initial=0)) + 1):
        reaches_level = switch_levels >= level
        pair = int(reaches_level.argmax())
        kind = LINK_KINDS[int(kinds[pair][is_network[pair]][level - 1])]
        yield TierCrossing(kind, level, float(reaches_level.mean()))
        if kind is LinkKind.WAN:
            return


def _max_node_count(groups: IntArray, fabric: Fabric) -> int:
    nodes = np.sort(fabric.node_ids(groups), axis=1)
    return int((1 + np.count_nonzero(np.diff(nodes, axis=1), axis=1)).max())
