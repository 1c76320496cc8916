"""Routes and links of an irregular machine.

Any directed graph of GPUs, switches, NICs and hosts. A transfer takes a shortest route by hops, then by
latency, then by the names of the vertices passed, from the target backwards; or, with hashed ECMP, one of the
routes that are equal in hops and latency. `routing_rules` determine the usable links; an NVLink domain is a
set of GPUs that NVLink edges connect in both directions. Routes are searched on demand and cached per pair.
"""

from collections.abc import Iterable, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from clustersim.common.arrays import FloatArray, IntArray
from clustersim.common.errors import InputError
from clustersim.hardware import graph_tiers, shortest_paths
from clustersim.hardware.direct_links import DirectLinks
from clustersim.hardware.ecmp import Ecmp, SpreadEcmp
from clustersim.hardware.graph_direct_links import detect_direct_links
from clustersim.hardware.link_technology import TECHNOLOGIES, LinkTechnology
from clustersim.hardware.routing_rules import RULES, RoutingRule, first_rule, next_rule
from clustersim.hardware.topology import LINK_KINDS, FabricTier, LinkEndpoints, LinkInfo, LinkKind, LinkTable, Paths

if TYPE_CHECKING:
    import networkx as nx


class GraphFabric:
    """A fabric from a graph whose vertices have `kind` (GPUs also `node`).

    Its edges have `kind`, `bandwidth`, `latency` and `technology`. GPUs are numbered node by node, nodes in the
    order of their first mention in the graph. Raises InputError if some of the first `used_count` GPUs (None:
    all) cannot reach another. healthy: for a degraded fabric, the one without degradations.
    """

    def __init__(
        self,
        graph: "nx.DiGraph[str]",
        ecmp: Ecmp | None = None,
        used_count: int | None = None,
        healthy: "GraphFabric | None" = None,
    ) -> None:
        self._graph, self._ecmp, self._healthy = graph, ecmp or SpreadEcmp(), healthy
        self._gpus, self._node_of_gpu = _gpus_by_node(graph)
        self._require_connected(self._gpus[:used_count])
        self._links = _build_link_table(graph)
        self._edges = list(graph.edges())
        self._vertex_names = sorted(graph)  # vertices are numbered by name, so that the smaller id wins a tie
        vertex_ids = {name: index for index, name in enumerate(self._vertex_names)}
        self._gpu_vertices = [vertex_ids[gpu] for gpu in self._gpus]
        self._subgraphs = {rule: self._build_subgraph(rule, vertex_ids) for rule in RULES}
        self._tier_labels = graph_tiers.label_by_tier(graph, self._gpus)
        self._routes: dict[tuple[int, int], tuple[int, ...]] = {}

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, GraphFabric):
            return NotImplemented
        self_key, other_key = (
            (graph_fabric._ecmp, graph_fabric._healthy, *graph_fabric._graph_data()) for graph_fabric in (self, other)
        )
        return self_key == other_key

    def __hash__(self) -> int:
        return hash((self._ecmp, *self._vertex_names))

    def __reduce__(self) -> tuple[type["GraphFabric"], tuple[Any, ...]]:
        """Pickled and copied as its graph; connectivity was checked when it was read."""
        return GraphFabric, (self._graph, self._ecmp, 1, self._healthy)

    def _graph_data(self) -> tuple[list[Any], list[Any]]:
        """Vertices and edges in their order, which determines the ids of GPUs and links."""
        return list(self._graph.nodes(data=True)), list(self._graph.edges(data=True))

    @property
    def gpu_count(self) -> int:
        """Number of GPUs of the graph."""
        return len(self._gpus)

    @property
    def links(self) -> LinkTable:
        """Properties of every edge, in the order of the graph's edges."""
        return self._links

    def domain_ids(self, gpus: IntArray) -> IntArray:
        """The NVLink domain of each GPU (any shape)."""
        return self._tier_labels["nvlink"][gpus]

    @cached_property
    def direct_links(self) -> DirectLinks | None:
        """Direct links between GPUs, of the healthy cluster; None where switches join them, or domains differ."""
        if self._healthy is not None:
            return self._healthy.direct_links
        domain_sizes = np.unique(np.bincount(self._tier_labels["nvlink"]))
        slots = self.domain_slots(np.arange(self.gpu_count))
        return (
            detect_direct_links(self._graph, self._gpus, slots, int(domain_sizes[0]))
            if len(domain_sizes) == 1
            else None
        )

    @cached_property
    def _gpus_by_domain(self) -> IntArray:
        """[gpus] the GPUs, domain by domain."""
        return np.argsort(self._tier_labels["nvlink"], kind="stable")

    def domain_slots(self, gpus: IntArray) -> IntArray:
        """Position of GPUs, domain by domain (any shape)."""
        return np.argsort(self._gpus_by_domain, kind="stable")[gpus]

    def gpus_at_slots(self, slots: IntArray) -> IntArray:
        """GPUs at these positions (any shape)."""
        return self._gpus_by_domain[slots]

    def node_ids(self, gpus: IntArray) -> IntArray:
        """The node of each GPU (any shape)."""
        return self._node_of_gpu[gpus]

    def find_paths(self, sources: IntArray, targets: IntArray) -> Paths:
        """Routes of transfers from sources[i] to targets[i], both [n]."""
        pairs = list(zip(np.asarray(sources).tolist(), np.asarray(targets).tolist(), strict=True))
        self._search_pairs(pair for pair in dict.fromkeys(pairs) if pair not in self._routes)
        routes = [self._routes[pair] for pair in pairs]
        links = np.full((len(routes), max(map(len, routes), default=0)), -1, np.int64)
        for path, route in zip(links, routes, strict=True):
            path[: len(route)] = route
        latency: FloatArray = np.append(self._links.latency, 0.0)[links].sum(axis=1)
        return Paths(links, latency)

    def link_info(self, link_id: int) -> LinkInfo:
        """One edge, for display."""
        source, target = self._edges[link_id]
        edge = self._graph.edges[source, target]
        return LinkInfo(LinkKind(edge["kind"]), source, target, edge["bandwidth"], edge["latency"])

    def highest_tier(self, gpus: Sequence[int] | IntArray) -> str:
        """The lowest tier whose links, with those below, connect all of these GPUs."""
        gpu_ids = np.unique(np.asarray(gpus, np.int64))
        if len(gpu_ids) == 1:
            return "gpu"
        connecting = (name for name, labels in self._tier_labels.items() if len(np.unique(labels[gpu_ids])) == 1)
        return next(connecting, "core")

    def describe_tiers(self) -> tuple[FabricTier, ...]:
        """The tiers of the graph, from the GPUs up."""
        return graph_tiers.describe_tiers(self._graph)

    def to_graph(self) -> "nx.DiGraph[str]":
        """A copy of the graph, with the ECMP settings as graph attributes."""
        graph: nx.DiGraph[str] = self._graph.copy()
        graph.graph.update(self._ecmp.file_keys)
        return graph

    @cached_property
    def link_endpoints(self) -> LinkEndpoints:
        """Endpoint vertices of every edge."""
        other_names = [name for name in self._vertex_names if name not in set(self._gpus)]
        vertex_ids = {name: index for index, name in enumerate([*self._gpus, *other_names])}
        source, target = ([vertex_ids[edge[side]] for edge in self._edges] for side in (0, 1))
        return LinkEndpoints(np.array(source, np.int64), np.array(target, np.int64), len(vertex_ids))

    def find_link(self, source: str, target: str) -> int:
        """Id of an edge; raise InputError with a suggestion."""
        for name in (source, target):
            if name not in self._graph:
                raise InputError(
                    f"there is no {name} in this machine; {graph_tiers.suggest_vertex(name, self._vertex_names)}"
                )
        if not self._graph.has_edge(source, target):
            suggestion = graph_tiers.suggest_vertex(target, list(self._graph.successors(source)))
            raise InputError(f"no link leads from {source} to {target}; {suggestion}")
        return self._edges.index((source, target))

    def parallel_link_count(self, link_id: int) -> int:  # noqa: ARG002 - every edge is one link
        """One: parallel links are written as one of their summed bandwidth."""
        return 1

    def nic_links(self, gpus: IntArray) -> IntArray:
        """The nearest edges of kind nic that lead from GPUs to the network and back, each once."""
        return np.unique(
            np.concatenate([graph_tiers.nearest_nic_links(self, gpu) for gpu in np.asarray(gpus).tolist()])
        )

    def with_degraded_links(self, bandwidth_fraction: FloatArray) -> "GraphFabric":
        """A graph of the same vertices with edge bandwidths scaled by bandwidth_fraction, [links].

        0 removes the edge.
        """
        graph = self._graph.copy()
        for link_id in np.flatnonzero(bandwidth_fraction != 1.0).tolist():
            if bandwidth_fraction[link_id] > 0.0:
                graph.edges[self._edges[link_id]]["bandwidth"] *= bandwidth_fraction[link_id]
            else:
                graph.remove_edge(*self._edges[link_id])
        return GraphFabric(graph, self._ecmp, used_count=1, healthy=self._healthy or self)

    def _require_connected(self, gpu_names: list[str]) -> None:
        first, *other_gpus = gpu_names
        for backwards, message in ((False, "cannot be reached from"), (True, "cannot reach")):
            reached = graph_tiers.reachable_vertices(self._graph, first, backwards=backwards)
            for gpu in other_gpus:
                if gpu not in reached:
                    raise InputError(f"GPU {gpu} {message} GPU {first}; every GPU needs a way to every other")

    def _build_subgraph(
        self, rule: RoutingRule, vertex_ids: dict[str, int]
    ) -> tuple[shortest_paths.Adjacency, frozenset[int]]:
        """Adjacency over the links that a rule allows, and the vertices that it bars."""
        adjacency: shortest_paths.Adjacency = {}
        for link, (source, target, edge) in enumerate(self._graph.edges(data=True)):
            if LinkKind(edge["kind"]) in rule.link_kinds:
                edge_entry = (vertex_ids[target], link, round(edge["latency"] * 1e15))
                adjacency.setdefault(vertex_ids[source], []).append(edge_entry)
        kinds = graph_tiers.vertex_kinds(self._graph)
        return adjacency, frozenset(vertex_ids[name] for name, kind in kinds.items() if kind in rule.barred_kinds)

    def _search_pairs(self, pairs: Iterable[tuple[int, int]]) -> None:
        """Search the routes of pairs, one search for all targets of a source under one rule."""
        pending: dict[tuple[int, RoutingRule], list[int]] = {}
        for source, target in pairs:
            pending.setdefault((source, self._first_rule(source, target)), []).append(target)
        for (source, rule), targets in pending.items():
            self._search_routes(source, rule, targets)

    def _first_rule(self, source: int, target: int) -> RoutingRule:
        nvlink, nodes = self._tier_labels["nvlink"], self._node_of_gpu
        return first_rule(
            same_domain=bool(nvlink[source] == nvlink[target]), same_node=bool(nodes[source] == nodes[target])
        )

    def _search_routes(self, source: int, rule: RoutingRule, targets: list[int]) -> None:
        """Find routes under a rule; unreached targets are searched under the next rule."""
        adjacency, barred = self._subgraphs[rule]
        goals = {self._gpu_vertices[target] for target in targets}
        reached = shortest_paths.search_shortest(adjacency, self._gpu_vertices[source], goals, barred)
        reachable = [target for target in targets if self._gpu_vertices[target] in reached.latency]
        choices = self._ecmp.choose_paths(np.full(len(reachable), source), np.array(reachable, np.int64)).tolist()
        for target, choice in zip(reachable, choices, strict=True):
            self._routes[source, target] = shortest_paths.trace_route(reached, self._gpu_vertices[target], choice)
        if len(reachable) < len(targets):
            self._search_routes(source, next_rule(rule), sorted(set(targets).difference(reachable)))


def _gpus_by_node(graph: "nx.DiGraph[str]") -> tuple[list[str], IntArray]:
    """Names of the GPUs, node by node, and [gpus] the index of each one's node."""
    kinds = graph_tiers.vertex_kinds(graph)
    node_names = {name: str(graph.nodes[name]["node"]) for name, kind in kinds.items() if kind == "gpu"}
    node_ids = {node_name: index for index, node_name in enumerate(dict.fromkeys(node_names.values()))}
    gpus = sorted(node_names, key=lambda name: node_ids[node_names[name]])
    return gpus, np.array([node_ids[node_names[name]] for name in gpus], np.int64)


def _build_link_table(graph: "nx.DiGraph[str]") -> LinkTable:
    edges = [edge for _, _, edge in graph.edges(data=True)]
    return LinkTable(
        kind=np.array([LINK_KINDS.index(LinkKind(edge["kind"])) for edge in edges], np.int8),
        bandwidth=np.array([edge["bandwidth"] for edge in edges], np.float64),
        latency=np.array([edge["latency"] for edge in edges], np.float64),
        technology=np.array([TECHNOLOGIES.index(LinkTechnology(edge["technology"])) for edge in edges], np.int8),
    )
