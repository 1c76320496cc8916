"""Specification of a regular cluster, and where a GPU sits in it.

A cluster is nodes of equal GPUs; an NVLink domain covers a fraction of a node, a node, or several nodes; NICs
connect to leaf switches, units of leaves form pods under spine switches, and pods are joined by core
switches. The position of a GPU follows from its id by division, so nothing is stored per GPU.

    rails: GPU -> NIC -> leaf of its rail in its unit -> spine of its pod -> core   (one leaf per NIC of a node)
    racks: GPU -> NIC -> top-of-rack switch of its unit -> spine of its pod -> core   (one leaf per unit)

Switches are built for full units and pods: the last, partly filled one has the same uplinks as the others.
References: NVIDIA DGX SuperPOD reference architecture RA-11333-001 (rails, scalable units); Llama 3,
arXiv:2407.21783, sec. 3.3.1 (racks, pods, 1:7 above).
"""

from dataclasses import dataclass, replace

from clustersim.common.arrays import IntArray
from clustersim.common.units import BytesPerSecond, Seconds
from clustersim.hardware.direct_links import DirectLinks
from clustersim.hardware.ecmp import Ecmp
from clustersim.hardware.link_technology import LinkTechnology
from clustersim.hardware.topology import NETWORK_KINDS, LinkKind


@dataclass(frozen=True, slots=True)
class Port:
    """One direction of a link: bytes/s, and seconds from one end to the other."""

    bandwidth: BytesPerSecond
    latency: Seconds


@dataclass(frozen=True, slots=True)
class NvlinkSpec:
    """An NVLink (or xGMI) domain of `gpu_count` GPUs; port: total bandwidth of each of them.

    generation: of NVLink; direct_links: the links of every pair of GPUs, whose bandwidths sum to a GPU's port,
    None: a switch joins them; port.latency is from GPU to GPU; full_domain_gpus: GPUs of a complete domain, where
    a job has a fraction of each.
    """

    gpu_count: int
    port: Port
    generation: LinkTechnology = LinkTechnology.NVLINK4
    direct_links: DirectLinks | None = None
    full_domain_gpus: int | None = None

    @property
    def link_port(self) -> Port:
        """One direct link; a GPU's whole port where a switch joins them."""
        return (
            Port(self.port.bandwidth / self.direct_links.max_links_per_gpu, self.port.latency)
            if self.direct_links
            else self.port
        )


@dataclass(frozen=True, slots=True)
class HostBridgeSpec:
    """GPU-to-GPU traffic passes the host: root complexes per node, and the port of each towards the others."""

    bridge_count: int
    port: Port


@dataclass(frozen=True, slots=True)
class NicSpec:
    """NICs of a node, at most one per GPU; neighbouring GPUs share a NIC where there are fewer."""

    per_node: int
    port: Port
    network: LinkTechnology = LinkTechnology.INFINIBAND


@dataclass(frozen=True, slots=True)
class NodeSpec:
    """A node of `gpu_count` GPUs; pcie: each GPU's link to its NIC (or root complex, where there is a `host`)."""

    gpu_count: int
    pcie: Port | None = None
    nvlink: NvlinkSpec | None = None
    host: HostBridgeSpec | None = None
    nics: NicSpec | None = None

    def link_technology(self, kind: LinkKind) -> LinkTechnology:
        """The technology of links of this kind; switch links are of the NICs' network."""
        if kind is LinkKind.NVLINK and self.nvlink:
            return self.nvlink.generation
        return self.nics.network if kind in NETWORK_KINDS and self.nics else LinkTechnology.PCIE

    @property
    def domain_gpus(self) -> int:
        """Number of GPUs of one NVLink domain; 1 without NVLink."""
        return self.nvlink.gpu_count if self.nvlink else 1

    @property
    def has_nvswitch(self) -> bool:
        """Whether a switch joins the GPUs of an NVLink domain."""
        return self.nvlink is not None and self.nvlink.direct_links is None

    @property
    def scale_up_gpus(self) -> int:
        """Number of consecutive GPUs that reach each other without a NIC (the scale-up domain)."""
        return max(self.domain_gpus, self.gpu_count if self.host else 1)

    @property
    def nics_per_node(self) -> int:
        """NICs of one node; 0 without a network."""
        return self.nics.per_node if self.nics else 0

    @property
    def bridges_per_node(self) -> int:
        """Root complexes of one node that GPU traffic passes; 0 where it does not pass the host."""
        return self.host.bridge_count if self.host else 0

    def nic_ids(self, gpus: IntArray) -> IntArray:
        """The NIC that each GPU uses, numbered across the cluster."""
        return (
            gpus // self.gpu_count * self.nics_per_node + gpus % self.gpu_count * self.nics_per_node // self.gpu_count
        )

    def bridge_ids(self, gpus: IntArray) -> IntArray:
        """The root complex of each GPU, numbered across the cluster."""
        return (
            gpus // self.gpu_count * self.bridges_per_node
            + gpus % self.gpu_count * self.bridges_per_node // self.gpu_count
        )

    def nic_bridge_ids(self, nics: IntArray) -> IntArray:
        """The root complex of each NIC, numbered across the cluster."""
        count = self.nics_per_node
        return nics // count * self.bridges_per_node + nics % count * self.bridges_per_node // count


@dataclass(frozen=True, slots=True)
class LeafSpec:
    """Leaf tier: units of `nodes_per_unit` nodes; NIC i of a node is on leaf i modulo `switches_per_unit`."""

    nodes_per_unit: int
    switches_per_unit: int
    latency: Seconds
    oversubscription: float = 1.0

    def leaf_ids(self, nics: IntArray, nics_per_node: int) -> IntArray:
        """The leaf of each NIC (any shape), both numbered across the cluster."""
        return (
            nics // nics_per_node // self.nodes_per_unit * self.switches_per_unit
            + nics % nics_per_node % self.switches_per_unit
        )


@dataclass(frozen=True, slots=True)
class SpineSpec:
    """Spine tier; port_count: links at the NICs' rate that one switch takes, None: one switch per leaf uplink."""

    units_per_pod: int
    latency: Seconds
    oversubscription: float = 1.0
    port_count: int | None = None


@dataclass(frozen=True, slots=True)
class CoreSpec:
    """Core tier; port_count: as in `SpineSpec`, None: one switch for the i-th spines of all pods."""

    max_pods: int
    latency: Seconds
    port_count: int | None = None


@dataclass(frozen=True, slots=True)
class NetworkSpec:
    """The switches above the NICs: one, two or three tiers."""

    leaf: LeafSpec
    ecmp: Ecmp
    spine: SpineSpec | None = None
    core: CoreSpec | None = None

    @property
    def units_per_pod(self) -> int:
        """Units that reach each other without a core switch."""
        return self.spine.units_per_pod if self.spine else 1

    @property
    def max_nodes(self) -> int:
        """The largest number of nodes that this network connects."""
        return self.leaf.nodes_per_unit * self.units_per_pod * (self.core.max_pods if self.core else 1)


def even_domain_gpus(job_gpus: int, node_gpus: int, domain_gpus: int) -> int:
    """GPUs of each NVLink domain that a job of `job_gpus` uses, in whole nodes and as evenly as possible.

    All of a domain that is no larger than a node, or that holds the job.

    >>> even_domain_gpus(80, node_gpus=4, domain_gpus=72), even_domain_gpus(60, node_gpus=4, domain_gpus=72)
    (40, 72)
    >>> even_domain_gpus(24, node_gpus=8, domain_gpus=8)
    8
    """
    nodes_per_domain, nodes = domain_gpus // node_gpus, -(-job_gpus // node_gpus)
    return (
        domain_gpus
        if nodes <= nodes_per_domain or nodes_per_domain < 2
        else -(-nodes // -(-nodes // nodes_per_domain)) * node_gpus
    )


def spread_evenly(node: NodeSpec, network: NetworkSpec | None, job_gpus: int) -> tuple[NodeSpec, NetworkSpec | None]:
    """Node and network specs restricted to what a job of `job_gpus` GPUs gets of NVLink domains of several nodes.

    A scheduler allocates such domains in equal blocks of nodes (SLURM's topology/block, --segment): 80 GPUs on
    racks of 72 are 40 and 40, not 72 and 8. Unused nodes are omitted; leaves of complete domains keep their
    uplinks, so they have more uplink bandwidth per node.

    >>> from clustersim.hardware.ecmp import SpreadEcmp
    >>> racks = NodeSpec(4, nvlink=NvlinkSpec(72, Port(900e9, 0.0)), nics=NicSpec(4, Port(50e9, 0.0)))
    >>> network = NetworkSpec(LeafSpec(18, 4, 0.0, oversubscription=2.0), SpreadEcmp(), SpineSpec(8, 0.0))
    >>> node, above = spread_evenly(racks, network, 80)
    >>> node.domain_gpus, above.leaf.nodes_per_unit
    (40, 10)
    >>> uplink_rates(node, above).leaf == uplink_rates(racks, network).leaf
    True
    """
    used_domain_gpus = even_domain_gpus(job_gpus, node.gpu_count, node.domain_gpus)
    if node.nvlink is None or used_domain_gpus == node.domain_gpus:
        return node, network
    nodes_per_domain, used_nodes = node.domain_gpus // node.gpu_count, used_domain_gpus // node.gpu_count
    spread = replace(node, nvlink=replace(node.nvlink, gpu_count=used_domain_gpus, full_domain_gpus=node.domain_gpus))
    if network is None or network.leaf.nodes_per_unit % nodes_per_domain:
        return spread, network
    leaf = network.leaf
    nodes_per_unit, oversubscription = (
        leaf.nodes_per_unit // nodes_per_domain * used_nodes,
        leaf.oversubscription * used_nodes / nodes_per_domain,
    )
    return spread, replace(
        network, leaf=replace(leaf, nodes_per_unit=nodes_per_unit, oversubscription=oversubscription)
    )


@dataclass(frozen=True, slots=True)
class UplinkRates:
    """Uplinks of the switches of a network under one kind of node.

    leaf: bytes/s that one leaf sends up, over `links_per_leaf` parallel links, one to each spine of its pod; pod:
    bytes/s that all spines of one pod send up, over `links_per_spine` parallel links each. Links have about the
    NICs' rate.
    """

    leaf: BytesPerSecond
    links_per_leaf: int
    pod: BytesPerSecond
    links_per_spine: int


def uplink_rates(node: NodeSpec, network: NetworkSpec) -> UplinkRates:
    """Divide the NICs' bandwidth by the oversubscription of each tier.

    >>> from clustersim.hardware.ecmp import SpreadEcmp
    >>> node = NodeSpec(8, nics=NicSpec(8, Port(50e9, 0.0)))
    >>> spine = SpineSpec(4, 0.0, oversubscription=2.0)
    >>> rates = uplink_rates(node, NetworkSpec(LeafSpec(32, 8, 0.0), SpreadEcmp(), spine, CoreSpec(16, 0.0)))
    >>> rates.leaf, rates.links_per_leaf, rates.pod, rates.links_per_spine
    (1600000000000.0, 32, 25600000000000.0, 16)
    """
    rate = node.nics.port.bandwidth if node.nics else 0.0
    leaf_spec, spine = network.leaf, network.spine
    if spine is None:
        return UplinkRates(leaf=0.0, links_per_leaf=0, pod=0.0, links_per_spine=0)
    leaf = (
        leaf_spec.nodes_per_unit * node.nics_per_node * rate / leaf_spec.switches_per_unit / leaf_spec.oversubscription
    )
    links_per_leaf = max(1, round(leaf / rate))
    if network.core is None:
        return UplinkRates(leaf, links_per_leaf, pod=0.0, links_per_spine=0)
    pod = spine.units_per_pod * leaf_spec.switches_per_unit * leaf / spine.oversubscription
    return UplinkRates(leaf, links_per_leaf, pod, links_per_spine=max(1, round(pod / links_per_leaf / rate)))
