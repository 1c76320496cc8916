"""Which links does a regular cluster have, how are they numbered, and what stands at their ends?

Links come in runs of equal ones: the i-th link of a run belongs to the i-th GPU, NIC, leaf, ... so a link's number is
the run's first number plus an index found by arithmetic. Every run upwards has its twin downwards. A link's latency
includes the switch or adapter that it leaves; both NICs of a route count once, as leaving one and entering the other.
What stands at the ends comes in layers (GPUs, NICs, leaves, ...) and is numbered in the same way, GPUs first.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields

import numpy as np

from clustersim.common.arrays import IntArray
from clustersim.hardware.clos_spec import Network, Node, NvLink, Port, uplinks
from clustersim.hardware.topology import LinkKind
from clustersim.hardware.vertex_tier import Layer, number_layers

Place = Callable[[IntArray], IntArray]
"""Which vertex of a layer the i-th link of a run ends at."""

_NOTHING = Port(bandwidth=0.0, latency=0.0)


@dataclass(frozen=True, slots=True)
class End:
    """One end of all links of a run."""

    layer: Layer
    place: Place

    def name(self, index: int) -> str:
        """The name of what stands at this end of the i-th link."""
        return self.layer.name(int(self.place(np.array([index]))[0]))

    def vertices(self, count: int) -> IntArray:
        """Vertex numbers at this end of the first `count` links."""
        return self.layer.first + self.place(np.arange(count))


@dataclass(frozen=True, slots=True)
class LinkRun:
    """`count` equal links numbered from `first`, each of which stands for `members` parallel ones."""

    kind: LinkKind
    first: int
    count: int
    port: Port
    source: End
    target: End
    members: int = 1

    def ends(self, index: int) -> tuple[str, str]:
        """The names of the i-th link's source and target."""
        return self.source.name(index), self.target.name(index)


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
    """All links of a cluster, in the order of their numbers, and the layers of what they join.

    pairs: links from GPU to GPU, the narrowest pairs first; nvlink: links to switches, where there are no such pairs.
    """

    nvlink: Way
    pairs: tuple[Way, ...]
    pcie: Way
    host: Way
    riser: Way
    nic: Way
    leaf: Way
    spine: Way
    layers: tuple[Layer, ...]

    def ways(self) -> tuple[Way, ...]:
        """Every way, from the GPUs up."""
        return self.nvlink, *self.pairs, self.pcie, self.host, self.riser, self.nic, self.leaf, self.spine

    def runs(self) -> list[LinkRun]:
        """Every run, in the order of link numbers."""
        return [run for way in self.ways() for run in (way.up, way.down)]


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


@dataclass(frozen=True, slots=True)
class _Joint:
    """What a way joins: its ends, the lower one first, and how many parallel links each of its links stands for."""

    lower: End
    upper: End
    members: int = 1


class _Numbering:
    """Hands out link numbers, one run after the other."""

    def __init__(self) -> None:
        self._next = 0

    def way(self, kind: LinkKind, count: int, joint: _Joint, *, up: Port, down: Port) -> Way:
        """A run and its twin with the ends exchanged."""
        first, self._next = self._next, self._next + 2 * count
        return Way(
            up=LinkRun(kind, first, count, up, joint.lower, joint.upper, joint.members),
            down=LinkRun(kind, first + count, count, down, joint.upper, joint.lower, joint.members),
        )

    def even(self, kind: LinkKind, count: int, port: Port | None, joint: _Joint) -> Way:
        """A way with equal directions; without a port there are no links."""
        return self.way(kind, count if port else 0, joint, up=port or _NOTHING, down=port or _NOTHING)


@dataclass(frozen=True, slots=True)
class _Layers:
    """Everything that stands at the end of a link, in the order of vertex numbers."""

    gpu: Layer
    nvswitch: Layer
    bridge: Layer
    root: Layer
    nic: Layer
    leaf: Layer
    spine: Layer
    core: Layer


def wire(counts: Counts, node: Node, network: Network | None) -> Wiring:
    """Number all links of a cluster, and what they join."""
    new, layers, nics = _Numbering(), _layers(counts, node, network), counts.nodes * node.nics_per_node
    nvlink = _half(node.nvlink.port if node.nvlink and not node.nvlink.pairs else None)
    return Wiring(
        nvlink=new.even(LinkKind.NVLINK, counts.gpus, nvlink, _nvlink(layers, node)),
        pairs=tuple(_pair_ways(new, layers, node.nvlink)) if node.nvlink else (),
        pcie=new.even(LinkKind.PCIE, counts.gpus if node.host or node.nics else 0, node.pcie, _pcie(layers, node)),
        host=new.even(LinkKind.HOST, *_bridges(counts, node), _host(layers, node)),
        riser=new.even(LinkKind.PCIE, nics if node.host else 0, node.pcie, _riser(layers, node)),
        nic=_nic_way(new, layers, node, network),
        leaf=_leaf_way(new, layers, node, network),
        spine=_spine_way(new, layers, node, network),
        layers=tuple(getattr(layers, field.name) for field in fields(layers)),
    )


def _layers(counts: Counts, node: Node, network: Network | None) -> _Layers:
    """Vertices by layer: the word of their names, how many they are, and how many share the first number of a name."""
    bridges, rails = node.bridges, network.leaf.switches if network else 1
    spines, cores = counts.spines, counts.cores
    return _Layers(
        *number_layers(
            ("gpu", counts.gpus, None),
            ("nvswitch", _ceil(counts.gpus, node.domain_gpus) if node.switched else 0, None),
            ("host", counts.nodes * bridges, bridges),
            ("host", counts.nodes if bridges > 1 else 0, None),
            ("nic", counts.nodes * node.nics_per_node if network else 0, node.nics_per_node),
            ("leaf", counts.leaves, rails),
            ("spine", counts.pods * spines, spines),
            ("core", spines * cores, cores),
        )
    )


def _half(port: Port | None) -> Port | None:
    """Each of two links in a row has half of the latency between their far ends."""
    return Port(port.bandwidth, port.latency / 2) if port else None


def _bridges(counts: Counts, node: Node) -> tuple[int, Port | None]:
    if node.host is None or node.host.bridges == 1:
        return 0, None
    return counts.nodes * node.host.bridges, _half(node.host.port)


def _same(index: IntArray) -> IntArray:
    return index


def _nvlink(layers: _Layers, node: Node) -> _Joint:
    return _Joint(End(layers.gpu, _same), End(layers.nvswitch, lambda gpu: gpu // node.domain_gpus))


def _pair_ways(new: _Numbering, layers: _Layers, nvlink: NvLink) -> Iterator[Way]:
    """Up: from the lower to the higher GPU of a pair. Pairs of a domain come in the order of their higher GPU.

    So those of a domain that is partly there are the first ones.
    """
    if nvlink.pairs is None:
        return
    domains, rest = divmod(layers.gpu.count, nvlink.gpus)
    for width in nvlink.pairs.widths:
        pairs, links = nvlink.pairs.pairs(width), Port(nvlink.link.bandwidth * width, nvlink.link.latency)
        count = domains * len(pairs) + int(np.count_nonzero(pairs[:, 1] < rest))
        low, high = (End(layers.gpu, _pair_end(pairs[:, side], nvlink.gpus)) for side in (0, 1))
        yield new.even(LinkKind.NVLINK, count, links, _Joint(low, high, members=width))


def _pair_end(places: IntArray, domain: int) -> Place:
    """The GPU at one end of the i-th pair; places: [pairs of a domain]."""
    return lambda index: index // len(places) * domain + places[index % len(places)]


def _pcie(layers: _Layers, node: Node) -> _Joint:
    return _Joint(End(layers.gpu, _same), End(layers.bridge, node.bridge) if node.host else End(layers.nic, node.nic))


def _host(layers: _Layers, node: Node) -> _Joint:
    return _Joint(End(layers.bridge, _same), End(layers.root, lambda bridge: bridge // node.bridges))


def _riser(layers: _Layers, node: Node) -> _Joint:
    return _Joint(End(layers.bridge, node.nic_bridge), End(layers.nic, _same))


def _nic_way(new: _Numbering, layers: _Layers, node: Node, network: Network | None) -> Way:
    if node.nics is None or network is None:
        return new.even(LinkKind.NIC, 0, None, _Joint(End(layers.nic, _same), End(layers.leaf, _same)))
    up, leaf = node.nics.port, network.leaf
    joint = _Joint(End(layers.nic, _same), End(layers.leaf, lambda nics: leaf.switch(nics, node.nics_per_node)))
    down = Port(up.bandwidth, leaf.latency + up.latency)
    return new.way(LinkKind.NIC, layers.nic.count, joint, up=up, down=down)


def _leaf_way(new: _Numbering, layers: _Layers, node: Node, network: Network | None) -> Way:
    spines = layers.spine.per or 0
    if network is None or network.spine is None or not spines:
        return new.even(LinkKind.LEAF, 0, None, _Joint(End(layers.leaf, _same), End(layers.spine, _same)))
    rates, per_pod = uplinks(node, network), network.leaf.switches * network.spine.units
    bandwidth = rates.leaf / spines
    up, down = Port(bandwidth, network.leaf.latency), Port(bandwidth, network.spine.latency)
    joint = _Joint(
        End(layers.leaf, lambda index: index // spines),
        End(layers.spine, lambda index: index // spines // per_pod * spines + index % spines),
        members=rates.per_leaf // spines,
    )
    return new.way(LinkKind.LEAF, layers.leaf.count * spines, joint, up=up, down=down)


def _spine_way(new: _Numbering, layers: _Layers, node: Node, network: Network | None) -> Way:
    spines, cores = layers.spine.per or 0, layers.core.per or 0
    if network is None or network.spine is None or network.core is None or not cores:
        return new.even(LinkKind.SPINE, 0, None, _Joint(End(layers.spine, _same), End(layers.core, _same)))
    rates = uplinks(node, network)
    bandwidth = rates.pod / (spines * cores)
    up, down = Port(bandwidth, network.spine.latency), Port(bandwidth, network.core.latency)
    joint = _Joint(
        End(layers.spine, lambda index: index // cores),
        End(layers.core, lambda index: index // cores % spines * cores + index % cores),
        members=rates.per_leaf * rates.per_spine // (spines * cores),
    )
    return new.way(LinkKind.SPINE, layers.spine.count * cores, joint, up=up, down=down)
