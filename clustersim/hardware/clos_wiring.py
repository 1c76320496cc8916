"""Links and vertices of a regular cluster, and their ids.

Links come in ranges of equal ones: the i-th link of a range belongs to the i-th GPU, NIC, leaf, ... so a
link's id is the range's first id plus a computed index. Every range of uplinks has a reverse range of
downlinks. A link's latency includes the switch or adapter that it leaves; both NICs of a route count once, as
leaving one and entering the other. Vertices come in tiers (GPUs, NICs, leaves, ...) and are numbered in the
same way, GPUs first.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields

import numpy as np

from clustersim.common.arrays import IntArray
from clustersim.hardware.clos_spec import NetworkSpec, NodeSpec, NvlinkSpec, Port, uplink_rates
from clustersim.hardware.topology import LinkKind
from clustersim.hardware.vertex_tier import VertexTier, number_tiers

EndpointIndex = Callable[[IntArray], IntArray]
"""Maps indices of links in a range to indices of vertices in a tier."""

_NULL_PORT = Port(bandwidth=0.0, latency=0.0)


@dataclass(frozen=True, slots=True)
class RangeEndpoint:
    """One endpoint of all links of a range."""

    tier: VertexTier
    vertex_index: EndpointIndex

    def vertex_name(self, index: int) -> str:
        """Name of the endpoint of the i-th link."""
        return self.tier.vertex_name(int(self.vertex_index(np.array([index]))[0]))

    def vertex_ids(self, count: int) -> IntArray:
        """Vertex ids of the endpoints of the first `count_components` links."""
        return self.tier.first_id + self.vertex_index(np.arange(count))


@dataclass(frozen=True, slots=True)
class LinkRange:
    """Equal links with consecutive ids from `first_id`, each of which stands for `parallel_links` physical links."""

    kind: LinkKind
    first_id: int
    count: int
    port: Port
    source: RangeEndpoint
    target: RangeEndpoint
    parallel_links: int = 1

    def endpoint_names(self, index: int) -> tuple[str, str]:
        """The names of the i-th link's source and target."""
        return self.source.vertex_name(index), self.target.vertex_name(index)


@dataclass(frozen=True, slots=True)
class DuplexRange:
    """A range of links away from the GPUs and its reverse."""

    up: LinkRange
    down: LinkRange

    def side(self, *, outwards: bool) -> LinkRange:
        """The links away from the GPUs, or those towards them."""
        return self.up if outwards else self.down


@dataclass(frozen=True, slots=True)
class ClosCounts:
    """Number of components of a cluster of some GPUs.

    spines: distinct uplinks of a leaf (1 where they are spread); cores: the same of a spine. Both are 0 where the
    cluster is too small to need that tier.
    """

    gpus: int
    nodes: int
    units: int
    leaves: int
    pods: int
    spines: int
    cores: int


@dataclass(frozen=True, slots=True)
class ClosWiring:
    """All links of a cluster, in the order of their ids, and the vertex tiers that they join.

    direct_links: links from GPU to GPU, the narrowest pairs first; nvlink: links to switches, where there are no
    such pairs; riser: PCIe links between root complexes and NICs.
    """

    nvlink: DuplexRange
    direct_links: tuple[DuplexRange, ...]
    pcie: DuplexRange
    host: DuplexRange
    riser: DuplexRange
    nic: DuplexRange
    leaf: DuplexRange
    spine: DuplexRange
    tiers: tuple[VertexTier, ...]

    def duplex_ranges(self) -> tuple[DuplexRange, ...]:
        """Every duplex range, from the GPUs up."""
        return self.nvlink, *self.direct_links, self.pcie, self.host, self.riser, self.nic, self.leaf, self.spine

    def link_ranges(self) -> list[LinkRange]:
        """Every range, in the order of link ids."""
        return [link_range for duplex in self.duplex_ranges() for link_range in (duplex.up, duplex.down)]


def count_components(gpu_count: int, node: NodeSpec, network: NetworkSpec | None) -> ClosCounts:
    """Number of (full and partial) nodes, units, pods and switches for `gpu_count` GPUs."""
    nodes = _ceil_div(gpu_count, node.gpu_count)
    if network is None:
        return ClosCounts(gpu_count, nodes, units=0, leaves=0, pods=0, spines=0, cores=0)
    units, rates = _ceil_div(nodes, network.leaf.nodes_per_unit), uplink_rates(node, network)
    leaves, pods = units * network.leaf.switches_per_unit, _ceil_div(units, network.units_per_pod)
    spines = network.ecmp.distinct_links(rates.links_per_leaf) if network.spine and leaves > 1 else 0
    cores = network.ecmp.distinct_links(rates.links_per_spine) if network.core and pods > 1 else 0
    return ClosCounts(gpu_count, nodes, units, leaves, pods, spines, cores)


def _ceil_div(value: int, unit: int) -> int:
    return -(-value // unit)


@dataclass(frozen=True, slots=True)
class _Connection:
    """Key of a duplex range: its endpoints, the lower one first, and the physical links that each link stands for."""

    lower: RangeEndpoint
    upper: RangeEndpoint
    parallel_links: int = 1


class _LinkNumbering:
    """Assigns link ids, one range after the other."""

    def __init__(self) -> None:
        self._next_id = 0

    def add_duplex(self, kind: LinkKind, count: int, connection: _Connection, *, up: Port, down: Port) -> DuplexRange:
        """A range and its reverse."""
        first_id, self._next_id = self._next_id, self._next_id + 2 * count
        return DuplexRange(
            up=LinkRange(kind, first_id, count, up, connection.lower, connection.upper, connection.parallel_links),
            down=LinkRange(
                kind, first_id + count, count, down, connection.upper, connection.lower, connection.parallel_links
            ),
        )

    def add_symmetric(self, kind: LinkKind, count: int, port: Port | None, connection: _Connection) -> DuplexRange:
        """A duplex range with equal directions; without a port there are no links."""
        return self.add_duplex(kind, count if port else 0, connection, up=port or _NULL_PORT, down=port or _NULL_PORT)


@dataclass(frozen=True, slots=True)
class _VertexTiers:
    """All vertices by tier, in the order of vertex ids."""

    gpu: VertexTier
    nvswitch: VertexTier
    bridge: VertexTier
    root: VertexTier
    nic: VertexTier
    leaf: VertexTier
    spine: VertexTier
    core: VertexTier


def build_wiring(counts: ClosCounts, node: NodeSpec, network: NetworkSpec | None) -> ClosWiring:
    """Number all links and vertices of a cluster."""
    numbering, tiers, nic_count = (
        _LinkNumbering(),
        _build_tiers(counts, node, network),
        counts.nodes * node.nics_per_node,
    )
    nvlink_port = _half_latency(node.nvlink.port if node.nvlink and not node.nvlink.direct_links else None)
    return ClosWiring(
        nvlink=numbering.add_symmetric(LinkKind.NVLINK, counts.gpus, nvlink_port, _nvlink_connection(tiers, node)),
        direct_links=tuple(_direct_link_ranges(numbering, tiers, node.nvlink)) if node.nvlink else (),
        pcie=numbering.add_symmetric(
            LinkKind.PCIE, counts.gpus if node.host or node.nics else 0, node.pcie, _pcie_connection(tiers, node)
        ),
        host=numbering.add_symmetric(LinkKind.HOST, *_host_links(counts, node), _host_connection(tiers, node)),
        riser=numbering.add_symmetric(
            LinkKind.PCIE, nic_count if node.host else 0, node.pcie, _riser_connection(tiers, node)
        ),
        nic=_nic_ranges(numbering, tiers, node, network),
        leaf=_leaf_ranges(numbering, tiers, node, network),
        spine=_spine_ranges(numbering, tiers, node, network),
        tiers=tuple(getattr(tiers, field.name) for field in fields(tiers)),
    )


def _build_tiers(counts: ClosCounts, node: NodeSpec, network: NetworkSpec | None) -> _VertexTiers:
    """Vertex tiers: the kind in their names, how many there are, and how many share the first index of a name."""
    bridges, rails = node.bridges_per_node, network.leaf.switches_per_unit if network else 1
    spines, cores = counts.spines, counts.cores
    return _VertexTiers(
        *number_tiers(
            ("gpu", counts.gpus, None),
            ("nvswitch", _ceil_div(counts.gpus, node.domain_gpus) if node.has_nvswitch else 0, None),
            ("host", counts.nodes * bridges, bridges),
            ("host", counts.nodes if bridges > 1 else 0, None),
            ("nic", counts.nodes * node.nics_per_node if network else 0, node.nics_per_node),
            ("leaf", counts.leaves, rails),
            ("spine", counts.pods * spines, spines),
            ("core", spines * cores, cores),
        )
    )


def _half_latency(port: Port | None) -> Port | None:
    """A port with half of the latency, for each of two consecutive links."""
    return Port(port.bandwidth, port.latency / 2) if port else None


def _host_links(counts: ClosCounts, node: NodeSpec) -> tuple[int, Port | None]:
    if node.host is None or node.host.bridge_count == 1:
        return 0, None
    return counts.nodes * node.host.bridge_count, _half_latency(node.host.port)


def _identity(index: IntArray) -> IntArray:
    return index


def _nvlink_connection(tiers: _VertexTiers, node: NodeSpec) -> _Connection:
    return _Connection(
        RangeEndpoint(tiers.gpu, _identity), RangeEndpoint(tiers.nvswitch, lambda gpu: gpu // node.domain_gpus)
    )


def _direct_link_ranges(numbering: _LinkNumbering, tiers: _VertexTiers, nvlink: NvlinkSpec) -> Iterator[DuplexRange]:
    """Direct links, up: from the lower to the higher GPU of a pair.

    Pairs of a domain are ordered by their higher GPU, so those of a partial domain are the first ones.
    """
    if nvlink.direct_links is None:
        return
    domains, remainder = divmod(tiers.gpu.count, nvlink.gpu_count)
    for link_count in nvlink.direct_links.distinct_link_counts:
        pairs, port = (
            nvlink.direct_links.pairs_with(link_count),
            Port(nvlink.link_port.bandwidth * link_count, nvlink.link_port.latency),
        )
        count = domains * len(pairs) + int(np.count_nonzero(pairs[:, 1] < remainder))
        low, high = (RangeEndpoint(tiers.gpu, _pair_endpoint(pairs[:, side], nvlink.gpu_count)) for side in (0, 1))
        yield numbering.add_symmetric(LinkKind.NVLINK, count, port, _Connection(low, high, parallel_links=link_count))


def _pair_endpoint(local_indices: IntArray, domain_gpus: int) -> EndpointIndex:
    """The GPU at one end of the i-th pair; local_indices: [pairs of a domain] index of that GPU in its domain."""
    return lambda index: index // len(local_indices) * domain_gpus + local_indices[index % len(local_indices)]


def _pcie_connection(tiers: _VertexTiers, node: NodeSpec) -> _Connection:
    return _Connection(
        RangeEndpoint(tiers.gpu, _identity),
        RangeEndpoint(tiers.bridge, node.bridge_ids) if node.host else RangeEndpoint(tiers.nic, node.nic_ids),
    )


def _host_connection(tiers: _VertexTiers, node: NodeSpec) -> _Connection:
    return _Connection(
        RangeEndpoint(tiers.bridge, _identity),
        RangeEndpoint(tiers.root, lambda bridge: bridge // node.bridges_per_node),
    )


def _riser_connection(tiers: _VertexTiers, node: NodeSpec) -> _Connection:
    return _Connection(RangeEndpoint(tiers.bridge, node.nic_bridge_ids), RangeEndpoint(tiers.nic, _identity))


def _nic_ranges(
    numbering: _LinkNumbering, tiers: _VertexTiers, node: NodeSpec, network: NetworkSpec | None
) -> DuplexRange:
    if node.nics is None or network is None:
        return numbering.add_symmetric(
            LinkKind.NIC,
            0,
            None,
            _Connection(RangeEndpoint(tiers.nic, _identity), RangeEndpoint(tiers.leaf, _identity)),
        )
    up, leaf = node.nics.port, network.leaf
    connection = _Connection(
        RangeEndpoint(tiers.nic, _identity),
        RangeEndpoint(tiers.leaf, lambda nics: leaf.leaf_ids(nics, node.nics_per_node)),
    )
    down = Port(up.bandwidth, leaf.latency + up.latency)
    return numbering.add_duplex(LinkKind.NIC, tiers.nic.count, connection, up=up, down=down)


def _leaf_ranges(
    numbering: _LinkNumbering, tiers: _VertexTiers, node: NodeSpec, network: NetworkSpec | None
) -> DuplexRange:
    spines = tiers.spine.per_group or 0
    if network is None or network.spine is None or not spines:
        return numbering.add_symmetric(
            LinkKind.LEAF,
            0,
            None,
            _Connection(RangeEndpoint(tiers.leaf, _identity), RangeEndpoint(tiers.spine, _identity)),
        )
    rates, per_pod = uplink_rates(node, network), network.leaf.switches_per_unit * network.spine.units_per_pod
    bandwidth = rates.leaf / spines
    up, down = Port(bandwidth, network.leaf.latency), Port(bandwidth, network.spine.latency)
    connection = _Connection(
        RangeEndpoint(tiers.leaf, lambda index: index // spines),
        RangeEndpoint(tiers.spine, lambda index: index // spines // per_pod * spines + index % spines),
        parallel_links=rates.links_per_leaf // spines,
    )
    return numbering.add_duplex(LinkKind.LEAF, tiers.leaf.count * spines, connection, up=up, down=down)


def _spine_ranges(
    numbering: _LinkNumbering, tiers: _VertexTiers, node: NodeSpec, network: NetworkSpec | None
) -> DuplexRange:
    spines, cores = tiers.spine.per_group or 0, tiers.core.per_group or 0
    if network is None or network.spine is None or network.core is None or not cores:
        return numbering.add_symmetric(
            LinkKind.SPINE,
            0,
            None,
            _Connection(RangeEndpoint(tiers.spine, _identity), RangeEndpoint(tiers.core, _identity)),
        )
    rates = uplink_rates(node, network)
    bandwidth = rates.pod / (spines * cores)
    up, down = Port(bandwidth, network.spine.latency), Port(bandwidth, network.core.latency)
    connection = _Connection(
        RangeEndpoint(tiers.spine, lambda index: index // cores),
        RangeEndpoint(tiers.core, lambda index: index // cores % spines * cores + index % cores),
        parallel_links=rates.links_per_leaf * rates.links_per_spine // (spines * cores),
    )
    return numbering.add_duplex(LinkKind.SPINE, tiers.spine.count * cores, connection, up=up, down=down)
