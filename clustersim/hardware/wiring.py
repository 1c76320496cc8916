"""Which links does a regular cluster have, how are they numbered, and what stands at their ends?

Links come in runs of equal ones: the i-th link of a run belongs to the i-th GPU, NIC, leaf, ... so a link's number is
the run's first number plus an index found by arithmetic. Every run upwards has its twin downwards. A link's latency
includes the switch or adapter that it leaves; both NICs of a route count once, as leaving one and entering the other.
"""

from collections.abc import Callable
from dataclasses import dataclass, fields

from clustersim.hardware.shape import Network, Node, Port, uplinks
from clustersim.hardware.topology import LinkKind

Ends = Callable[[int], tuple[str, str]]

_NOTHING = Port(bandwidth=0.0, latency=0.0)


@dataclass(frozen=True, slots=True)
class LinkRun:
    """`count` equal links numbered from `first`; ends(i) names source and target of the i-th."""

    kind: LinkKind
    first: int
    count: int
    port: Port
    ends: Ends


@dataclass(frozen=True, slots=True)
class Way:
    """A run of links away from the GPUs and its twin back."""

    up: LinkRun
    down: LinkRun


@dataclass(frozen=True, slots=True)
class Counts:
    """How many of each thing a cluster of some GPUs has.

    spines: links of their own that a leaf has upwards (1 where they are spread); cores: the same of a spine. Both are 0
    where the cluster is too small to need that tier.
    """

    gpus: int
    nodes: int
    units: int
    leaves: int
    pods: int
    spines: int
    cores: int


@dataclass(frozen=True, slots=True)
class Wiring:
    """All links of a cluster, in the order of their numbers."""

    nvlink: Way
    pcie: Way
    host: Way
    riser: Way
    nic: Way
    leaf: Way
    spine: Way

    def runs(self) -> list[LinkRun]:
        """Every run, in the order of link numbers."""
        ways: list[Way] = [getattr(self, field.name) for field in fields(self)]
        return [run for way in ways for run in (way.up, way.down)]


def count(gpus: int, node: Node, network: Network | None) -> Counts:
    """Whole and partial nodes, units and pods that hold `gpus` GPUs."""
    nodes = _ceil(gpus, node.gpus)
    if network is None:
        return Counts(gpus, nodes, units=0, leaves=0, pods=0, spines=0, cores=0)
    units, rates = _ceil(nodes, network.leaf.nodes), uplinks(node, network)
    leaves, pods = units * network.leaf.switches, _ceil(units, network.units_per_pod)
    spines = network.ecmp.ways(rates.per_leaf) if network.spine and leaves > 1 else 0
    cores = network.ecmp.ways(rates.per_spine) if network.core and pods > 1 else 0
    return Counts(gpus, nodes, units, leaves, pods, spines, cores)


def _ceil(value: int, unit: int) -> int:
    return -(-value // unit)


class _Numbering:
    """Hands out link numbers, one run after the other."""

    def __init__(self) -> None:
        self._next = 0

    def run(self, kind: LinkKind, count: int, port: Port, ends: Ends) -> LinkRun:
        first, self._next = self._next, self._next + count
        return LinkRun(kind, first, count, port, ends)

    def way(self, kind: LinkKind, count: int, up: Port, down: Port, ends: Ends) -> Way:
        """A run and its twin with the ends exchanged."""
        return Way(
            up=self.run(kind, count, up, ends),
            down=self.run(kind, count, down, lambda index: (ends(index)[1], ends(index)[0])),
        )

    def even(self, kind: LinkKind, count: int, port: Port | None, ends: Ends) -> Way:
        """A way with equal directions; without a port there are no links."""
        return self.way(kind, count if port else 0, port or _NOTHING, port or _NOTHING, ends)


def wire(counts: Counts, node: Node, network: Network | None) -> Wiring:
    """Number all links of a cluster."""
    new, nics = _Numbering(), counts.nodes * node.nics_per_node
    return Wiring(
        nvlink=new.even(LinkKind.NVLINK, counts.gpus, _half(node.nvlink.port if node.nvlink else None), _nvlink(node)),
        pcie=new.even(LinkKind.PCIE, counts.gpus, node.pcie, _pcie(node)),
        host=new.even(LinkKind.HOST, *_bridges(counts, node), _host(node)),
        riser=new.even(LinkKind.PCIE, nics if node.host else 0, node.pcie, _riser(node)),
        nic=_nic_way(new, nics, node, network),
        leaf=_leaf_way(new, counts, node, network),
        spine=_spine_way(new, counts, node, network),
    )


def _half(port: Port | None) -> Port | None:
    """Each of two links in a row has half of the latency between their far ends."""
    return Port(port.bandwidth, port.latency / 2) if port else None


def _bridges(counts: Counts, node: Node) -> tuple[int, Port | None]:
    if node.host is None or node.host.bridges == 1:
        return 0, None
    return counts.nodes * node.host.bridges, _half(node.host.port)


def _nic_way(new: _Numbering, nics: int, node: Node, network: Network | None) -> Way:
    if node.nics is None or network is None:
        return new.even(LinkKind.NIC, 0, None, _unnamed)
    up, leaves = node.nics.port, network.leaf
    down = Port(up.bandwidth, leaves.latency + up.latency)
    return new.way(LinkKind.NIC, nics, up, down, _nic(node, network))


def _leaf_way(new: _Numbering, counts: Counts, node: Node, network: Network | None) -> Way:
    if network is None or network.spine is None or not counts.spines:
        return new.even(LinkKind.LEAF, 0, None, _unnamed)
    bandwidth, spines, leaves = uplinks(node, network).leaf / counts.spines, counts.spines, network.leaf.switches
    up, down = Port(bandwidth, network.leaf.latency), Port(bandwidth, network.spine.latency)
    per_pod = leaves * network.spine.units

    def ends(index: int) -> tuple[str, str]:
        leaf, spine = divmod(index, spines)
        return f"leaf{leaf // leaves}.{leaf % leaves}", f"spine{leaf // per_pod}.{spine}"

    return new.way(LinkKind.LEAF, counts.leaves * spines, up, down, ends)


def _spine_way(new: _Numbering, counts: Counts, node: Node, network: Network | None) -> Way:
    if network is None or network.spine is None or network.core is None or not counts.cores:
        return new.even(LinkKind.SPINE, 0, None, _unnamed)
    spines, cores = counts.spines, counts.cores
    bandwidth = uplinks(node, network).pod / (spines * cores)
    up, down = Port(bandwidth, network.spine.latency), Port(bandwidth, network.core.latency)

    def ends(index: int) -> tuple[str, str]:
        spine, core = divmod(index, cores)
        return f"spine{spine // spines}.{spine % spines}", f"core{spine % spines}.{core}"

    return new.way(LinkKind.SPINE, counts.pods * spines * cores, up, down, ends)


def _unnamed(index: int) -> tuple[str, str]:
    raise IndexError(f"there is no link {index} of this kind")


def _nvlink(node: Node) -> Ends:
    return lambda gpu: (f"gpu{gpu}", f"nvswitch{gpu // node.domain_gpus}")


def _pcie(node: Node) -> Ends:
    def ends(gpu: int) -> tuple[str, str]:
        home, local = divmod(gpu, node.gpus)
        if node.host:
            return f"gpu{gpu}", f"host{home}.{local * node.bridges // node.gpus}"
        return f"gpu{gpu}", f"nic{home}.{local * node.nics_per_node // node.gpus}"

    return ends


def _host(node: Node) -> Ends:
    return lambda bridge: (f"host{bridge // node.bridges}.{bridge % node.bridges}", f"host{bridge // node.bridges}")


def _riser(node: Node) -> Ends:
    def ends(nic: int) -> tuple[str, str]:
        home, local = divmod(nic, node.nics_per_node)
        return f"host{home}.{local * node.bridges // node.nics_per_node}", f"nic{home}.{local}"

    return ends


def _nic(node: Node, network: Network) -> Ends:
    def ends(nic: int) -> tuple[str, str]:
        home, local = divmod(nic, node.nics_per_node)
        return f"nic{home}.{local}", f"leaf{home // network.leaf.nodes}.{local % network.leaf.switches}"

    return ends
