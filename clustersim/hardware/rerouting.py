"""Rerouting around dead links of a regular cluster.

Routes as in an irregular machine (`graph_fabric`): fewest hops, then least latency, by the first rule that
leaves a route. So a GPU with a dead NIC sends over NVLink to a neighbour and on by that one's NIC, one with
dead NVLink uses PCIe and NIC. Nodes that are neither source nor target forward only where nothing else leads
on, so a search covers the switches and two nodes, and enters a target's node but does not leave it. One
search from each source, vectorized over all links of a step. Reference: Moore 1959 (breadth first).
"""

from dataclasses import dataclass

import numpy as np

from clustersim.common.arrays import BoolArray, IntArray
from clustersim.hardware.routing_rules import RoutingRule
from clustersim.hardware.topology import LINK_KINDS, VERTEX_KINDS, LinkEndpoints, LinkTable

_UNREACHED = np.iinfo(np.int64).max


@dataclass(frozen=True, slots=True)
class SearchGraph:
    """Input of a search: links, is_alive: [links], and kind and block of every vertex.

    vertex_kinds: [vertices] index into VERTEX_KINDS; block_ids: [vertices] node (or NVLink domain of several
    nodes) of each vertex, -1 for switches between them.
    """

    links: LinkTable
    link_endpoints: LinkEndpoints
    is_alive: BoolArray
    vertex_kinds: IntArray
    block_ids: IntArray


@dataclass(frozen=True, slots=True)
class SearchLabels:
    """Result of a search: hops and least latency (integer femtoseconds) to each vertex; [vertices] each.

    home_block: the only block that routes leave, None: any.
    """

    hops: IntArray
    latency: IntArray
    home_block: int | None

    def is_reached(self, vertex: int) -> bool:
        """Whether there is a route to a vertex."""
        return bool(self.hops[vertex] != _UNREACHED)


class RerouteSearch:
    """Searches over the alive links that one routing rule allows."""

    def __init__(self, graph: SearchGraph, rule: RoutingRule) -> None:
        kinds = [LINK_KINDS.index(kind) for kind in rule.link_kinds]
        usable = np.flatnonzero(graph.is_alive & np.isin(graph.links.kind, kinds))
        self._link_ids = usable[np.argsort(graph.link_endpoints.target[usable], kind="stable")]
        self._source, self._target = (
            graph.link_endpoints.source[self._link_ids],
            graph.link_endpoints.target[self._link_ids],
        )
        self._latency = np.rint(graph.links.latency[self._link_ids] * 1e15).astype(np.int64)
        self._is_passable: BoolArray = ~np.isin(
            graph.vertex_kinds, [VERTEX_KINDS.index(kind) for kind in rule.barred_kinds]
        )
        self._first_by_target = np.searchsorted(self._target, np.arange(graph.link_endpoints.vertex_count + 1))
        self._block_ids = graph.block_ids
        self._left_block = np.where(
            self._block_ids[self._target] < 0, self._block_ids[self._source], -1
        )  # block that each link leaves
        link_block = np.maximum(self._block_ids[self._source], self._block_ids[self._target])
        self._links_by_block = np.argsort(link_block, kind="stable")
        self._first_of_block = np.searchsorted(
            link_block[self._links_by_block], np.arange(-1, int(link_block.max(initial=-1)) + 2)
        )

    def search_nearby(self, source: int, targets: IntArray) -> SearchLabels:
        """Label vertices until all targets are reached; only source and target nodes, and switches, are visited."""
        home_block = int(self._block_ids[source])
        blocks = np.unique(np.append(self._block_ids[targets], [home_block, -1]))
        links = [self._links_by_block[slice(*self._first_of_block[block + 1 : block + 3])] for block in blocks.tolist()]
        return self._breadth_first(source, targets, np.concatenate(links), home_block)

    def search_everywhere(self, source: int, targets: IntArray) -> SearchLabels:
        """Label vertices, allowing all nodes to forward."""
        return self._breadth_first(source, targets, np.arange(len(self._link_ids)), None)

    def _breadth_first(self, source: int, targets: IntArray, links: IntArray, home_block: int | None) -> SearchLabels:
        """Label the vertices reachable over some of the links."""
        hops, latency = np.full((2, len(self._is_passable)), _UNREACHED)
        hops[source], latency[source], depth = 0, 0, 0
        links = links[self._is_allowed(links, home_block)]
        start, end = self._source[links], self._target[links]
        while (hops[targets] == _UNREACHED).any():
            frontier_links = np.flatnonzero((hops[start] == depth) & (hops[end] > depth))
            frontier_links = frontier_links[self._is_passable[start[frontier_links]] | (depth == 0)]
            if not len(frontier_links):
                break
            depth += 1
            hops[end[frontier_links]] = depth
            np.minimum.at(
                latency, end[frontier_links], latency[start[frontier_links]] + self._latency[links[frontier_links]]
            )
        return SearchLabels(hops, latency, home_block)

    def _is_allowed(self, links: IntArray, home_block: int | None) -> BoolArray:
        """[links] which links leave no block but `home_block`."""
        left_block = self._left_block[links]
        allowed: BoolArray = (
            (left_block < 0) | (left_block == home_block) if home_block is not None else np.ones(len(links), np.bool_)
        )
        return allowed

    def trace_route(self, labels: SearchLabels, target: int, choice: int) -> tuple[int, ...]:
        """Links of one of the shortest routes to a reached vertex; digits of `choice` select among equal ones."""
        links: list[int] = []
        while labels.hops[target]:
            candidates = self._predecessor_links(labels, target)
            choice, digit = divmod(choice, len(candidates))
            link = candidates[digit]
            target = int(self._source[link])
            links.append(int(self._link_ids[link]))
        return tuple(reversed(links))

    def _predecessor_links(self, labels: SearchLabels, target: int) -> IntArray:
        """Last links of all shortest routes to a vertex; from barred vertices only if that is the source itself."""
        candidates = np.arange(self._first_by_target[target], self._first_by_target[target + 1])
        source = self._source[candidates]
        is_usable = (self._is_passable[source] | (labels.hops[source] == 0)) & self._is_allowed(
            candidates, labels.home_block
        )
        is_closer = is_usable & (labels.hops[source] == labels.hops[target] - 1)
        candidates, source = candidates[is_closer], source[is_closer]
        shortest: IntArray = candidates[labels.latency[source] + self._latency[candidates] == labels.latency[target]]
        return shortest
