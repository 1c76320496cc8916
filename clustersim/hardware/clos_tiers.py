"""The tiers of a regular cluster, computed from its specification.

One entry per tier, from the GPUs up, without enumerating GPUs or links.
"""

from clustersim.hardware.clos_spec import NetworkSpec, NodeSpec, uplink_rates
from clustersim.hardware.clos_wiring import ClosCounts
from clustersim.hardware.topology import FabricTier


def describe_tiers(counts: ClosCounts, node: NodeSpec, network: NetworkSpec | None) -> tuple[FabricTier, ...]:
    """Tiers inside nodes and domains, then those of the network."""
    return (*_scale_up_tiers(counts, node), *(_network_tiers(counts, node, network) if network else ()))


def _scale_up_tiers(counts: ClosCounts, node: NodeSpec) -> list[FabricTier]:
    port = node.nvlink.port if node.nvlink else node.pcie
    tiers = [FabricTier("gpu", counts.gpus, port.bandwidth if port else 0.0, None)]
    if node.nvlink and node.has_nvswitch:
        domains = -(-counts.gpus // node.nvlink.gpu_count)
        tiers.append(FabricTier("nvswitch", domains, node.nvlink.gpu_count * node.nvlink.port.bandwidth, None))
    if node.host:
        tiers.append(FabricTier("host", counts.nodes * node.host.bridge_count, node.host.port.bandwidth, None))
    if node.nics:
        tiers.append(FabricTier("nic", counts.nodes * node.nics.per_node, node.nics.port.bandwidth, None))
    return tiers


def _network_tiers(counts: ClosCounts, node: NodeSpec, network: NetworkSpec) -> list[FabricTier]:
    rates, leaf, spine, core = uplink_rates(node, network), network.leaf, network.spine, network.core
    if spine is None or not counts.spines:
        down = (
            leaf.nodes_per_unit
            * node.nics_per_node
            * (node.nics.port.bandwidth if node.nics else 0.0)
            / leaf.switches_per_unit
        )
        return [FabricTier("leaf", counts.leaves, down, None)]
    tiers = [FabricTier("leaf", counts.leaves, rates.leaf, leaf.oversubscription)]
    links_below, links_above = (
        counts.leaves * rates.links_per_leaf,
        counts.pods * rates.links_per_leaf * rates.links_per_spine,
    )
    if core is None or not counts.cores:
        spines = _switch_count(links_below, spine.port_count, rates.links_per_leaf)
        return [*tiers, FabricTier("spine", spines, counts.leaves * rates.leaf / spines, None)]
    spines = _switch_count(links_below + links_above, spine.port_count, counts.pods * rates.links_per_leaf)
    cores = _switch_count(links_above, core.port_count, rates.links_per_leaf)
    total = counts.pods * rates.pod
    return [
        *tiers,
        FabricTier("spine", spines, total / spines, spine.oversubscription),
        FabricTier("core", cores, total / cores, None),
    ]


def _switch_count(link_count: int, port_count: int | None, default: int) -> int:
    """Number of switches needed for `link_count` links."""
    return -(-link_count // port_count) if port_count else default
