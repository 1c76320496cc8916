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

_NETWORK: Final = [LINK_KINDS.index(kind) for kind in (LinkKind.NIC, LinkKind.LEAF, LinkKind.SPINE)]
_SWITCHES: Final = ("leaf", "switch", "spine", "core")
_INSIDE: Final = {
    LinkKind.NVLINK: ("nvswitch", "gpu"),
    LinkKind.PCIE: ("host", "nic", "nvswitch", "gpu"),
    LinkKind.HOST: ("host", "nic", "gpu"),
}
"""The tier to which links inside a node lead up: the first of these that there is."""


@dataclass(frozen=True, slots=True)
class Crossing:
    """Links of a kind between neighbours. part: of the pairs of neighbours that have them between them.

    climb: how many switches of the network such a link leads above the node, 0 inside it.
    """

    kind: LinkKind
    climb: int
    part: float

    def level(self, tiers: Sequence[FabricTier]) -> int:
        """The tier to which such links lead up, counted from the GPUs as 0. tiers: of the cluster."""
        kinds = [tier.kind for tier in tiers]
        if self.climb == 0:
            return kinds.index(next(item for item in _INSIDE[self.kind] if item in kinds))
        switches = [place for place, kind in enumerate(kinds) if kind in _SWITCHES] or [len(kinds) - 1]
        return switches[min(self.climb, len(switches)) - 1]


@dataclass(frozen=True, slots=True)
class AxisSpan:
    """The groups of one axis on a machine.

    size: GPUs of a group; stride: ranks from one member to the next; nodes: on which the widest group lies; crossings:
    what is between neighbours, from the lowest on.
    """

    axis: str
    size: int
    groups: int
    stride: int
    nodes: int
    crossings: tuple[Crossing, ...]


def axis_spans(layout: Layout, fabric: Fabric, placement: Placement) -> tuple[AxisSpan, ...]:
    """The axes that have groups, in the layout's order, then those of experts. placement: of the pipeline's stages."""
    return tuple(_spans(layout, fabric, placement))


def _spans(layout: Layout, fabric: Fabric, placement: Placement) -> Iterator[AxisSpan]:
    for mesh, axis in _axes(layout):
        size = mesh.degrees[axis.name]
        if size > 1:
            groups = mesh.groups_along(axis)
            stride = int(groups[0, 1] - groups[0, 0])
            kinds = _kinds_between(groups, fabric, wraps=axis is not PIPELINE or (size - 1, 0) in placement.edges(1))
            crossings = (*_inside(kinds), *_climbs(kinds))
            yield AxisSpan(axis.name, size, len(groups), stride, _nodes(groups, fabric), crossings)


def _axes(layout: Layout) -> Iterator[tuple[Mesh, Axis]]:
    """Each axis with the mesh that it is of; of experts' those that are not the dense ones'."""
    for name in (DENSE_MESH, EXPERT_MESH):
        if mesh := layout.meshes.get(name):
            axes = {axis.name: axis for axis in MESHES[name] if name == DENSE_MESH or axis is not PIPELINE}
            yield from ((mesh, axes[degree]) for degree in mesh.degrees if degree in axes)


def _kinds_between(groups: IntArray, fabric: Fabric, *, wraps: bool) -> IntArray:
    """Kinds of the links between neighbours in the order of travel, -1 for none: [pairs, hops]."""
    pairs = slice(None) if wraps else slice(-1)
    sources, targets = groups[:, pairs].reshape(-1), np.roll(groups, -1, axis=1)[:, pairs].reshape(-1)
    links = fabric.find_paths(sources, targets).links
    kinds: IntArray = np.where(links >= 0, fabric.links.kind[links], -1)
    return kinds


def _inside(kinds: IntArray) -> Iterator[Crossing]:
    for number, kind in enumerate(LINK_KINDS):
        part = float((kinds == number).any(axis=1).mean())
        if number not in _NETWORK and part > 0.0:
            yield Crossing(kind, 0, part)


def _climbs(kinds: IntArray) -> Iterator[Crossing]:
    """What lies between nodes: as many links up as down, the first half of them from switch to switch."""
    network = np.isin(kinds, _NETWORK)
    height = (network.sum(axis=1) + 1) // 2
    for climb in range(1, int(height.max(initial=0)) + 1):
        there = height >= climb
        one = int(there.argmax())
        kind = LINK_KINDS[int(kinds[one][network[one]][climb - 1])]
        yield Crossing(kind, climb, float(there.mean()))


def _nodes(groups: IntArray, fabric: Fabric) -> int:
    nodes = np.sort(fabric.node_ids(groups), axis=1)
    return int((1 + np.count_nonzero(np.diff(nodes, axis=1), axis=1)).max())
