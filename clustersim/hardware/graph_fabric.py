"""What does an irregular machine look like to a transfer?

Any directed graph of GPUs, switches, NICs and hosts. A transfer takes a shortest route by hops, then by latency, then
by the names of the vertices passed, seen from the target; or, with hashed ECMP, one of the routes that are equal in
hops and latency. `rules` say which links it may use; an NVLink domain is what NVLink edges connect in both directions.
Routes are searched when first asked for and kept per pair.
"""

from collections.abc import Iterable, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from clustersim.common.arrays import FloatArray, IntArray
from clustersim.common.errors import InputError
from clustersim.hardware import graph_tiers, shortest_paths
from clustersim.hardware.direct_links import PairLinks
from clustersim.hardware.ecmp import Ecmp, Spread
from clustersim.hardware.graph_direct_links import pairs_of
from clustersim.hardware.link_technology import TECHNOLOGIES, Technology
from clustersim.hardware.routing_rules import RULES, Rule, first_rule, next_rule
from clustersim.hardware.topology import LINK_KINDS, Ends, Link, LinkKind, LinkTable, Paths, Tier

if TYPE_CHECKING:
    import networkx as nx


class GraphFabric:
    """A fabric from a graph whose vertices have `kind` (GPUs also `node`).

    Its edges have `kind`, `bandwidth`, `latency` and `technology`. GPUs are numbered node by node, nodes in the order
    in which the graph first names one. Raises InputError if some of the first `used` GPUs (None: all) cannot reach
    another. healthy: what a disturbed fabric is without its disturbances.
    """

    def __init__(
        self,
        graph: "nx.DiGraph[str]",
        ecmp: Ecmp | None = None,
        used: int | None = None,
        healthy: "GraphFabric | None" = None,
    ) -> None:
        self._graph, self._ecmp, self._healthy = graph, ecmp or Spread(), healthy
        self._gpus, self._homes = _by_node(graph)
        self._refuse_unreachable(self._gpus[:used])
        self._links = _table(graph)
        self._ends = list(graph.edges())
        self._names = sorted(graph)  # vertices are numbered by name, so that the smaller number wins a tie
        number = {name: index for index, name in enumerate(self._names)}
        self._vertices = [number[gpu] for gpu in self._gpus]
        self._places = {rule: self._place(rule, number) for rule in RULES}
        self._levels = graph_tiers.levels(graph, self._gpus)
        self._routes: dict[tuple[int, int], tuple[int, ...]] = {}

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, GraphFabric):
            return NotImplemented
        mine, theirs = (
            (graph_fabric._ecmp, graph_fabric._healthy, *graph_fabric._written_out()) for graph_fabric in (self, other)
        )
        return mine == theirs

    def __hash__(self) -> int:
        return hash((self._ecmp, *self._names))

    def __reduce__(self) -> tuple[type["GraphFabric"], tuple[Any, ...]]:
        """Pickled and copied as its graph; that its GPUs reach each other was checked when it was read."""
        return GraphFabric, (self._graph, self._ecmp, 1, self._healthy)

    def _written_out(self) -> tuple[list[Any], list[Any]]:
        """Vertices and edges in their order, which numbers GPUs and links."""
        return list(self._graph.nodes(data=True)), list(self._graph.edges(data=True))

    @property
    def gpus(self) -> int:
        """How many GPUs the graph has."""
        return len(self._gpus)

    @property
    def links(self) -> LinkTable:
        """Properties of every edge, in the order of the graph's edges."""
        return self._links

    def domains(self, gpus: IntArray) -> IntArray:
        """The NVLink domain of each GPU (any shape)."""
        return self._levels["nvlink"][gpus]

    @cached_property
    def pairs(self) -> PairLinks | None:
        """Links of pairs of GPUs, in the healthy cluster; None where switches join them, or domains differ."""
        if self._healthy is not None:
            return self._healthy.pairs
        sizes = np.unique(np.bincount(self._levels["nvlink"]))
        seats = self.seats(np.arange(self.gpus))
        return pairs_of(self._graph, self._gpus, seats, int(sizes[0])) if len(sizes) == 1 else None

    @cached_property
    def _seated(self) -> IntArray:
        """The GPUs domain by domain."""
        return np.argsort(self._levels["nvlink"], kind="stable")

    def seats(self, gpus: IntArray) -> IntArray:
        """Where GPUs stand, domain by domain (any shape)."""
        return np.argsort(self._seated, kind="stable")[gpus]

    def seated(self, seats: IntArray) -> IntArray:
        """The GPUs that stand there (any shape)."""
        return self._seated[seats]

    def nodes(self, gpus: IntArray) -> IntArray:
        """The node of each GPU (any shape)."""
        return self._homes[gpus]

    def paths(self, sources: IntArray, targets: IntArray) -> Paths:
        """Routes of transfers from sources[i] to targets[i], both [n]."""
        pairs = list(zip(np.asarray(sources).tolist(), np.asarray(targets).tolist(), strict=True))
        self._find(pair for pair in dict.fromkeys(pairs) if pair not in self._routes)
        routes = [self._routes[pair] for pair in pairs]
        links = np.full((len(routes), max(map(len, routes), default=0)), -1, np.int64)
        for row, route in zip(links, routes, strict=True):
            row[: len(route)] = route
        latency: FloatArray = np.append(self._links.latency, 0.0)[links].sum(axis=1)
        return Paths(links, latency)

    def link(self, number: int) -> Link:
        """One edge, for people."""
        source, target = self._ends[number]
        edge = self._graph.edges[source, target]
        return Link(LinkKind(edge["kind"]), source, target, edge["bandwidth"], edge["latency"])

    def tier(self, gpus: Sequence[int] | IntArray) -> str:
        """The lowest tier whose links, with those below, connect all of these GPUs."""
        numbers = np.unique(np.asarray(gpus, np.int64))
        if len(numbers) == 1:
            return "gpu"
        joined = (name for name, labels in self._levels.items() if len(np.unique(labels[numbers])) == 1)
        return next(joined, "core")

    def tiers(self) -> tuple[Tier, ...]:
        """What the graph is built of, from the GPUs up."""
        return graph_tiers.tiers(self._graph)

    def graph(self) -> "nx.DiGraph[str]":
        """The graph, with how equal routes are chosen as its own attributes."""
        whole: nx.DiGraph[str] = self._graph.copy()
        whole.graph.update(self._ecmp.keys)
        return whole

    @cached_property
    def ends(self) -> Ends:
        """What stands at the ends of every edge."""
        others = [name for name in self._names if name not in set(self._gpus)]
        number = {name: index for index, name in enumerate([*self._gpus, *others])}
        source, target = ([number[edge[side]] for edge in self._ends] for side in (0, 1))
        return Ends(np.array(source, np.int64), np.array(target, np.int64), len(number))

    def find(self, source: str, target: str) -> int:
        """The number of an edge; raise InputError that says what is near."""
        for name in (source, target):
            if name not in self._graph:
                raise InputError(f"there is no {name} in this machine; {graph_tiers.near(name, self._names)}")
        if not self._graph.has_edge(source, target):
            others = graph_tiers.near(target, list(self._graph.successors(source)))
            raise InputError(f"no link leads from {source} to {target}; {others}")
        return self._ends.index((source, target))

    def members(self, number: int) -> int:  # noqa: ARG002 - every edge is one link
        """One: parallel links are written as one of their bandwidth."""
        return 1

    def nics(self, gpus: IntArray) -> IntArray:
        """The nearest edges of kind nic that lead from GPUs to the network and back, each once."""
        return np.unique(np.concatenate([graph_tiers.nics(self, gpu) for gpu in np.asarray(gpus).tolist()]))

    def changed(self, left: FloatArray) -> "GraphFabric":
        """A graph of the same vertices with the left part of every edge's bandwidth, [links]; 0 removes the edge."""
        graph = self._graph.copy()
        for number in np.flatnonzero(left != 1.0).tolist():
            if left[number] > 0.0:
                graph.edges[self._ends[number]]["bandwidth"] *= left[number]
            else:
                graph.remove_edge(*self._ends[number])
        return GraphFabric(graph, self._ecmp, used=1, healthy=self._healthy or self)

    def _refuse_unreachable(self, used: list[str]) -> None:
        first, *others = used
        for backwards, sentence in ((False, "cannot be reached from"), (True, "cannot reach")):
            reached = graph_tiers.reached(self._graph, first, backwards=backwards)
            for gpu in others:
                if gpu not in reached:
                    raise InputError(f"GPU {gpu} {sentence} GPU {first}; every GPU needs a way to every other")

    def _place(self, rule: Rule, number: dict[str, int]) -> tuple[shortest_paths.Mesh, frozenset[int]]:
        """The part of the graph that a rule allows, and the vertices that it bars."""
        mesh: shortest_paths.Mesh = {}
        for link, (source, target, edge) in enumerate(self._graph.edges(data=True)):
            if LinkKind(edge["kind"]) in rule.kinds:
                step = (number[target], link, round(edge["latency"] * 1e15))
                mesh.setdefault(number[source], []).append(step)
        kinds = graph_tiers.vertex_kinds(self._graph)
        return mesh, frozenset(number[name] for name, kind in kinds.items() if kind in rule.barred)

    def _find(self, pairs: Iterable[tuple[int, int]]) -> None:
        """Search the routes of pairs, one search for all targets of a source under one rule."""
        waiting: dict[tuple[int, Rule], list[int]] = {}
        for source, target in pairs:
            waiting.setdefault((source, self._rule(source, target)), []).append(target)
        for (source, rule), targets in waiting.items():
            self._search(source, rule, targets)

    def _rule(self, source: int, target: int) -> Rule:
        nvlink, homes = self._levels["nvlink"], self._homes
        return first_rule(
            same_domain=bool(nvlink[source] == nvlink[target]), same_node=bool(homes[source] == homes[target])
        )

    def _search(self, source: int, rule: Rule, targets: list[int]) -> None:
        """Find routes under a rule; whatever it leaves unreached is searched under the next one."""
        mesh, barred = self._places[rule]
        goals = {self._vertices[target] for target in targets}
        reached = shortest_paths.search(mesh, self._vertices[source], goals, barred)
        found = [target for target in targets if self._vertices[target] in reached.latency]
        choices = self._ecmp.choose(np.full(len(found), source), np.array(found, np.int64)).tolist()
        for target, choice in zip(found, choices, strict=True):
            self._routes[source, target] = shortest_paths.trace(reached, self._vertices[target], choice)
        if len(found) < len(targets):
            self._search(source, next_rule(rule), sorted(set(targets).difference(found)))


def _by_node(graph: "nx.DiGraph[str]") -> tuple[list[str], IntArray]:
    """Names of the GPUs, node by node, and the number of each one's node."""
    kinds = graph_tiers.vertex_kinds(graph)
    homes = {name: str(graph.nodes[name]["node"]) for name, kind in kinds.items() if kind == "gpu"}
    order = {home: place for place, home in enumerate(dict.fromkeys(homes.values()))}
    gpus = sorted(homes, key=lambda name: order[homes[name]])
    return gpus, np.array([order[homes[name]] for name in gpus], np.int64)


def _table(graph: "nx.DiGraph[str]") -> LinkTable:
    edges = [edge for _, _, edge in graph.edges(data=True)]
    return LinkTable(
        kind=np.array([LINK_KINDS.index(LinkKind(edge["kind"])) for edge in edges], np.int64),
        bandwidth=np.array([edge["bandwidth"] for edge in edges], np.float64),
        latency=np.array([edge["latency"] for edge in edges], np.float64),
        technology=np.array([TECHNOLOGIES.index(Technology(edge["technology"])) for edge in edges], np.int64),
    )
