"""What does a regular cluster look like to a transfer?

A folded Clos network (fat tree) of any oversubscription over nodes with NVLink or PCIe inside; one node alone is the
case without a network. Routes follow from the GPU numbers by arithmetic, for all transfers at once:

    same NVLink domain             NVLINK out, NVLINK in; without a switch the NVLINK of the pair, or two (`direct_links`)
    same node, no common domain    PCIE, [HOST, HOST between root complexes], PCIE
    else                           PCIE, NIC, [LEAF up, [SPINE up, SPINE down], LEAF down], NIC, PCIE

A transfer leaves by its source's own NIC and enters by its target's own NIC. In a rail-optimised fabric, GPUs with
equal place in two nodes of one unit meet at their rail's leaf; transfers between different rails climb to the spine.
(NCCL can avoid the climb with PXN: the data first cross NVLink to the GPU on the target's rail. A collective algorithm
that wants that sends in two steps; the fabric does not decide it.) A root complex and its NIC are joined by a PCIE link
where GPU traffic passes the host; elsewhere a GPU and its NIC share a PCIe switch that is never the bottleneck.
Reference: Leiserson 1985, Fat-Trees, IEEE Trans. Comput. C-34(10); Al-Fares et al. 2008, SIGCOMM, sec. 3.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from clustersim.common.arrays import BoolArray, IntArray
from clustersim.common.pickling import FieldState
from clustersim.hardware import clos_graph, clos_link_lookup, clos_tiers
from clustersim.hardware.clos_spec import Network, Node
from clustersim.hardware.clos_wiring import Counts, LinkRun, Wiring, count, wire
from clustersim.hardware.direct_links import PairLinks
from clustersim.hardware.link_technology import TECHNOLOGIES
from clustersim.hardware.rotation import Turn, turn_of
from clustersim.hardware.topology import LINK_KINDS, Ends, Link, LinkTable, Paths, Tier

if TYPE_CHECKING:
    import networkx as nx


@dataclass(frozen=True)
class Clos(FieldState):
    """`gpus` GPUs in nodes of one kind under one network; without a network they must lie within one node's reach.

    Not slotted: links and their numbers are worked out once, when first asked for.
    """

    node: Node
    network: Network | None
    gpus: int

    @property
    def most(self) -> int:
        """How many GPUs such a cluster can have."""
        return self.node.reach if self.network is None else self.network.nodes * self.node.gpus

    @cached_property
    def counts(self) -> Counts:
        """How many nodes, units, leaves, pods, spines and cores there are."""
        return count(self.gpus, self.node, self.network)

    @cached_property
    def wiring(self) -> Wiring:
        """The runs of links."""
        return wire(self.counts, self.node, self.network)

    @property
    def pairs(self) -> PairLinks | None:
        """The links of pairs of GPUs in an NVLink domain; None where a switch joins them, or there is no NVLink."""
        return self.node.nvlink.pairs if self.node.nvlink else None

    def seats(self, gpus: IntArray) -> IntArray:
        """Where GPUs stand (any shape): the machine's own numbers."""
        return gpus

    def seated(self, seats: IntArray) -> IntArray:
        """Which GPUs stand there (any shape)."""
        return seats

    @cached_property
    def _over(self) -> IntArray:
        """The place of a domain by which data gets from one to another, [places, places], of those that are there."""
        return self.pairs.first(min(self.gpus, self.pairs.places)).over if self.pairs else np.zeros((0, 0), np.int64)

    @cached_property
    def links(self) -> LinkTable:
        """Properties of every link."""
        runs = self.wiring.runs()
        counts = [run.count for run in runs]
        return LinkTable(
            kind=np.repeat(np.array([LINK_KINDS.index(run.kind) for run in runs], np.int64), counts),
            bandwidth=np.repeat(np.array([run.port.bandwidth for run in runs]), counts),
            latency=np.repeat(np.array([run.port.latency for run in runs]), counts),
            technology=np.repeat(
                np.array([TECHNOLOGIES.index(self.node.technology(run.kind)) for run in runs], np.int64), counts
            ),
        )

    @cached_property
    def _nics(self) -> IntArray:
        """The NIC of every GPU: [gpus]."""
        return self.node.nic(np.arange(self.gpus))

    @cached_property
    def _leaves(self) -> IntArray:
        """The leaf switch of every GPU's NIC: [gpus]."""
        return self.leaves(self._nics)

    @cached_property
    def _pods(self) -> IntArray:
        """The pod of every GPU: [gpus]."""
        return self.pods(self._leaves)

    @cached_property
    def turn(self) -> Turn | None:
        """How GPUs can change places in their nodes, where that changes nothing else."""
        return turn_of(self.counts, self.node, self.network, self.wiring)

    def domains(self, gpus: IntArray) -> IntArray:
        """The NVLink domain of each GPU (any shape)."""
        return gpus // self.node.domain_gpus

    def nodes(self, gpus: IntArray) -> IntArray:
        """The node of each GPU (any shape)."""
        return gpus // self.node.gpus

    def leaves(self, nics: IntArray) -> IntArray:
        """The leaf switch of each NIC (any shape), both numbered through the cluster."""
        if self.network is None:
            return np.zeros_like(nics)
        return self.network.leaf.switch(nics, self.node.nics_per_node)

    def pods(self, leaves: IntArray) -> IntArray:
        """The pod of each leaf switch (any shape)."""
        if self.network is None:
            return np.zeros_like(leaves)
        return leaves // (self.network.leaf.switches * self.network.units_per_pod)

    def paths(self, sources: IntArray, targets: IntArray) -> Paths:
        """Routes of transfers from sources[i] to targets[i], both [n]."""
        sources, targets = np.asarray(sources, np.int64), np.asarray(targets, np.int64)
        hops = [hop for hop in self._hops(sources, targets) if hop.used.any()]
        links, latency = np.empty((len(hops), len(sources)), np.int64), np.zeros(len(sources))
        for column, hop in zip(links, hops, strict=True):
            column[:] = np.where(hop.used, hop.run.first + hop.index_in_range, -1)
            latency += hop.used * hop.run.port.latency
        return Paths(links.T, latency)

    def _hops(self, sources: IntArray, targets: IntArray) -> Iterator["_Hop"]:
        """The hops of all routes, in the order of travel."""
        wiring, node = self.wiring, self.node
        distant = sources // node.reach != targets // node.reach
        local = ~distant & (sources != targets)
        by_nvlink = local & (self.domains(sources) == self.domains(targets)) & (node.nvlink is not None)
        by_pcie = distant | (local & ~by_nvlink)
        if self.pairs:
            yield from self._across_pairs(self.pairs, sources, targets, by_nvlink)
        yield _Hop(wiring.nvlink.up, sources, by_nvlink & node.switched)
        yield _Hop(wiring.pcie.up, sources, by_pcie)
        if node.host:
            yield from self._across_host(node.bridge(sources), node.bridge(targets), local & by_pcie)
        if distant.any():
            yield from self._across_network(sources, targets, distant)
        yield _Hop(wiring.pcie.down, targets, by_pcie)
        yield _Hop(wiring.nvlink.down, targets, by_nvlink & node.switched)

    def _across_pairs(
        self, pairs: PairLinks, sources: IntArray, targets: IntArray, used: BoolArray
    ) -> Iterator["_Hop"]:
        """Hops over links from GPU to GPU, by way of a third one where a pair has none."""
        domain, here = np.divmod(sources, pairs.places)
        there = np.where(used, targets % pairs.places, here)
        over = self._over[here, there]
        for start, end in ((here, over), (over, there)):
            for width, way in zip(pairs.widths, self.wiring.pairs, strict=True):
                linked = pairs.count[start, end] == width
                place = domain * len(pairs.pairs(width)) + pairs.number[start, end]
                yield _Hop(way.up, place, linked & (start < end))
                yield _Hop(way.down, place, linked & (start > end))

    def _across_host(self, sources: IntArray, targets: IntArray, used: BoolArray) -> Iterator["_Hop"]:
        """Hops between root complexes of one node."""
        crosses = used & (sources != targets)
        yield _Hop(self.wiring.host.up, sources, crosses)
        yield _Hop(self.wiring.host.down, targets, crosses)

    def _across_network(self, sources: IntArray, targets: IntArray, used: BoolArray) -> Iterator["_Hop"]:
        """Hops from the source's PCIe link to the target's, through their NICs."""
        wiring, node = self.wiring, self.node
        sending, receiving = self._nics[sources], self._nics[targets]
        if node.host:
            yield from self._across_host(node.bridge(sources), node.nic_bridge(sending), used)
            yield _Hop(wiring.riser.up, sending, used)
        yield _Hop(wiring.nic.up, sending, used)
        if self.counts.spines:
            yield from self._across_switches(sources, targets, used)
        yield _Hop(wiring.nic.down, receiving, used)
        if node.host:
            yield _Hop(wiring.riser.down, receiving, used)
            yield from self._across_host(node.nic_bridge(receiving), node.bridge(targets), used)

    def _across_switches(self, sources: IntArray, targets: IntArray, used: BoolArray) -> Iterator["_Hop"]:
        """Hops between the leaves of GPUs."""
        spines, cores = self.counts.spines, max(1, self.counts.cores)
        spine, core = self._way(sources, targets)
        low, high = self._leaves[sources], self._leaves[targets]
        climbs = used & (low != high)
        yield _Hop(self.wiring.leaf.up, low * spines + spine, climbs)
        if self.counts.cores:
            here, there = self._pods[sources], self._pods[targets]
            crosses = used & (here != there)
            yield _Hop(self.wiring.spine.up, (here * spines + spine) * cores + core, crosses)
            yield _Hop(self.wiring.spine.down, (there * spines + spine) * cores + core, crosses)
        yield _Hop(self.wiring.leaf.down, high * spines + spine, climbs)

    def _way(self, sources: IntArray, targets: IntArray) -> tuple[IntArray, IntArray]:
        """The spine of each transfer and, above it, the core of the plane that both pods share."""
        spines, cores = self.counts.spines, max(1, self.counts.cores)
        if self.network is None or spines * cores == 1:
            return np.zeros(1, np.int64), np.zeros(1, np.int64)  # for all transfers
        choice = self.network.ecmp.choose(sources, targets)
        spine = (choice % np.uint64(spines)).astype(np.int64)
        return spine, (choice // np.uint64(spines) % np.uint64(cores)).astype(np.int64)

    def link(self, number: int) -> Link:
        """One link, for people."""
        for run in self.wiring.runs():
            if run.first <= number < run.first + run.count:
                source, target = run.ends(number - run.first)
                return Link(run.kind, source, target, run.port.bandwidth, run.port.latency)
        raise IndexError(f"link {number} is not among the {len(self.links.kind)} links of this fabric")

    @cached_property
    def ends(self) -> Ends:
        """What stands at the ends of every link."""
        runs, layers = self.wiring.runs(), self.wiring.layers
        return Ends(
            source=np.concatenate([run.source.vertices(run.count) for run in runs]),
            target=np.concatenate([run.target.vertices(run.count) for run in runs]),
            vertices=sum(layer.count for layer in layers),
        )

    def find(self, source: str, target: str) -> int:
        """The number of the link between two ends; raise InputError that says what is near."""
        return clos_link_lookup.find(self.wiring, source, target)

    def members(self, number: int) -> int:
        """How many parallel links one link stands for."""
        return next(run.members for run in self.wiring.runs() if number < run.first + run.count)

    def nics(self, gpus: IntArray) -> IntArray:
        """Links of the NICs that serve GPUs, both directions, each link once; none where there is no network."""
        way = self.wiring.nic
        if not way.up.count:
            return np.empty(0, np.int64)
        nics = np.unique(self.node.nic(np.asarray(gpus, np.int64)))
        return np.concatenate([way.up.first + nics, way.down.first + nics])

    def tier(self, gpus: Sequence[int] | IntArray) -> str:
        """The highest tier that traffic among these GPUs crosses: gpu, nvlink, host, leaf, spine or core.

        If the GPUs lie out of each other's reach and have several leaves, then some two of them differ in both: were
        all pairs out of reach on one leaf, each GPU would share that leaf with everyone.
        """
        numbers = np.asarray(gpus, np.int64)
        if _alike(numbers):
            return "gpu"
        if _alike(numbers // self.node.reach):
            return "nvlink" if self.node.nvlink and _alike(self.domains(numbers)) else "host"
        leaves = self.leaves(self.node.nic(numbers))
        if _alike(leaves):
            return "leaf"
        return "spine" if _alike(self.pods(leaves)) else "core"

    def tiers(self) -> tuple[Tier, ...]:
        """What the fabric is built of, from the GPUs up."""
        return clos_tiers.tiers(self.counts, self.node, self.network)

    def graph(self) -> "nx.DiGraph[str]":
        """The fabric as a graph; a bundle of spread links ends at one switch that stands for its whole layer."""
        whole = clos_graph.graph(self.gpus, self.wiring, self.node)
        if self.network is not None:
            whole.graph.update(self.network.ecmp.keys)
        return whole


class _Hop(NamedTuple):
    """The place-th link of a run, on those routes that use it."""

    run: LinkRun
    index_in_range: IntArray
    used: BoolArray


def _alike(values: IntArray) -> bool:
    return bool((values == values[0]).all())
