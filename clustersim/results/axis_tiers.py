"""Which tiers do the groups of a layout cross?

For every axis with more than one rank: how far apart its ranks are, and which links lie between neighbours of a group.
Rings and pipelines send between neighbours; the last one of a group has the first as its neighbour, but in a pipeline
whose placement does not join its ends. Other algorithms may reach further.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from clustersim.common.arrays import IntArray
from clustersim.hardware.topology import LINK_KINDS, Fabric, FabricTier, LinkKind
from clustersim.parallel.layout import Layout
from clustersim.parallel.mesh import DENSE_MESH, EXPERT_MESH, MESHES, PIPELINE, Axis, Mesh
from clustersim.program.placement import Placement

_NETWORK_KINDS: Final = [LINK_KINDS.index(kind) for kind in (LinkKind.NIC, LinkKind.LEAF, LinkKind.SPINE)]
_SWITCH_TIERS: Final = ("leaf", "switch", "spine", "core")
_INTRA_NODE_TIERS: Final = {
    LinkKind.NVLINK: ("nvswitch", "gpu"),
    LinkKind.PCIE: ("host", "nic", "nvswitch", "gpu"),
    LinkKind.HOST: ("host", "nic", "gpu"),
}
"""The tier to which links inside a node lead up: the first of these that there is."""


@dataclass(frozen=True, slots=True)
class TierCrossing:
    """Links of a kind between neighbours. part: of the pairs of neighbours that have them between them.

    climb: how many switches of the network such a link leads above the node, 0 inside it.
    """

    kind: LinkKind
    switch_level: int
    fraction: float

    def tier_index(self, tiers: Sequence[FabricTier]) -> int:
        """The tier to which such links lead up, counted from the GPUs as 0. tiers: of the cluster."""
        kinds = [tier.kind for tier in tiers]
        if self.switch_level == 0:
            return kinds.index(next(item for item in _INTRA_NODE_TIERS[self.kind] if item in kinds))
        switches = [index for index, kind in enumerate(kinds) if kind in _SWITCH_TIERS] or [len(kinds) - 1]
        return switches[min(self.switch_level, len(switches)) - 1]


@dataclass(frozen=True, slots=True)
class AxisLocality:
    """The groups of one axis on a machine.

    size: GPUs of a group; stride: ranks from one member to the next; nodes: on which the widest group lies; crossings:
    what is between neighbours, from the lowest on.
    """

    axis: str
    group_size: int
    group_count: int
    stride: int
    max_nodes: int
    crossings: tuple[TierCrossing, ...]


def axis_localities(layout: Layout, fabric: Fabric, placement: Placement) -> tuple[AxisLocality, ...]:
    """The axes that have groups, in the layout's order, then those of experts. placement: of the pipeline's stages."""
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
    """Each axis with the mesh that it is of; of experts' those that are not the dense ones'."""
    for name in (DENSE_MESH, EXPERT_MESH):
        if mesh := layout.meshes.get(name):
            axes = {axis.name: axis for axis in MESHES[name] if name == DENSE_MESH or axis is not PIPELINE}
            yield from ((mesh, axes[degree]) for degree in mesh.degrees if degree in axes)


def _neighbour_link_kinds(groups: IntArray, fabric: Fabric, *, is_ring: bool) -> IntArray:
    """Kinds of the links between neighbours in the order of travel, -1 for none: [pairs, hops]."""
    pairs = slice(None) if is_ring else slice(-1)
    sources, targets = groups[:, pairs].reshape(-1), np.roll(groups, -1, axis=1)[:, pairs].reshape(-1)
    links = fabric.find_paths(sources, targets).links
    kinds: IntArray = np.where(links >= 0, fabric.links.kind[links], -1)
    return kinds


def _intra_node_crossings(kinds: IntArray) -> Iterator[TierCrossing]:
    for kind_index, kind in enumerate(LINK_KINDS):
        fraction = float((kinds == kind_index).any(axis=1).mean())
        if kind_index not in _NETWORK_KINDS and fraction > 0.0:
            yield TierCrossing(kind, 0, fraction)


def _network_crossings(kinds: IntArray) -> Iterator[TierCrossing]:
    """What lies between nodes: as many links up as down, the first half of them from switch to switch."""
    is_network = np.isin(kinds, _NETWORK_KINDS)
    switch_levels = (is_network.sum(axis=1) + 1) // 2
    for level in range(1, int(switch_levels.max(initial=0)) + 1):
        reaches_level = switch_levels >= level
        pair = int(reaches_level.argmax())
        kind = LINK_KINDS[int(kinds[pair][is_network[pair]][level - 1])]
        yield TierCrossing(kind, level, float(reaches_level.mean()))


def _max_node_count(groups: IntArray, fabric: Fabric) -> int:
    nodes = np.sort(fabric.node_ids(groups), axis=1)
    return int((1 + np.count_nonzero(np.diff(nodes, axis=1), axis=1)).max())
