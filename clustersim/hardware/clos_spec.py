"""How is a regular cluster wired, and where does GPU number g sit in it?

A cluster is nodes of equal GPUs; an NVLink domain covers a part of a node, a node, or several nodes; NICs lead to leaf
switches, units of leaves form pods under spine switches, and pods meet at core switches. Everything about one GPU
follows from its number by division, so nothing is stored per GPU.

    GPU -> NIC -> leaf of its rail in its unit -> spine of its pod -> core          rails: one leaf per NIC of a node
    GPU -> NIC -> top-of-rack switch of its unit -> spine of its pod -> core        racks: one leaf per unit

Switches are built for full units and pods: the last, partly filled one has the same uplinks as the others.
References: NVIDIA DGX SuperPOD reference architecture RA-11333-001 (rails, scalable units); Llama 3, arXiv:2407.21783,
sec. 3.3.1 (racks, pods, 1:7 above).
"""

from dataclasses import dataclass, replace

from clustersim.common.arrays import IntArray
from clustersim.common.units import BytesPerSecond, Seconds
from clustersim.hardware.direct_links import PairLinks
from clustersim.hardware.ecmp import Ecmp
from clustersim.hardware.link_technology import Technology
from clustersim.hardware.topology import NETWORK_KINDS, LinkKind


@dataclass(frozen=True, slots=True)
class Port:
    """One direction of a link: bytes/s, and seconds from one end to the other."""

    bandwidth: BytesPerSecond
    latency: Seconds


@dataclass(frozen=True, slots=True)
class NvLink:
    """An NVLink (or xGMI) domain of `gpus` GPUs, and what each of them can send in all.

    generation: of NVLink; pairs: the links of every pair of GPUs, whose bandwidths a GPU's port is the sum of, None: a
    switch joins them; port.latency is from GPU to GPU; whole: GPUs of a whole domain, where a job has a part of each.
    """

    gpus: int
    port: Port
    generation: Technology = Technology.NVLINK4
    pairs: PairLinks | None = None
    whole: int | None = None

    @property
    def link(self) -> Port:
        """One link of a pair; a GPU's whole port where a switch joins them."""
        return Port(self.port.bandwidth / self.pairs.per_gpu, self.port.latency) if self.pairs else self.port


@dataclass(frozen=True, slots=True)
class Host:
    """GPU pairs pass the host: `bridges` root complexes per node, and the port of each towards the others."""

    bridges: int
    port: Port


@dataclass(frozen=True, slots=True)
class Nics:
    """Network ports of a node, at most one per GPU; neighbouring GPUs share a NIC where there are fewer."""

    per_node: int
    port: Port
    network: Technology = Technology.INFINIBAND


@dataclass(frozen=True, slots=True)
class Node:
    """A node of `gpus` GPUs; pcie is each GPU's link to its NIC (or root complex, where there is a `host`)."""

    gpus: int
    pcie: Port | None = None
    nvlink: NvLink | None = None
    host: Host | None = None
    nics: Nics | None = None

    def technology(self, kind: LinkKind) -> Technology:
        """The make of links of this kind; switches are of the network that the NICs are of."""
        if kind is LinkKind.NVLINK and self.nvlink:
            return self.nvlink.generation
        return self.nics.network if kind in NETWORK_KINDS and self.nics else Technology.PCIE

    @property
    def domain_gpus(self) -> int:
        """GPUs of one NVLink domain; 1 without NVLink."""
        return self.nvlink.gpus if self.nvlink else 1

    @property
    def switched(self) -> bool:
        """Whether a switch joins the GPUs of an NVLink domain."""
        return self.nvlink is not None and self.nvlink.pairs is None

    @property
    def reach(self) -> int:
        """How many neighbouring GPUs reach each other without a NIC."""
        return max(self.domain_gpus, self.gpus if self.host else 1)

    @property
    def nics_per_node(self) -> int:
        """NICs of one node; 0 without a network."""
        return self.nics.per_node if self.nics else 0

    @property
    def bridges(self) -> int:
        """Root complexes of one node that GPU traffic passes; 0 where it does not pass the host."""
        return self.host.bridges if self.host else 0

    def nic(self, gpus: IntArray) -> IntArray:
        """The NIC that each GPU uses, numbered through the cluster."""
        return gpus // self.gpus * self.nics_per_node + gpus % self.gpus * self.nics_per_node // self.gpus

    def bridge(self, gpus: IntArray) -> IntArray:
        """The root complex of each GPU, numbered through the cluster."""
        return gpus // self.gpus * self.bridges + gpus % self.gpus * self.bridges // self.gpus

    def nic_bridge(self, nics: IntArray) -> IntArray:
        """The root complex of each NIC, numbered through the cluster."""
        count = self.nics_per_node
        return nics // count * self.bridges + nics % count * self.bridges // count


@dataclass(frozen=True, slots=True)
class Leaf:
    """Units of `nodes` nodes under `switches` leaves each; NIC i of a node is on leaf i modulo `switches`."""

    nodes: int
    switches: int
    latency: Seconds
    oversubscription: float = 1.0

    def switch(self, nics: IntArray, per_node: int) -> IntArray:
        """The leaf of each NIC (any shape), both numbered through the cluster; per_node: NICs of a node."""
        return nics // per_node // self.nodes * self.switches + nics % per_node % self.switches


@dataclass(frozen=True, slots=True)
class Spine:
    """Pods of `units` units; ports: links at the NICs' rate that one switch takes, None: one switch per leaf uplink."""

    units: int
    latency: Seconds
    oversubscription: float = 1.0
    ports: int | None = None


@dataclass(frozen=True, slots=True)
class Core:
    """Up to `pods` pods; ports: as in `Spine`, None: one switch for the i-th spines of all pods."""

    pods: int
    latency: Seconds
    ports: int | None = None


@dataclass(frozen=True, slots=True)
class Network:
    """The switches above the NICs: one, two or three tiers."""

    leaf: Leaf
    ecmp: Ecmp
    spine: Spine | None = None
    core: Core | None = None

    @property
    def units_per_pod(self) -> int:
        """Units that reach each other without a core switch."""
        return self.spine.units if self.spine else 1

    @property
    def nodes(self) -> int:
        """The most nodes that this network connects."""
        return self.leaf.nodes * self.units_per_pod * (self.core.pods if self.core else 1)


def even_part(gpus: int, node: int, domain: int) -> int:
    """GPUs that a job of so many uses of each NVLink domain, in whole nodes and as evenly as these allow.

    All of a domain that is no larger than a node, or that holds the job.

    >>> even_part(80, node=4, domain=72), even_part(60, node=4, domain=72), even_part(24, node=8, domain=8)
    (40, 72, 8)
    """
    most, nodes = domain // node, -(-gpus // node)
    return domain if nodes <= most or most < 2 else -(-nodes // -(-nodes // most)) * node


def spread_evenly(node: Node, network: Network | None, gpus: int) -> tuple[Node, Network | None]:
    """The part of NVLink domains of several nodes that a job of `gpus` gets, and of the switches above them.

    A scheduler hands such domains out in equal blocks of nodes (SLURM's topology/block, --segment): 80 GPUs on racks of
    72 are 40 and 40, not 72 and 8. The nodes that are left over are left out; leaves of whole domains keep the uplinks
    that they were built with, so they have more for each node.

    >>> from clustersim.hardware.ecmp import Spread
    >>> racks = Node(4, nvlink=NvLink(72, Port(900e9, 0.0)), nics=Nics(4, Port(50e9, 0.0)))
    >>> network = Network(Leaf(18, 4, 0.0, oversubscription=2.0), Spread(), Spine(8, 0.0))
    >>> node, above = spread_evenly(racks, network, 80)
    >>> node.domain_gpus, above.leaf.nodes, uplinks(node, above).leaf == uplinks(racks, network).leaf
    (40, 10, True)
    """
    part = even_part(gpus, node.gpus, node.domain_gpus)
    if node.nvlink is None or part == node.domain_gpus:
        return node, network
    most, used = node.domain_gpus // node.gpus, part // node.gpus
    spread = replace(node, nvlink=replace(node.nvlink, gpus=part, whole=node.domain_gpus))
    if network is None or network.leaf.nodes % most:
        return spread, network
    leaf = network.leaf
    units, left_over = leaf.nodes // most * used, leaf.oversubscription * used / most
    return spread, replace(network, leaf=replace(leaf, nodes=units, oversubscription=left_over))


@dataclass(frozen=True, slots=True)
class Uplinks:
    """What leads up from the switches of a network under one kind of node.

    leaf: bytes/s that one leaf sends up, over `per_leaf` parallel links, one to each spine of its pod; pod: bytes/s
    that all spines of one pod send up, over `per_spine` parallel links each. Links have about the NICs' rate.
    """

    leaf: BytesPerSecond
    per_leaf: int
    pod: BytesPerSecond
    per_spine: int


def uplinks(node: Node, network: Network) -> Uplinks:
    """Divide the NICs' bandwidth by the oversubscription of each tier.

    >>> from clustersim.hardware.ecmp import Spread
    >>> nics = Nics(8, Port(50e9, 0.0))
    >>> rails = Network(Leaf(32, 8, 0.0), Spread(), Spine(4, 0.0, oversubscription=2.0), Core(16, 0.0))
    >>> uplinks(Node(8, nics=nics), rails)
    Uplinks(leaf=1600000000000.0, per_leaf=32, pod=25600000000000.0, per_spine=16)
    """
    rate = node.nics.port.bandwidth if node.nics else 0.0
    leaves, spine = network.leaf, network.spine
    if spine is None:
        return Uplinks(leaf=0.0, per_leaf=0, pod=0.0, per_spine=0)
    leaf = leaves.nodes * node.nics_per_node * rate / leaves.switches / leaves.oversubscription
    per_leaf = max(1, round(leaf / rate))
    if network.core is None:
        return Uplinks(leaf, per_leaf, pod=0.0, per_spine=0)
    pod = spine.units * leaves.switches * leaf / spine.oversubscription
    return Uplinks(leaf, per_leaf, pod, per_spine=max(1, round(pod / per_leaf / rate)))
