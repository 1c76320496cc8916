"""Routes and links of a regular cluster.

A folded Clos network (fat tree) of any oversubscription over nodes with NVLink or PCIe inside; a single node
is the case without a network. Routes follow from the GPU ids by arithmetic, vectorized over all transfers:

    same NVLink domain             NVLINK out, NVLINK in; without a switch one or two `direct_links`
    same node, no common domain    PCIE, [HOST, HOST between root complexes], PCIE
    else                           PCIE, NIC, [LEAF up, [SPINE up, SPINE down], LEAF down], NIC, PCIE

A transfer leaves by its source's NIC and enters by its target's NIC. In a rail-optimised fabric, GPUs with
equal local rank in two nodes of one unit share their rail's leaf; transfers between different rails cross a
spine. (NCCL can avoid the spine with PXN: the data first cross NVLink to the GPU on the target's rail. A
collective algorithm that does so sends in two steps; the fabric does not decide it.) A root complex and its
NIC are joined by a PCIE link where GPU traffic passes the host; elsewhere a GPU and its NIC share a PCIe
switch that is never the bottleneck.
Reference: Leiserson 1985, Fat-Trees, IEEE Trans. Comput. C-34(10); Al-Fares et al. 2008, SIGCOMM, sec. 3.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from clustersim.common.arrays import BoolArray, IntArray
from clustersim.common.pickling import FieldPickling
from clustersim.hardware import clos_graph, clos_link_lookup, clos_tiers
from clustersim.hardware.clos_spec import NetworkSpec, NodeSpec
from clustersim.hardware.clos_wiring import ClosCounts, ClosWiring, LinkRange, build_wiring, count_components
from clustersim.hardware.direct_links import DirectLinks
from clustersim.hardware.link_technology import TECHNOLOGIES
from clustersim.hardware.rotation import FabricRotation, find_rotation
from clustersim.hardware.topology import LINK_KINDS, FabricTier, LinkEndpoints, LinkInfo, LinkTable, Paths

if TYPE_CHECKING:
    import networkx as nx


@dataclass(frozen=True)
class ClosTopology(FieldPickling):
    """`gpu_count` GPUs in nodes of one kind under one network; without a network they must form one scale-up domain.

    Not slotted: links are computed once, on first access.
    """

    node: NodeSpec
    network: NetworkSpec | None
    gpu_count: int

    @property
    def max_gpus(self) -> int:
        """The largest number of GPUs that such a cluster can have."""
        return self.node.scale_up_gpus if self.network is None else self.network.max_nodes * self.node.gpu_count

    @cached_property
    def counts(self) -> ClosCounts:
        """Number of nodes, units, leaves, pods, spines and cores."""
        return count_components(self.gpu_count, self.node, self.network)

    @cached_property
    def wiring(self) -> ClosWiring:
        """All link ranges."""
        return build_wiring(self.counts, self.node, self.network)

    @property
    def direct_links(self) -> DirectLinks | None:
        """Direct links between GPUs of an NVLink domain; None where a switch joins them, or without NVLink."""
        return self.node.nvlink.direct_links if self.node.nvlink else None

    def domain_slots(self, gpus: IntArray) -> IntArray:
        """Position of GPUs, domain by domain (any shape): equal to the GPU ids."""
        return gpus

    def gpus_at_slots(self, slots: IntArray) -> IntArray:
        """GPUs at these positions (any shape)."""
        return slots

    @cached_property
    def _relay(self) -> IntArray:
        """[domain GPUs, domain GPUs] index of the GPU that relays from one to another, of GPUs that exist."""
        return (
            self.direct_links.restrict_to_first(min(self.gpu_count, self.direct_links.domain_size)).relay
            if self.direct_links
            else np.zeros((0, 0), np.int64)
        )

    @cached_property
    def links(self) -> LinkTable:
        """Properties of every link."""
        link_ranges = self.wiring.link_ranges()
        counts = [link_range.count for link_range in link_ranges]
        return LinkTable(
            kind=np.repeat(
                np.array([LINK_KINDS.index(link_range.kind) for link_range in link_ranges], np.int8), counts
            ),
            bandwidth=np.repeat(np.array([link_range.port.bandwidth for link_range in link_ranges]), counts),
            latency=np.repeat(np.array([link_range.port.latency for link_range in link_ranges]), counts),
            technology=np.repeat(
                np.array(
                    [TECHNOLOGIES.index(self.node.link_technology(link_range.kind)) for link_range in link_ranges],
                    np.int8,
                ),
                counts,
            ),
        )

    @cached_property
    def _gpu_nics(self) -> IntArray:
        """[gpus] NIC of every GPU."""
        return self.node.nic_ids(np.arange(self.gpu_count))

    @cached_property
    def _gpu_leaves(self) -> IntArray:
        """[gpus] leaf switch of every GPU's NIC."""
        return self.leaf_ids(self._gpu_nics)

    @cached_property
    def _gpu_pods(self) -> IntArray:
        """[gpus] pod of every GPU."""
        return self.pod_ids(self._gpu_leaves)

    @cached_property
    def rotation(self) -> FabricRotation | None:
        """Rotation of local ranks within all nodes, if it is an automorphism of the fabric."""
        return find_rotation(self.counts, self.node, self.network, self.wiring)

    def domain_ids(self, gpus: IntArray) -> IntArray:
        """The NVLink domain of each GPU (any shape)."""
        return gpus // self.node.domain_gpus

    def node_ids(self, gpus: IntArray) -> IntArray:
        """The node of each GPU (any shape)."""
        return gpus // self.node.gpu_count

    def leaf_ids(self, nics: IntArray) -> IntArray:
        """The leaf switch of each NIC (any shape), both numbered across the cluster."""
        if self.network is None:
            return np.zeros_like(nics)
        return self.network.leaf.leaf_ids(nics, self.node.nics_per_node)

    def pod_ids(self, leaves: IntArray) -> IntArray:
        """The pod of each leaf switch (any shape)."""
        if self.network is None:
            return np.zeros_like(leaves)
        return leaves // (self.network.leaf.switches_per_unit * self.network.units_per_pod)

    def find_paths(self, sources: IntArray, targets: IntArray) -> Paths:
        """Paths of transfers from sources[i] to targets[i], both [n]."""
        sources, targets = np.asarray(sources, np.int64), np.asarray(targets, np.int64)
        return _join_hops(self._all_hops(sources, targets), len(sources))

    def border_paths(self, gpus: IntArray, *, outwards: bool) -> Paths:
        """Routes from GPUs to the highest switches, or from these to the GPUs; there must be a network."""
        hops = list(self._border_hops(np.asarray(gpus, np.int64), outwards=outwards))
        return _join_hops(hops if outwards else reversed(hops), len(gpus))

    def _all_hops(self, sources: IntArray, targets: IntArray) -> Iterator["_RouteHop"]:
        """The hops of all routes, in order of travel."""
        wiring, node = self.wiring, self.node
        distant = sources // node.scale_up_gpus != targets // node.scale_up_gpus
        local = ~distant & (sources != targets)
        by_nvlink = local & (self.domain_ids(sources) == self.domain_ids(targets)) & (node.nvlink is not None)
        by_pcie = distant | (local & ~by_nvlink)
        if self.direct_links:
            yield from self._direct_link_hops(self.direct_links, sources, targets, by_nvlink)
        yield _RouteHop(wiring.nvlink.up, sources, by_nvlink & node.has_nvswitch)
        yield _RouteHop(wiring.pcie.up, sources, by_pcie)
        if node.host:
            yield from self._host_hops(node.bridge_ids(sources), node.bridge_ids(targets), local & by_pcie)
        if distant.any():
            yield from self._network_hops(sources, targets, distant)
        yield _RouteHop(wiring.pcie.down, targets, by_pcie)
        yield _RouteHop(wiring.nvlink.down, targets, by_nvlink & node.has_nvswitch)

    def _direct_link_hops(
        self, direct_links: DirectLinks, sources: IntArray, targets: IntArray, is_used: BoolArray
    ) -> Iterator["_RouteHop"]:
        """Hops over direct GPU-to-GPU links, relayed by a third GPU where a pair has none."""
        domain, source_index = np.divmod(sources, direct_links.domain_size)
        target_index = np.where(is_used, targets % direct_links.domain_size, source_index)
        relay = self._relay[source_index, target_index]
        for start, end in ((source_index, relay), (relay, target_index)):
            for link_count, duplex in zip(direct_links.distinct_link_counts, self.wiring.direct_links, strict=True):
                linked = direct_links.link_matrix[start, end] == link_count
                index = domain * len(direct_links.pairs_with(link_count)) + direct_links.pair_index[start, end]
                yield _RouteHop(duplex.up, index, linked & (start < end))
                yield _RouteHop(duplex.down, index, linked & (start > end))

    def _host_hops(self, sources: IntArray, targets: IntArray, is_used: BoolArray) -> Iterator["_RouteHop"]:
        """Hops between root complexes of one node."""
        crosses = is_used & (sources != targets)
        yield _RouteHop(self.wiring.host.up, sources, crosses)
        yield _RouteHop(self.wiring.host.down, targets, crosses)

    def _network_hops(self, sources: IntArray, targets: IntArray, is_used: BoolArray) -> Iterator["_RouteHop"]:
        """Hops from the source's PCIe link to the target's, through their NICs."""
        wiring, node = self.wiring, self.node
        sending, receiving = self._gpu_nics[sources], self._gpu_nics[targets]
        if node.host:
            yield from self._host_hops(node.bridge_ids(sources), node.nic_bridge_ids(sending), is_used)
            yield _RouteHop(wiring.riser.up, sending, is_used)
        yield _RouteHop(wiring.nic.up, sending, is_used)
        if self.counts.spines:
            yield from self._switch_hops(sources, targets, is_used)
        yield _RouteHop(wiring.nic.down, receiving, is_used)
        if node.host:
            yield _RouteHop(wiring.riser.down, receiving, is_used)
            yield from self._host_hops(node.nic_bridge_ids(receiving), node.bridge_ids(targets), is_used)

    def _switch_hops(self, sources: IntArray, targets: IntArray, is_used: BoolArray) -> Iterator["_RouteHop"]:
        """Hops between the leaves of GPUs."""
        spines, cores = self.counts.spines, max(1, self.counts.cores)
        spine, core = self._choose_spine_and_core(sources, targets)
        source_leaf, target_leaf = self._gpu_leaves[sources], self._gpu_leaves[targets]
        climbs = is_used & (source_leaf != target_leaf)
        yield _RouteHop(self.wiring.leaf.up, source_leaf * spines + spine, climbs)
        if self.counts.cores:
            source_pod, target_pod = self._gpu_pods[sources], self._gpu_pods[targets]
            crosses = is_used & (source_pod != target_pod)
            yield _RouteHop(self.wiring.spine.up, (source_pod * spines + spine) * cores + core, crosses)
            yield _RouteHop(self.wiring.spine.down, (target_pod * spines + spine) * cores + core, crosses)
        yield _RouteHop(self.wiring.leaf.down, target_leaf * spines + spine, climbs)

    def _border_hops(self, gpus: IntArray, *, outwards: bool) -> Iterator["_RouteHop"]:
        """Hops between GPUs and the highest switches, from the GPUs up; inwards they are travelled in reverse."""
        wiring, node, is_used = self.wiring, self.node, np.ones(len(gpus), np.bool_)
        nics, leaves = self._gpu_nics[gpus], self._gpu_leaves[gpus]
        yield _RouteHop(wiring.pcie.side(outwards=outwards), gpus, is_used)
        if node.host:
            bridges, nic_bridges = node.bridge_ids(gpus), node.nic_bridge_ids(nics)
            crosses = bridges != nic_bridges
            yield _RouteHop(wiring.host.side(outwards=outwards), bridges, crosses)
            yield _RouteHop(wiring.host.side(outwards=not outwards), nic_bridges, crosses)
            yield _RouteHop(wiring.riser.side(outwards=outwards), nics, is_used)
        yield _RouteHop(wiring.nic.side(outwards=outwards), nics, is_used)
        spines, cores = self.counts.spines, max(1, self.counts.cores)
        if not spines:
            return
        spine, core = self._choose_spine_and_core(gpus, gpus)
        yield _RouteHop(wiring.leaf.side(outwards=outwards), leaves * spines + spine, is_used)
        if self.counts.cores:
            spine_ids = self._gpu_pods[gpus] * spines + spine
            yield _RouteHop(wiring.spine.side(outwards=outwards), spine_ids * cores + core, is_used)

    def _choose_spine_and_core(self, sources: IntArray, targets: IntArray) -> tuple[IntArray, IntArray]:
        """The spine of each transfer and, above it, the core of the plane that both pods share."""
        spines, cores = self.counts.spines, max(1, self.counts.cores)
        if self.network is None or spines * cores == 1:
            return np.zeros(1, np.int64), np.zeros(1, np.int64)  # for all transfers
        choice = self.network.ecmp.choose_paths(sources, targets)
        spine = (choice % np.uint64(spines)).astype(np.int64)
        return spine, (choice // np.uint64(spines) % np.uint64(cores)).astype(np.int64)

    def link_info(self, link_id: int) -> LinkInfo:
        """One link, for display."""
        for link_range in self.wiring.link_ranges():
            if link_range.first_id <= link_id < link_range.first_id + link_range.count:
                source, target = link_range.endpoint_names(link_id - link_range.first_id)
                return LinkInfo(link_range.kind, source, target, link_range.port.bandwidth, link_range.port.latency)
        raise IndexError(f"link {link_id} is not among the {len(self.links.kind)} links of this fabric")

    @cached_property
    def link_endpoints(self) -> LinkEndpoints:
        """Endpoint vertices of every link, in 32 bits: a million GPUs have six million links."""
        ranges = [(link_range.source, link_range.target, link_range.count) for link_range in self.wiring.link_ranges()]
        return LinkEndpoints(
            source=np.concatenate([source.vertex_ids(count).astype(np.int32) for source, _, count in ranges]),
            target=np.concatenate([target.vertex_ids(count).astype(np.int32) for _, target, count in ranges]),
            vertex_count=sum(tier.count for tier in self.wiring.tiers),
        )

    def find_link(self, source: str, target: str) -> int:
        """Id of the link between two named endpoints; raise InputError with a suggestion."""
        return clos_link_lookup.find_link(self.wiring, source, target)

    def parallel_link_count(self, link_id: int) -> int:
        """Number of physical links that one link stands for."""
        return next(
            link_range.parallel_links
            for link_range in self.wiring.link_ranges()
            if link_id < link_range.first_id + link_range.count
        )

    def nic_links(self, gpus: IntArray) -> IntArray:
        """Links of the NICs that serve GPUs, both directions, each link once; none without a network."""
        duplex = self.wiring.nic
        if not duplex.up.count:
            return np.empty(0, np.int64)
        nic_ids = np.unique(self.node.nic_ids(np.asarray(gpus, np.int64)))
        return np.concatenate([duplex.up.first_id + nic_ids, duplex.down.first_id + nic_ids])

    def highest_tier(self, gpus: Sequence[int] | IntArray) -> str:
        """The highest tier that traffic among these GPUs crosses: gpu, nvlink, host, leaf, spine or core.

        If the GPUs span several scale-up domains and several leaves, then some two of them differ in both: were all
        pairs of different domains on one leaf, each GPU would share that leaf with everyone.
        """
        gpu_ids = np.asarray(gpus, np.int64)
        if _all_equal(gpu_ids):
            return "gpu"
        if _all_equal(gpu_ids // self.node.scale_up_gpus):
            return "nvlink" if self.node.nvlink and _all_equal(self.domain_ids(gpu_ids)) else "host"
        leaves = self.leaf_ids(self.node.nic_ids(gpu_ids))
        if _all_equal(leaves):
            return "leaf"
        return "spine" if _all_equal(self.pod_ids(leaves)) else "core"

    def describe_tiers(self) -> tuple[FabricTier, ...]:
        """The tiers of the fabric, from the GPUs up."""
        return clos_tiers.describe_tiers(self.counts, self.node, self.network)

    def to_graph(self) -> "nx.DiGraph[str]":
        """The fabric as a graph; a bundle of spread links ends at one switch that stands for its whole tier."""
        graph = clos_graph.build_graph(self.gpu_count, self.wiring, self.node)
        if self.network is not None:
            graph.graph.update(self.network.ecmp.file_keys)
        return graph


class _RouteHop(NamedTuple):
    """The index-th link of a range, on those routes that use it."""

    link_range: LinkRange
    index_in_range: IntArray
    is_used: BoolArray


def _join_hops(hops: Iterable[_RouteHop], count: int) -> Paths:
    """The paths of `count` transfers from their hops in order of travel."""
    used_hops = [hop for hop in hops if hop.is_used.any()]
    links, latency = np.empty((len(used_hops), count), np.int64), np.zeros(count)
    for link_ids, hop in zip(links, used_hops, strict=True):
        link_ids[:] = np.where(hop.is_used, hop.link_range.first_id + hop.index_in_range, -1)
        latency += hop.is_used * hop.link_range.port.latency
    return Paths(links.T, latency)


def _all_equal(values: IntArray) -> bool:
    return bool((values == values[0]).all())
