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

from dataclasses import dataclass

from clustersim.hardware.routing import Ecmp
from clustersim.hardware.topology import IntArray
from clustersim.units import BytesPerSecond, Seconds


@dataclass(frozen=True, slots=True)
class Port:
    """One direction of a link: bytes/s, and seconds from one end to the other."""

    bandwidth: BytesPerSecond
    latency: Seconds


@dataclass(frozen=True, slots=True)
class NvLink:
    """A switched NVLink domain of `gpus` GPUs; port.latency is from GPU to GPU, through the switch."""

    gpus: int
    port: Port


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


@dataclass(frozen=True, slots=True)
class Node:
    """A node of `gpus` GPUs; pcie is each GPU's link to its NIC (or root complex, where there is a `host`)."""

    gpus: int
    pcie: Port | None = None
    nvlink: NvLink | None = None
    host: Host | None = None
    nics: Nics | None = None

    @property
    def domain_gpus(self) -> int:
        """GPUs of one NVLink domain; 1 without NVLink."""
        return self.nvlink.gpus if self.nvlink else 1

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


@dataclass(frozen=True, slots=True)
class Spine:
    """Pods of `units` units; `switches` per pod, by default one for each uplink of a leaf at the NIC's rate."""

    units: int
    latency: Seconds
    oversubscription: float = 1.0
    switches: int | None = None


@dataclass(frozen=True, slots=True)
class Core:
    """Up to `pods` pods; `switches` in all, by default one for each uplink of a spine at the NIC's rate, per plane."""

    pods: int
    latency: Seconds
    switches: int | None = None


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


@dataclass(frozen=True, slots=True)
class Uplinks:
    """Bandwidths and numbers of the switch-to-switch links of a network under one kind of node.

    leaf: bytes/s that one leaf sends up; spine: bytes/s that all spines of one pod send up; spines: spine switches per
    pod; cores: core switches that one spine reaches (spine i of every pod reaches the same ones).
    """

    leaf: BytesPerSecond
    spine: BytesPerSecond
    spines: int
    cores: int


def uplinks(node: Node, network: Network) -> Uplinks:
    """Divide the NICs' bandwidth by the oversubscription of each tier; numbers of switches are physical ones.

    >>> from clustersim.hardware.routing import Spread
    >>> nics = Nics(8, Port(50e9, 0.0))
    >>> rails = Network(Leaf(32, 8, 0.0), Spread(), Spine(4, 0.0, oversubscription=2.0), Core(16, 0.0))
    >>> uplinks(Node(8, nics=nics), rails)
    Uplinks(leaf=1600000000000.0, spine=25600000000000.0, spines=32, cores=16)
    """
    rate = node.nics.port.bandwidth if node.nics else 0.0
    down = network.leaf.nodes * node.nics_per_node * rate / network.leaf.switches
    leaf = down / network.leaf.oversubscription
    if network.spine is None:
        return Uplinks(leaf=0.0, spine=0.0, spines=0, cores=0)
    spines = network.spine.switches or max(1, round(leaf / rate))
    if network.core is None:
        return Uplinks(leaf=leaf, spine=0.0, spines=spines, cores=0)
    spine = network.spine.units * network.leaf.switches * leaf / network.spine.oversubscription
    cores = network.core.switches // spines if network.core.switches else round(spine / spines / rate)
    return Uplinks(leaf=leaf, spine=spine, spines=spines, cores=max(1, cores))
