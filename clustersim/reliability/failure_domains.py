"""Which components of a job can fail, and which nodes are lost with them?"""

from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Final

import numpy as np

from clustersim.common.arrays import IntArray
from clustersim.hardware.failures import FailureComponent, FailureDomain
from clustersim.hardware.sites import SitesFabric
from clustersim.hardware.topology import Fabric, HasSites
from clustersim.scenario.resolved import ResolvedScenario

DEFAULT_RACK_NODES: Final = 4
"""Nodes per rack where an NVLink domain is one node: four DGX H100 (NVIDIA DGX SuperPOD reference
architecture, H100, RA-11333, 2023: 8 racks of 4 make a scalable unit of 32).
"""


@dataclass(frozen=True, slots=True)
class ComponentCounts:
    """Number of components of each kind in a job."""

    gpus: int
    nodes: int
    nics: int
    switches: int
    racks: int
    sites: int = 1
    site_links: int = 0

    def count_of(self, component: FailureComponent) -> int:
        """The number of components of a kind; every NIC has one link to its switch."""
        counts = {
            FailureComponent.GPU: self.gpus,
            FailureComponent.NODE: self.nodes,
            FailureComponent.NIC: self.nics,
            FailureComponent.LINK: self.nics,
            FailureComponent.SWITCH: self.switches,
            FailureComponent.RACK: self.racks,
            FailureComponent.SITE: self.sites,
            FailureComponent.WAN: self.site_links,
        }
        return counts.get(component, 1)


@dataclass(frozen=True)
class FailureDomains:
    """The nodes of a job, 0 to nodes-1, and the failure domains they belong to.

    nodes_per_rack: nodes per rack; is_nvlink_rack: a rack is one NVLink domain, so its nodes are replaced from
    its own spares, or all of it at once; leaf_by_node: [nodes] switch of the node's first NIC; switches: number
    of such switches; replica_ranks: ranks of one data-parallel replica; site_by_node: [nodes] site of each node, empty
    where there is only one; site_links: links between sites, both directions together.
    """

    gpus: int
    nodes: int
    nodes_per_rack: int
    is_nvlink_rack: bool
    leaf_by_node: tuple[int, ...]
    nics: int
    switches: int
    replica_ranks: int
    site_by_node: tuple[int, ...] = ()
    site_links: int = 0

    @cached_property
    def counts(self) -> ComponentCounts:
        """Number of components of each kind."""
        racks = -(-self.nodes // self.nodes_per_rack)
        sites = len(set(self.site_by_node)) or 1
        return ComponentCounts(self.gpus, self.nodes, self.nics, self.switches, racks, sites, self.site_links)

    def rack_of(self, node: int) -> int:
        """The rack of a node."""
        return node // self.nodes_per_rack

    def lost_nodes(self, domain: FailureDomain, node: int) -> tuple[int, ...]:
        """The nodes lost with a failure at one of them."""
        match domain:
            case FailureDomain.NODE:
                return (node,)
            case FailureDomain.RACK:
                first_node = self.rack_of(node) * self.nodes_per_rack
                return tuple(range(first_node, min(first_node + self.nodes_per_rack, self.nodes)))
            case FailureDomain.LEAF:
                return self._nodes_by_leaf[self.leaf_by_node[node]]
            case FailureDomain.SITE:
                sites = self.site_by_node or (0,) * self.nodes
                return tuple(other for other in range(self.nodes) if sites[other] == sites[node])
        return ()

    @cached_property
    def _nodes_by_leaf(self) -> dict[int, tuple[int, ...]]:
        by_leaf: dict[int, list[int]] = {}
        for node, leaf in enumerate(self.leaf_by_node):
            by_leaf.setdefault(leaf, []).append(node)
        return {leaf: tuple(nodes) for leaf, nodes in by_leaf.items()}


def build_failure_domains(resolved: ResolvedScenario) -> FailureDomains:
    """The failure domains of a job on its cluster."""
    gpus = resolved.layout.world_size
    nodes, domain_nodes, leaf_by_node, nics, switches = _fabric_domains(resolved.cluster.fabric, gpus)
    configured = resolved.reliability.rack_nodes
    return FailureDomains(
        gpus=gpus,
        nodes=nodes,
        nodes_per_rack=min(nodes, configured or (domain_nodes if domain_nodes > 1 else DEFAULT_RACK_NODES)),
        is_nvlink_rack=domain_nodes > 1,
        leaf_by_node=leaf_by_node,
        nics=nics,
        switches=switches,
        replica_ranks=gpus // resolved.layout.dp,
        site_by_node=_site_by_node(resolved.cluster.fabric, gpus),
        site_links=_site_link_count(resolved),
    )


def _site_by_node(fabric: Fabric, gpus: int) -> tuple[int, ...]:
    """The site of each node of a job; empty on a single site."""
    site_ids = fabric.site_ids(np.arange(gpus)) if isinstance(fabric, HasSites) else None
    if site_ids is None:
        return ()
    _, first_gpus = np.unique(_dense_labels(fabric.node_ids(np.arange(gpus))), return_index=True)
    return tuple(site_ids[first_gpus].tolist())


def _site_link_count(resolved: ResolvedScenario) -> int:
    """Links between sites of the job, both directions together."""
    machine = resolved.cluster.machine
    site_ids = machine.site_ids(resolved.cluster.machine_gpu_ids) if isinstance(machine, SitesFabric) else None
    if site_ids is None or not isinstance(machine, SitesFabric):
        return 0
    used = set(site_ids.tolist())
    links = {frozenset((link.source, link.target)) for link in machine.site_links}
    return sum(link <= used for link in links)


@lru_cache(maxsize=8)
def _fabric_domains(fabric: Fabric, gpus: int) -> tuple[int, int, tuple[int, ...], int, int]:
    """Nodes of a job, nodes per NVLink domain, first switch by node, NICs, and number of such switches."""
    nodes, domains = (_dense_labels(label_gpus(np.arange(gpus))) for label_gpus in (fabric.node_ids, fabric.domain_ids))
    node_count = int(nodes.max()) + 1
    return node_count, max(1, round(node_count / (int(domains.max()) + 1))), *_leaf_switches(fabric, nodes)


def _dense_labels(labels: IntArray) -> IntArray:
    """Labels relabeled 0, 1, ... in order of first occurrence."""
    _, first, inverse = np.unique(labels, return_index=True, return_inverse=True)
    order = np.empty(len(first), np.int64)
    order[np.argsort(first)] = np.arange(len(first))
    return order[inverse]


def _leaf_switches(fabric: Fabric, nodes: IntArray) -> tuple[tuple[int, ...], int, int]:
    """The switch of each node's first NIC, the number of NICs and of such switches.

    Of the two ends of a NIC's links the switch is the one with more of them.
    """
    ends = fabric.link_endpoints
    links = fabric.nic_links(np.arange(len(nodes)))
    if not len(links):
        return tuple(range(int(nodes.max()) + 1)), 0, 0
    link_count = np.bincount(ends.source[links], minlength=ends.vertex_count) + np.bincount(
        ends.target[links], minlength=ends.vertex_count
    )

    def switch_end(link_ids: IntArray) -> IntArray:
        source, target = ends.source[link_ids], ends.target[link_ids]
        return np.where(link_count[source] > link_count[target], source, target)

    _, first_gpus = np.unique(nodes, return_index=True)
    leaf_by_node = tuple(
        int(switch_end(fabric.nic_links(first_gpus[node : node + 1])[:1])[0]) for node in range(len(first_gpus))
    )
    return leaf_by_node, len(links) // 2, len(np.unique(switch_end(links)))
