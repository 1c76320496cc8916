"""What does a regular cluster with slow and dead links look like to a transfer?

Link numbers stay those of the healthy cluster. Routing does not know how fast links are, so slow ones change nothing
but bandwidths. Around dead ones, what was hashed to them is hashed anew, as switches do among the ways that are left;
what then has no way left takes a detour (`rerouting`). A GPU whose NVLink is dead is an NVLink domain of its own.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np

from clustersim.common.arrays import BoolArray, FloatArray, IntArray
from clustersim.common.pickling import FieldState
from clustersim.hardware.clos import Clos
from clustersim.hardware.direct_links import PairLinks
from clustersim.hardware.rerouting import Detours, Labels, Machine
from clustersim.hardware.routing_rules import ANYHOW, Rule, first_rule, next_rule
from clustersim.hardware.topology import LINK_KINDS, VERTEX_KINDS, Ends, Fabric, Link, LinkKind, LinkTable, Paths, Tier
from clustersim.hardware.vertex_tier import Layer

if TYPE_CHECKING:
    import networkx as nx

_SWITCHED = [LINK_KINDS.index(LinkKind.LEAF), LINK_KINDS.index(LinkKind.SPINE)]


@dataclass(frozen=True, eq=False)
class DisturbedClos(FieldState):
    """A regular cluster and what is left of each link's bandwidth, [links]; 0 is a dead link.

    Not slotted: what is worked out once is kept. In `links` a dead link keeps its bandwidth; nobody uses it.
    """

    healthy: Clos
    left: FloatArray

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, DisturbedClos):
            return NotImplemented
        return self.healthy == other.healthy and np.array_equal(self.left, other.left)

    def __hash__(self) -> int:
        return hash((self.healthy, self.left.tobytes()))

    @property
    def gpus(self) -> int:
        """How many GPUs the fabric connects."""
        return self.healthy.gpus

    @cached_property
    def links(self) -> LinkTable:
        """Properties of every link."""
        table = self.healthy.links
        return replace(table, bandwidth=table.bandwidth * np.where(self._dead, 1.0, self.left))

    @property
    def pairs(self) -> PairLinks | None:
        """The links of pairs in the healthy cluster: around a dead one its neighbours pass on what it carried."""
        return self.healthy.pairs

    def seats(self, gpus: IntArray) -> IntArray:
        """Where GPUs stand (any shape): the machine's own numbers."""
        return gpus

    def seated(self, seats: IntArray) -> IntArray:
        """Which GPUs stand there (any shape)."""
        return seats

    @property
    def ends(self) -> Ends:
        """What stands at the ends of every link."""
        return self.healthy.ends

    @cached_property
    def _dead(self) -> BoolArray:
        dead: BoolArray = self.left == 0.0
        return dead

    @cached_property
    def _dead_or_none(self) -> BoolArray:
        """By link number, and false for number -1."""
        return np.append(self._dead, False)

    @cached_property
    def _any_dead(self) -> bool:
        return bool(self._dead.any())

    @cached_property
    def _domains(self) -> IntArray:
        """Domains of all GPUs, [gpus], numbered as their first GPUs come."""
        gpus, way = np.arange(self.gpus), self.healthy.wiring.nvlink
        domains = self.healthy.domains(gpus)
        if not way.up.count:
            return domains
        cut = self._dead[way.up.first + gpus] | self._dead[way.down.first + gpus]
        own = domains * (self.gpus + 1) + np.where(cut, gpus + 1, 0)
        _, first, label = np.unique(own, return_index=True, return_inverse=True)
        return np.argsort(np.argsort(first))[label.reshape(-1)]

    def domains(self, gpus: IntArray) -> IntArray:
        """The NVLink domain of each GPU (any shape)."""
        return self._domains[gpus] if self._any_dead else self.healthy.domains(gpus)

    def nodes(self, gpus: IntArray) -> IntArray:
        """The node of each GPU (any shape)."""
        return self.healthy.nodes(gpus)

    def paths(self, sources: IntArray, targets: IntArray) -> Paths:
        """Routes of transfers from sources[i] to targets[i], both [n]."""
        sources, targets = np.asarray(sources, np.int64), np.asarray(targets, np.int64)
        paths = self.healthy.paths(sources, targets)
        if not self._any_dead:
            return paths
        broken = np.flatnonzero(self._broken(paths, sources, targets))
        for fabric in self._rehashed:
            if not len(broken):
                break
            again = fabric.paths(sources[broken], targets[broken])
            mended = ~self._broken(again, sources[broken], targets[broken])
            paths = _put(paths, broken[mended], Paths(again.links[mended], again.latency[mended]))
            broken = broken[~mended]
        return _put(paths, broken, self._detours(sources[broken], targets[broken])) if len(broken) else paths

    def _broken(self, paths: Paths, sources: IntArray, targets: IntArray) -> BoolArray:
        """Which routes use a dead link, or an NVLink domain that is none any more: [n]."""
        split = (self.healthy.domains(sources) == self.healthy.domains(targets)) & (
            self.domains(sources) != self.domains(targets)
        )
        broken: BoolArray = split | self._dead_or_none[paths.links].any(axis=1)
        return broken

    @cached_property
    def _rehashed(self) -> tuple[Clos, ...]:
        """The healthy cluster with other hashes; none where no hashed link is dead."""
        network = self.healthy.network
        if network is None or not np.isin(self.links.kind[self._dead], _SWITCHED).any():
            return ()
        return tuple(replace(self.healthy, network=replace(network, ecmp=ecmp)) for ecmp in network.ecmp.others())

    def _detours(self, sources: IntArray, targets: IntArray) -> Paths:
        """Routes found by search, kept per pair; one search for all targets of a source under one rule."""
        pairs = list(zip(sources.tolist(), targets.tolist(), strict=True))
        waiting: dict[tuple[int, Rule], list[int]] = {}
        for source, target in dict.fromkeys(pairs):
            if (source, target) not in self._found:
                waiting.setdefault((source, self._rule(source, target)), []).append(target)
        for (source, rule), missing in waiting.items():
            self._search(source, rule, missing)
        return self._as_paths([self._found[pair] for pair in pairs])

    def _search(self, source: int, rule: Rule, targets: list[int]) -> None:
        """Find routes under a rule; whatever it leaves unreached is searched under the next one, at last everywhere."""
        if rule not in self._searches:
            self._searches[rule] = Detours(self._machine, rule)
        search = self._searches[rule]
        rest = self._trace(source, search, search.search(source, np.array(targets)), targets)
        if rest and rule == ANYHOW:
            rest = self._trace(source, search, search.search_everywhere(source, np.array(rest)), rest)
        if rest:
            self._search(source, next_rule(rule), rest)

    def _trace(self, source: int, search: Detours, labels: Labels, targets: list[int]) -> list[int]:
        """Keep the routes to the targets that were reached; the others."""
        for target, choice in zip(targets, self._choices(source, np.array(targets)), strict=True):
            if labels.reached(target):
                self._found[source, target] = search.trace(labels, target, choice)
        return [target for target in targets if not labels.reached(target)]

    def _choices(self, source: int, targets: IntArray) -> list[int]:
        """Which of several equal routes each transfer takes."""
        network = self.healthy.network
        if network is None:
            return [0] * len(targets)
        return network.ecmp.choose(np.full(len(targets), source), targets).tolist()  # type: ignore[no-any-return]

    @cached_property
    def _found(self) -> dict[tuple[int, int], tuple[int, ...]]:
        return {}

    @cached_property
    def _searches(self) -> dict[Rule, Detours]:
        return {}

    @cached_property
    def _machine(self) -> Machine:
        layers = self.healthy.wiring.layers
        kinds = np.repeat([VERTEX_KINDS.index(layer.word) for layer in layers], [layer.count for layer in layers])
        blocks = np.concatenate([self._blocks(layer) for layer in layers])
        return Machine(self.links, self.ends, ~self._dead, kinds, blocks)

    def _blocks(self, layer: Layer) -> IntArray:
        """Which node, or NVLink domain of several nodes, each vertex of a layer is in; -1 for switches between them."""
        node, index = self.healthy.node, np.arange(layer.count)
        first_gpu = {
            "gpu": index,
            "nvswitch": index * node.domain_gpus,
            "host": index // (layer.per or 1) * node.gpus,
            "nic": index // (layer.per or 1) * node.gpus,
        }
        return first_gpu.get(layer.word, index - index - 1) // max(node.domain_gpus, node.gpus)

    def _rule(self, source: int, target: int) -> Rule:
        ends = np.array([source, target])
        domains, nodes = self.domains(ends), self.nodes(ends)
        return first_rule(same_domain=bool(domains[0] == domains[1]), same_node=bool(nodes[0] == nodes[1]))

    def _as_paths(self, routes: list[tuple[int, ...]]) -> Paths:
        links = np.full((len(routes), max(map(len, routes))), -1, np.int64)
        for row, route in zip(links, routes, strict=True):
            row[: len(route)] = route
        return Paths(links, np.append(self.links.latency, 0.0)[links].sum(axis=1))

    def link(self, number: int) -> Link:
        """One link, for people."""
        return replace(self.healthy.link(number), bandwidth=float(self.links.bandwidth[number]))

    def find(self, source: str, target: str) -> int:
        """The number of the link between two ends; raise InputError that says what is near."""
        return self.healthy.find(source, target)

    def members(self, number: int) -> int:
        """How many parallel links one link stood for when all were alive."""
        return self.healthy.members(number)

    def nics(self, gpus: IntArray) -> IntArray:
        """Links of the NICs that serve GPUs, both directions, each link once; none where there is no network."""
        return self.healthy.nics(gpus)

    def changed(self, left: FloatArray) -> Fabric:
        """The same machine with the left part of what is left by now."""
        return DisturbedClos(self.healthy, self.left * left)

    def tier(self, gpus: Sequence[int] | IntArray) -> str:
        """The highest tier that traffic among these GPUs crosses where all links are alive."""
        return self.healthy.tier(gpus)

    def tiers(self) -> tuple[Tier, ...]:
        """What the fabric is built of, without disturbances."""
        return self.healthy.tiers()

    def graph(self) -> "nx.DiGraph[str]":
        """The fabric as a graph, without its dead links."""
        graph = self.healthy.graph()
        for number in np.flatnonzero(self.left != 1.0).tolist():
            link = self.link(number)
            if self._dead[number]:
                graph.remove_edge(link.source, link.target)
            else:
                graph.edges[link.source, link.target]["bandwidth"] = link.bandwidth
        return graph


def _put(paths: Paths, rows: IntArray, others: Paths) -> Paths:
    """Replace the routes of some rows."""
    width = max(paths.links.shape[1], others.links.shape[1])
    links = np.full((len(paths.links), width), -1, np.int64)
    links[:, : paths.links.shape[1]] = paths.links
    links[rows] = -1
    links[rows[:, None], np.arange(others.links.shape[1])] = others.links
    latency = paths.latency.copy()
    latency[rows] = others.latency
    return Paths(links, latency)
