"""What is a regular cluster built of, counted and not listed?

One row per tier, from the GPUs up, worked out from the shape alone, whatever the number of GPUs.
"""

from clustersim.hardware.clos_spec import Network, Node, uplinks
from clustersim.hardware.clos_wiring import Counts
from clustersim.hardware.topology import Tier


def tiers(counts: Counts, node: Node, network: Network | None) -> tuple[Tier, ...]:
    """Rows for what lies inside nodes and domains, then for the network."""
    return (*_inside(counts, node), *(_network(counts, node, network) if network else ()))


def _inside(counts: Counts, node: Node) -> list[Tier]:
    port = node.nvlink.port if node.nvlink else node.pcie
    rows = [Tier("gpu", counts.gpus, port.bandwidth if port else 0.0, None)]
    if node.nvlink and node.switched:
        domains = -(-counts.gpus // node.nvlink.gpus)
        rows.append(Tier("nvswitch", domains, node.nvlink.gpus * node.nvlink.port.bandwidth, None))
    if node.host:
        rows.append(Tier("host", counts.nodes * node.host.bridges, node.host.port.bandwidth, None))
    if node.nics:
        rows.append(Tier("nic", counts.nodes * node.nics.per_node, node.nics.port.bandwidth, None))
    return rows


def _network(counts: Counts, node: Node, network: Network) -> list[Tier]:
    rates, leaf, spine, core = uplinks(node, network), network.leaf, network.spine, network.core
    if spine is None or not counts.spines:
        down = leaf.nodes * node.nics_per_node * (node.nics.port.bandwidth if node.nics else 0.0) / leaf.switches
        return [Tier("leaf", counts.leaves, down, None)]
    rows = [Tier("leaf", counts.leaves, rates.leaf, leaf.oversubscription)]
    below, above = counts.leaves * rates.per_leaf, counts.pods * rates.per_leaf * rates.per_spine
    if core is None or not counts.cores:
        spines = _switches(below, spine.ports, rates.per_leaf)
        return [*rows, Tier("spine", spines, counts.leaves * rates.leaf / spines, None)]
    spines = _switches(below + above, spine.ports, counts.pods * rates.per_leaf)
    cores = _switches(above, core.ports, rates.per_leaf)
    total = counts.pods * rates.pod
    return [
        *rows,
        Tier("spine", spines, total / spines, spine.oversubscription),
        Tier("core", cores, total / cores, None),
    ]


def _switches(links: int, ports: int | None, otherwise: int) -> int:
    """How many switches take so many links."""
    return -(-links // ports) if ports else otherwise
