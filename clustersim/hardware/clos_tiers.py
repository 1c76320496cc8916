"""What is a regular cluster built of, counted and not listed?

One row per tier, from the GPUs up, worked out from the shape alone, whatever the number of GPUs.
"""

from clustersim.hardware.shape import Network, Node, uplinks
from clustersim.hardware.topology import Tier
from clustersim.hardware.wiring import Counts


def tiers(counts: Counts, node: Node, network: Network | None) -> tuple[Tier, ...]:
    """Rows for what lies inside nodes and domains, then for the network."""
    return (*_inside(counts, node), *(_network(counts, node, network) if network else ()))


def _inside(counts: Counts, node: Node) -> list[Tier]:
    port = node.nvlink.port if node.nvlink else node.pcie
    rows = [Tier("gpu", counts.gpus, port.bandwidth if port else 0.0, None)]
    if node.nvlink:
        domains = -(-counts.gpus // node.nvlink.gpus)
        rows.append(Tier("nvswitch", domains, node.nvlink.gpus * node.nvlink.port.bandwidth, None))
    if node.host:
        rows.append(Tier("host", counts.nodes * node.host.bridges, node.host.port.bandwidth, None))
    if node.nics:
        rows.append(Tier("nic", counts.nodes * node.nics.per_node, node.nics.port.bandwidth, None))
    return rows


def _network(counts: Counts, node: Node, network: Network) -> list[Tier]:
    rates, leaf, spine = uplinks(node, network), network.leaf, network.spine
    if spine is None or not counts.spines:
        return [Tier("leaf", counts.leaves, rates.leaf * leaf.oversubscription, None)]
    rows = [Tier("leaf", counts.leaves, rates.leaf, leaf.oversubscription)]
    if not counts.cores:
        down = counts.leaves * rates.leaf / (counts.pods * rates.spines)
        return [*rows, Tier("spine", counts.pods * rates.spines, down, None)]
    rows.append(Tier("spine", counts.pods * rates.spines, rates.spine / rates.spines, spine.oversubscription))
    cores = rates.spines * rates.cores
    return [*rows, Tier("core", cores, counts.pods * rates.spine / cores, None)]
