"""A regular cluster with slow and dead links.

Link ids stay those of the healthy cluster. Routing ignores link speeds, so slow links change only bandwidths.
Transfers hashed to dead links are rehashed, as switches do among the remaining equal-cost paths; those left
without any are rerouted (`rerouting`). A GPU whose NVLink is dead is an NVLink domain of its own.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np

from clustersim.common.arrays import BoolArray, FloatArray, IntArray
from clustersim.common.cached_method import cached_method
from clustersim.common.pickling import FieldPickling
from clustersim.hardware.clos import ClosTopology
from clustersim.hardware.direct_links import DirectLinks
from clustersim.hardware.rerouting import RerouteSearch, SearchGraph, SearchLabels
from clustersim.hardware.routing_rules import UNRESTRICTED, RoutingRule, first_rule, next_rule
from clustersim.hardware.topology import (
    LINK_KINDS,
    VERTEX_KINDS,
    Fabric,
    FabricTier,
    LinkEndpoints,
    LinkInfo,
    LinkKind,
    LinkTable,
    Paths,
)
from clustersim.hardware.vertex_tier import VertexTier

if TYPE_CHECKING:
    import networkx as nx

_SWITCH_LINK_KINDS = [LINK_KINDS.index(LinkKind.LEAF), LINK_KINDS.index(LinkKind.SPINE)]


@dataclass(frozen=True, eq=False)
class DegradedClos(FieldPickling):
    """A regular cluster and the remaining fraction of each link's bandwidth, [links]; 0 is a dead link.

    Not slotted: cached properties. In `links` a dead link keeps its bandwidth; nothing is routed over it.
    """

    healthy: ClosTopology
    bandwidth_fraction: FloatArray

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, DegradedClos):
            return NotImplemented
        return self.healthy == other.healthy and np.array_equal(self.bandwidth_fraction, other.bandwidth_fraction)

    def __hash__(self) -> int:
        return hash((self.healthy, self.bandwidth_fraction.tobytes()))

    @property
    def gpu_count(self) -> int:
        """Number of GPUs that the fabric connects."""
        return self.healthy.gpu_count

    @cached_property
    def links(self) -> LinkTable:
        """Properties of every link."""
        table = self.healthy.links
        return replace(table, bandwidth=table.bandwidth * np.where(self._is_dead, 1.0, self.bandwidth_fraction))

    @property
    def direct_links(self) -> DirectLinks | None:
        """Direct links of the healthy cluster: around a dead one, its neighbours relay its traffic."""
        return self.healthy.direct_links

    def domain_slots(self, gpus: IntArray) -> IntArray:
        """Position of GPUs, domain by domain (any shape): equal to the GPU ids."""
        return gpus

    def gpus_at_slots(self, slots: IntArray) -> IntArray:
        """GPUs at these positions (any shape)."""
        return slots

    @property
    def link_endpoints(self) -> LinkEndpoints:
        """Endpoint vertices of every link."""
        return self.healthy.link_endpoints

    @cached_property
    def _is_dead(self) -> BoolArray:
        is_dead: BoolArray = self.bandwidth_fraction == 0.0
        return is_dead

    @cached_property
    def _is_dead_padded(self) -> BoolArray:
        """[links + 1] whether a link is dead; false for id -1 (no link)."""
        return np.append(self._is_dead, False)

    @cached_property
    def _has_dead_links(self) -> bool:
        return bool(self._is_dead.any())

    @cached_property
    def _domain_ids(self) -> IntArray:
        """[gpus] NVLink domain of every GPU, numbered in the order of their first GPUs."""
        gpus, duplex = np.arange(self.gpu_count), self.healthy.wiring.nvlink
        domains = self.healthy.domain_ids(gpus)
        if not duplex.up.count:
            return domains
        is_disconnected = self._is_dead[duplex.up.first_id + gpus] | self._is_dead[duplex.down.first_id + gpus]
        keys = domains * (self.gpu_count + 1) + np.where(is_disconnected, gpus + 1, 0)
        _, first, label = np.unique(keys, return_index=True, return_inverse=True)
        return np.argsort(np.argsort(first))[label.reshape(-1)]

    def domain_ids(self, gpus: IntArray) -> IntArray:
        """The NVLink domain of each GPU (any shape)."""
        return self._domain_ids[gpus] if self._has_dead_links else self.healthy.domain_ids(gpus)

    def node_ids(self, gpus: IntArray) -> IntArray:
        """The node of each GPU (any shape)."""
        return self.healthy.node_ids(gpus)

    def find_paths(self, sources: IntArray, targets: IntArray) -> Paths:
        """Routes of transfers from sources[i] to targets[i], both [n]."""
        sources, targets = np.asarray(sources, np.int64), np.asarray(targets, np.int64)
        paths = self.healthy.find_paths(sources, targets)
        if not self._has_dead_links:
            return paths
        broken = np.flatnonzero(self._is_broken(paths, sources, targets))
        for fabric in self._rehashed_fabrics:
            if not len(broken):
                break
            rehashed = fabric.find_paths(sources[broken], targets[broken])
            is_repaired = ~self._is_broken(rehashed, sources[broken], targets[broken])
            paths = _replace_paths(
                paths, broken[is_repaired], Paths(rehashed.links[is_repaired], rehashed.latency[is_repaired])
            )
            broken = broken[~is_repaired]
        return _replace_paths(paths, broken, self._reroute(sources[broken], targets[broken])) if len(broken) else paths

    def border_paths(self, gpus: IntArray, *, outwards: bool) -> Paths:
        """Routes from GPUs to the highest switches, or from these to the GPUs.

        Where one has a dead link, the GPU's traffic passes the nearest GPU by number whose route has none.
        """
        gpus, everyone = np.asarray(gpus, np.int64), np.arange(self.gpu_count)
        paths = self.healthy.border_paths(gpus, outwards=outwards)
        border_links = self.healthy.border_paths(everyone, outwards=outwards).links
        is_dead: BoolArray = np.asarray(self._is_dead_padded[border_links].any(axis=1))
        cut_off = np.flatnonzero(is_dead[gpus])
        if not len(cut_off):
            return paths
        relays = _nearest(everyone[~is_dead], gpus[cut_off])
        inside = self.find_paths(gpus[cut_off], relays) if outwards else self.find_paths(relays, gpus[cut_off])
        beyond = self.healthy.border_paths(relays, outwards=outwards)
        segments = (inside, beyond) if outwards else (beyond, inside)
        relayed = Paths(
            np.concatenate([segment.links for segment in segments], axis=1), inside.latency + beyond.latency
        )
        return _replace_paths(paths, cut_off, relayed)

    def _is_broken(self, paths: Paths, sources: IntArray, targets: IntArray) -> BoolArray:
        """[n] which paths use a dead link, or an NVLink domain that no longer exists."""
        domain_split = (self.healthy.domain_ids(sources) == self.healthy.domain_ids(targets)) & (
            self.domain_ids(sources) != self.domain_ids(targets)
        )
        broken: BoolArray = domain_split | self._is_dead_padded[paths.links].any(axis=1)
        return broken

    @cached_property
    def _rehashed_fabrics(self) -> tuple[ClosTopology, ...]:
        """The healthy cluster with other ECMP hashes; none where no hashed link is dead."""
        network = self.healthy.network
        if network is None or not np.isin(self.links.kind[self._is_dead], _SWITCH_LINK_KINDS).any():
            return ()
        return tuple(replace(self.healthy, network=replace(network, ecmp=ecmp)) for ecmp in network.ecmp.rehashed())

    def _reroute(self, sources: IntArray, targets: IntArray) -> Paths:
        """Paths found by search, cached per pair; one search for all targets of a source under one rule."""
        pairs = list(zip(sources.tolist(), targets.tolist(), strict=True))
        pending: dict[tuple[int, RoutingRule], list[int]] = {}
        for source, target in dict.fromkeys(pairs):
            if (source, target) not in self._route_cache:
                pending.setdefault((source, self._first_rule(source, target)), []).append(target)
        for (source, rule), missing in pending.items():
            self._search_routes(source, rule, missing)
        return self._to_paths([self._route_cache[pair] for pair in pairs])

    def _search_routes(self, source: int, rule: RoutingRule, targets: list[int]) -> None:
        """Find routes under a rule.

        Unreached targets are searched under the next rule, finally with all nodes forwarding.
        """
        search = self._reroute_search(rule)
        unreached = self._trace_routes(source, search, search.search_nearby(source, np.array(targets)), targets)
        if unreached and rule == UNRESTRICTED:
            unreached = self._trace_routes(
                source, search, search.search_everywhere(source, np.array(unreached)), unreached
            )
        if unreached:
            self._search_routes(source, next_rule(rule), unreached)

    @cached_method
    def _reroute_search(self, rule: RoutingRule) -> RerouteSearch:
        return RerouteSearch(self._search_graph, rule)

    def _trace_routes(self, source: int, search: RerouteSearch, labels: SearchLabels, targets: list[int]) -> list[int]:
        """Cache the routes to the targets that were reached; return the others."""
        for target, choice in zip(targets, self._ecmp_choices(source, np.array(targets)), strict=True):
            if labels.is_reached(target):
                self._route_cache[source, target] = search.trace_route(labels, target, choice)
        return [target for target in targets if not labels.is_reached(target)]

    def _ecmp_choices(self, source: int, targets: IntArray) -> list[int]:
        """Which of several equal routes each transfer takes."""
        network = self.healthy.network
        if network is None:
            return [0] * len(targets)
        return network.ecmp.choose_paths(np.full(len(targets), source), targets).tolist()  # type: ignore[no-any-return]

    @cached_property
    def _route_cache(self) -> dict[tuple[int, int], tuple[int, ...]]:
        return {}

    @cached_property
    def _search_graph(self) -> SearchGraph:
        tiers = self.healthy.wiring.tiers
        kinds = np.repeat([VERTEX_KINDS.index(tier.kind) for tier in tiers], [tier.count for tier in tiers])
        block_ids = np.concatenate([self._block_ids(tier) for tier in tiers])
        return SearchGraph(self.links, self.link_endpoints, ~self._is_dead, kinds, block_ids)

    def _block_ids(self, tier: VertexTier) -> IntArray:
        """Node, or NVLink domain of several nodes, of each vertex of a tier; -1 for switches between them."""
        node, index = self.healthy.node, np.arange(tier.count)
        first_gpu = {
            "gpu": index,
            "nvswitch": index * node.domain_gpus,
            "host": index // (tier.per_group or 1) * node.gpu_count,
            "nic": index // (tier.per_group or 1) * node.gpu_count,
        }
        return first_gpu.get(tier.kind, index - index - 1) // max(node.domain_gpus, node.gpu_count)

    def _first_rule(self, source: int, target: int) -> RoutingRule:
        pair = np.array([source, target])
        domains, nodes = self.domain_ids(pair), self.node_ids(pair)
        return first_rule(same_domain=bool(domains[0] == domains[1]), same_node=bool(nodes[0] == nodes[1]))

    def _to_paths(self, routes: list[tuple[int, ...]]) -> Paths:
        links = np.full((len(routes), max(map(len, routes))), -1, np.int64)
        for path, route in zip(links, routes, strict=True):
            path[: len(route)] = route
        return Paths(links, np.append(self.links.latency, 0.0)[links].sum(axis=1))

    def link_info(self, link_id: int) -> LinkInfo:
        """One link, for display."""
        return replace(self.healthy.link_info(link_id), bandwidth=float(self.links.bandwidth[link_id]))

    def find_link(self, source: str, target: str) -> int:
        """Id of the link between two named endpoints; raise InputError with a suggestion."""
        return self.healthy.find_link(source, target)

    def parallel_link_count(self, link_id: int) -> int:
        """Number of physical links that one link stands for in the healthy cluster."""
        return self.healthy.parallel_link_count(link_id)

    def nic_links(self, gpus: IntArray) -> IntArray:
        """Links of the NICs that serve GPUs, both directions, each link once; none without a network."""
        return self.healthy.nic_links(gpus)

    def with_degraded_links(self, bandwidth_fraction: FloatArray) -> Fabric:
        """The same machine with the remaining bandwidths scaled further by bandwidth_fraction, [links]."""
        return DegradedClos(self.healthy, self.bandwidth_fraction * bandwidth_fraction)

    def highest_tier(self, gpus: Sequence[int] | IntArray) -> str:
        """The highest tier that traffic among these GPUs crosses in the healthy cluster."""
        return self.healthy.highest_tier(gpus)

    def describe_tiers(self) -> tuple[FabricTier, ...]:
        """The tiers of the healthy fabric, from the GPUs up."""
        return self.healthy.describe_tiers()

    def to_graph(self) -> "nx.DiGraph[str]":
        """The fabric as a graph, without its dead links."""
        graph = self.healthy.to_graph()
        for link_id in np.flatnonzero(self.bandwidth_fraction != 1.0).tolist():
            link = self.link_info(link_id)
            if self._is_dead[link_id]:
                graph.remove_edge(link.source, link.target)
            else:
                graph.edges[link.source, link.target]["bandwidth"] = link.bandwidth
        return graph


def _nearest(candidates: IntArray, ids: IntArray) -> IntArray:
    """The candidate (ascending, at least one) nearest to each id, the lower of two."""
    above = np.searchsorted(candidates, ids).clip(max=len(candidates) - 1)
    below = (above - 1).clip(min=0)
    is_below_nearer = ids - candidates[below] <= np.abs(candidates[above] - ids)
    return candidates[np.where(is_below_nearer, below, above)]


def _replace_paths(paths: Paths, indices: IntArray, replacements: Paths) -> Paths:
    """Replace the paths at some indices."""
    width = max(paths.links.shape[1], replacements.links.shape[1])
    links = np.full((len(paths.links), width), -1, np.int64)
    links[:, : paths.links.shape[1]] = paths.links
    links[indices] = -1
    links[indices[:, None], np.arange(replacements.links.shape[1])] = replacements.links
    latency = paths.latency.copy()
    latency[indices] = replacements.latency
    return Paths(links, latency)
