"""What does an irregular machine look like to a transfer?

Any directed graph of GPUs, switches, NICs and hosts. A transfer takes a shortest route by hops, then by latency, then by
the names of the vertices passed, seen from the target; or, with hashed ECMP, one of the routes that are equal in hops and
latency. The routes that hardware would not take are tried last:

    1. GPUs of one NVLink domain use NVLink alone; a domain is what NVLink edges connect in both directions
    2. GPUs of one node use PCIe and host links, and no NIC
    3. others use everything but NVLink, and pass through no GPU
    4. where that leaves no route, GPUs forward (a torus of GPUs) and NVLink may be mixed in

Every search stops at the layer of its furthest target; routes are kept per pair.
Reference: Dijkstra 1959, here breadth-first by hops with latency as the second key.
"""

from collections.abc import Callable, Iterable, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from clustersim.errors import InputError
from clustersim.hardware import graph_tiers
from clustersim.hardware.routing import Ecmp, Spread
from clustersim.hardware.topology import LINK_KINDS, FloatArray, IntArray, Link, LinkKind, LinkTable, Paths, Tier

if TYPE_CHECKING:
    import networkx as nx

Route = tuple[int, ...]
Edge = tuple[int, int, int]  # target vertex, link number, latency in femtoseconds
Mesh = dict[int, list[Edge]]

_NVLINK: Final = frozenset({LinkKind.NVLINK})
_INSIDE: Final = frozenset({LinkKind.PCIE, LinkKind.HOST})
_FEMTO: Final = 1e15  # latencies are compared as whole femtoseconds, so that equal sums are equal in any order


class GraphFabric:
    """A fabric from a graph whose vertices have `kind` (GPUs also `node`), edges `kind`, `bandwidth` and `latency`.

    GPUs are numbered node by node, nodes in the order in which the graph first names them. Raises InputError if some GPU
    cannot reach another.
    """

    def __init__(self, graph: "nx.DiGraph[str]", ecmp: Ecmp | None = None) -> None:
        self._graph, self._ecmp = graph, ecmp or Spread()
        self._ends = list(graph.edges())
        self._kinds = [LinkKind(kind) for _, _, kind in graph.edges(data="kind")]
        self._names = sorted(graph)  # vertices are numbered by name, so that the smaller number wins a tie
        self._number = {name: number for number, name in enumerate(self._names)}
        homes = {name: str(home) for name, home in graph.nodes(data="node") if graph.nodes[name]["kind"] == "gpu"}
        order = {home: place for place, home in enumerate(dict.fromkeys(homes.values()))}
        self._gpus = sorted(homes, key=lambda name: order[homes[name]])
        self._homes = np.array([order[homes[name]] for name in self._gpus], np.int64)
        self._links = self._table()
        self._refuse_unreachable()
        self._levels = graph_tiers.levels(graph, self._gpus)
        self._meshes = [self._mesh(level) for level in (self._by_nvlink, self._by_host, self._by_network, _anyhow)]
        self._routes: dict[tuple[int, int], Route] = {}

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

    def nodes(self, gpus: IntArray) -> IntArray:
        """The node of each GPU (any shape)."""
        return self._homes[gpus]

    def paths(self, sources: IntArray, targets: IntArray) -> Paths:
        """Routes of transfers from sources[i] to targets[i], both [n]."""
        pairs = list(zip(sources.tolist(), targets.tolist(), strict=True))
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
        return Link(self._kinds[number], source, target, edge["bandwidth"], edge["latency"])

    def tier(self, gpus: Sequence[int]) -> str:
        """The lowest tier whose links, with those below, connect all of these GPUs."""
        numbers = np.unique(np.asarray(gpus, np.int64))
        if len(numbers) == 1:
            return "gpu"
        joined = (name for name, label in self._levels.items() if len(np.unique(label[numbers])) == 1)
        return next(joined, "core")

    def tiers(self) -> tuple[Tier, ...]:
        """What the graph is built of, from the GPUs up."""
        return graph_tiers.tiers(self._graph)

    def graph(self) -> "nx.DiGraph[str]":
        """The graph itself."""
        return self._graph

    def _table(self) -> LinkTable:
        edges = list(self._graph.edges(data=True))
        return LinkTable(
            kind=np.array([LINK_KINDS.index(kind) for kind in self._kinds], np.int64),
            bandwidth=np.array([edge["bandwidth"] for _, _, edge in edges], np.float64),
            latency=np.array([edge["latency"] for _, _, edge in edges], np.float64),
        )

    def _refuse_unreachable(self) -> None:
        first = self._gpus[0]
        for reversed_, sentence in ((False, "{1} cannot be reached from {0}"), (True, "{1} cannot reach {0}")):
            reached = graph_tiers.reached(self._graph, first, backwards=reversed_)
            for gpu in self._gpus:
                if gpu not in reached:
                    raise InputError(f"GPU {sentence.format(first, gpu)}; every GPU must reach every other")

    def _mesh(self, allowed: Callable[["GraphFabric", int], bool]) -> Mesh: ...
