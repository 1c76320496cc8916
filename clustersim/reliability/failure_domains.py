"""What of a job can break, and what breaks with it?"""

from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Final

import numpy as np

from clustersim.common.arrays import IntArray
from clustersim.hardware.failures import FailureComponent, FailureDomain
from clustersim.hardware.topology import Fabric
from clustersim.scenario.resolved import ResolvedScenario

RACK: Final = 4
"""Nodes of a rack where an NVLink domain is one node: four DGX H100 (NVIDIA DGX SuperPOD reference architecture, H100,
RA-11333, 2023: 8 racks of 4 make a scalable unit of 32)."""


@dataclass(frozen=True, slots=True)
class Counts:
    """How many components of each kind a job has."""

    gpus: int
    nodes: int
    nics: int
    switches: int
    racks: int

    def of(self, component: FailureComponent) -> int:
        """How many of a kind; every NIC has one link to its switch."""
        match component:
            case FailureComponent.GPU:
                return self.gpus
            case FailureComponent.NODE:
                return self.nodes
            case FailureComponent.NIC | FailureComponent.LINK:
                return self.nics
            case FailureComponent.SWITCH:
                return self.switches
            case FailureComponent.RACK:
                return self.racks
        return 1


@dataclass(frozen=True)
class Site:
    """The nodes of a job, 0 to nodes-1, and which of them belong together.

    per_rack: nodes of one; bound: nodes of a rack are one NVLink domain, so that one of them is replaced from its own
    rack, or with all of it; leaf: by node, the first switch of its first NIC; replica: ranks of one data-parallel
    replica.
    """

    gpus: int
    nodes: int
    per_rack: int
    bound: bool
    leaf: tuple[int, ...]
    nics: int
    switches: int
    replica: int

    @cached_property
    def counts(self) -> Counts:
        """How many components there are."""
        racks = -(-self.nodes // self.per_rack)
        return Counts(self.gpus, self.nodes, self.nics, self.switches, racks)

    def rack(self, node: int) -> int:
        """The rack of a node."""
        return node // self.per_rack

    def taken(self, takes: FailureDomain, node: int) -> tuple[int, ...]:
        """The nodes that are lost with what breaks at one of them."""
        match takes:
            case FailureDomain.NODE:
                return (node,)
            case FailureDomain.RACK:
                first = self.rack(node) * self.per_rack
                return tuple(range(first, min(first + self.per_rack, self.nodes)))
            case FailureDomain.LEAF:
                return self._under[self.leaf[node]]
        return ()

    @cached_property
    def _under(self) -> dict[int, tuple[int, ...]]:
        under: dict[int, list[int]] = {}
        for node, leaf in enumerate(self.leaf):
            under.setdefault(leaf, []).append(node)
        return {leaf: tuple(nodes) for leaf, nodes in under.items()}


def site_of(setup: ResolvedScenario) -> Site:
    """That of a job on its cluster."""
    gpus = setup.layout.world_size
    nodes, in_domain, leaf, nics, switches = _places(setup.cluster.fabric, gpus)
    asked = setup.reliability.rack_nodes
    return Site(
        gpus=gpus,
        nodes=nodes,
        per_rack=min(nodes, asked or (in_domain if in_domain > 1 else RACK)),
        bound=in_domain > 1,
        leaf=leaf,
        nics=nics,
        switches=switches,
        replica=gpus // setup.layout.dp,
    )


@lru_cache(maxsize=8)
def _places(fabric: Fabric, gpus: int) -> tuple[int, int, tuple[int, ...], int, int]:
    """Nodes of a job, nodes of an NVLink domain, by node its first switch, NICs, and such switches."""
    nodes, domains = (_numbered(of(np.arange(gpus))) for of in (fabric.node_ids, fabric.domain_ids))
    many = int(nodes.max()) + 1
    return many, max(1, round(many / (int(domains.max()) + 1))), *_leaves(fabric, nodes)


def _numbered(labels: IntArray) -> IntArray:
    """Labels as numbers from 0, in the order in which they come."""
    _, first, inverse = np.unique(labels, return_index=True, return_inverse=True)
    order = np.empty(len(first), np.int64)
    order[np.argsort(first)] = np.arange(len(first))
    return order[inverse]


def _leaves(fabric: Fabric, nodes: IntArray) -> tuple[tuple[int, ...], int, int]:
    """By node the switch of its first NIC, and how many NICs and such switches there are.

    Of the two ends of a NIC's links the switch is the one with more of them.
    """
    ends = fabric.link_endpoints
    links = fabric.nic_links(np.arange(len(nodes)))
    if not len(links):
        return tuple(range(int(nodes.max()) + 1)), 0, 0
    many = np.bincount(ends.source[links], minlength=ends.vertex_count) + np.bincount(
        ends.target[links], minlength=ends.vertex_count
    )

    def switch(of: IntArray) -> IntArray:
        source, target = ends.source[of], ends.target[of]
        return np.where(many[source] > many[target], source, target)

    _, firsts = np.unique(nodes, return_index=True)
    leaf = tuple(int(switch(fabric.nic_links(firsts[node : node + 1])[:1])[0]) for node in range(len(firsts)))
    return leaf, len(links) // 2, len(np.unique(switch(links)))
