"""How is a regular cluster written in a file?

    node:   {gpus, pcie?, nvlink?: {gpus, links?, ...}, host?: {bridges, ...}, nic?: {per_node, ...}}
    fabric: {leaf: {arrangement, nodes, ...}, spine?: {units, ...}, core?: {pods, ...}, ecmp?, seed?}

Every link has a `bandwidth` per direction and a `latency`, every switch a `latency`; oversubscription is 1 unless it is
stated. NVLink has a `generation` (else the accelerator's own), the NICs a `network` (else InfiniBand). Without `nic`
and `fabric`, the cluster is as large as what NVLink or the host joins.
"""

from dataclasses import replace
from typing import Final

from clustersim.common.mapping_reader import Section
from clustersim.common.units import Dimension
from clustersim.hardware.clos_fabric import ClosFabric
from clustersim.hardware.clos_spec import Core, Host, Leaf, Network, Nics, Node, NvLink, Port, Spine, spread_evenly
from clustersim.hardware.direct_links_reader import read_pairs
from clustersim.hardware.ecmp import Ecmp, Hashed, Spread
from clustersim.hardware.link_technology import Technology
from clustersim.hardware.technology_reader import read_generation, read_network_kind

MOST_PARTS: Final = 2**20  # of anything: nodes in a unit, units in a pod, pods, switches
MOST_OVERSUBSCRIPTION: Final = 1000.0
MOST_LINKS: Final = 2**24
MOST_SEED: Final = 2**63 - 1


def read_clos(section: Section, gpus: int, own: Technology | None = None, *, evenly: bool = True) -> ClosFabric:
    """The fabric of a cluster file for `gpus` GPUs; raise InputError if it cannot connect so many.

    own: the NVLink generation of the accelerator, if it has one; evenly: whether a job has these GPUs that is spread
    evenly over NVLink domains (`spread_evenly`), else domains are filled one after the other.
    """
    node = read_node(section.section("node"), own)
    network = read_network(section.section("fabric"), node) if node.nics else None
    if evenly:
        node, network = spread_evenly(node, network, gpus)
    if network is None and section.has("fabric"):
        raise section.refuse("fabric", "there are switches but no node.nic to reach them")
    if node.nvlink and node.nvlink.pairs and (node.nvlink.pairs.first(gpus).over < 0).any():
        raise section.refuse("gpus", f"node.nvlink.links do not join the first {gpus} GPUs with each other")
    fabric = ClosFabric(node, network, gpus)
    if gpus > fabric.most:
        raise section.refuse("gpus", f"{gpus:,} GPUs do not fit; {_limit(node, network)}")
    links = sum(run.count for run in fabric.wiring.runs())
    if links > MOST_LINKS:
        raise section.refuse("fabric", f"makes {links:,} links; at most {MOST_LINKS:,} fit, so let ecmp be spread")
    return fabric


def _limit(node: Node, network: Network | None) -> str:
    """Why a cluster cannot be larger."""
    if network is None:
        return f"without a network it has at most {node.reach}"
    pods = network.core.pods if network.core else 1
    product = f"{pods:,} pods × {network.units_per_pod:,} units × {network.leaf.nodes:,} nodes × {node.gpus} GPUs"
    return f"the fabric connects at most {network.nodes * node.gpus:,} ({product})"


def read_node(section: Section, own: Technology | None = None) -> Node:
    """The inside of a node."""
    node = Node(
        gpus=section.count("gpus", most=MOST_PARTS),
        pcie=_port(section.section("pcie")) if section.has("pcie") else None,
        nvlink=_nvlink(section.section("nvlink"), own) if section.has("nvlink") else None,
        host=_host(section.section("host")) if section.has("host") else None,
    )
    if max(node.gpus, node.domain_gpus) % min(node.gpus, node.domain_gpus):
        raise section.refuse("nvlink.gpus", f"domains of {node.domain_gpus} do not divide into nodes of {node.gpus}")
    if node.domain_gpus < node.gpus and (node.host is None or node.pcie is None):
        raise section.refuse("host", f"is missing, with pcie, to join the {node.gpus} GPUs that NVLink does not join")
    if node.host and node.gpus % node.host.bridges:
        raise section.refuse("host.bridges", f"{node.host.bridges} do not divide {node.gpus} GPUs evenly")
    return replace(node, nics=_nics(section.section("nic"), node)) if section.has("nic") else node


def _port(section: Section) -> Port:
    return Port(section.quantity("bandwidth", Dimension.BANDWIDTH), _latency(section))


def _latency(section: Section) -> float:
    return section.quantity("latency", Dimension.TIME, zero=True)


def _nvlink(section: Section, own: Technology | None) -> NvLink:
    gpus = section.count("gpus", least=2, most=MOST_PARTS)
    pairs = read_pairs(section, gpus) if section.has("links") else None
    return NvLink(gpus, _port(section), read_generation(section, own), pairs)


def _host(section: Section) -> Host:
    return Host(section.count("bridges", most=MOST_PARTS), _port(section))


def _nics(section: Section, node: Node) -> Nics:
    """NICs; several per GPU act as one of their summed bandwidth."""
    per_node, port = section.count("per_node", most=MOST_PARTS), _port(section)
    network = read_network_kind(section)
    if node.pcie is None:
        raise section.refuse("per_node", "NICs need node.pcie, the link that joins a GPU to its NIC")
    if per_node <= node.gpus:
        return Nics(per_node, port, network)
    if per_node % node.gpus:
        raise section.refuse("per_node", f"{per_node} NICs do not divide evenly among {node.gpus} GPUs")
    return Nics(node.gpus, Port(port.bandwidth * per_node / node.gpus, port.latency), network)


def read_network(section: Section, node: Node) -> Network:
    """The switches."""
    network = Network(
        leaf=_leaf(section.section("leaf"), node),
        spine=_spine(section.section("spine")) if section.has("spine") else None,
        core=_core(section.section("core")) if section.has("core") else None,
        ecmp=read_ecmp(section),
    )
    if network.spine is None and (network.leaf.switches > 1 or network.core):
        raise section.refuse("spine", "is missing: nothing joins the leaf switches")
    return network


def _leaf(section: Section, node: Node) -> Leaf:
    rails = section.choice("arrangement", "rail", "rack") == "rail"
    return Leaf(
        nodes=section.count("nodes", most=MOST_PARTS),
        switches=node.nics_per_node if rails else 1,
        latency=_latency(section),
        oversubscription=_oversubscription(section),
    )


def _spine(section: Section) -> Spine:
    units = section.count("units", most=MOST_PARTS)
    return Spine(units, _latency(section), _oversubscription(section), _ports(section))


def _core(section: Section) -> Core:
    return Core(section.count("pods", most=MOST_PARTS), _latency(section), _ports(section))


def _oversubscription(section: Section) -> float:
    return section.ratio("oversubscription", most=MOST_OVERSUBSCRIPTION)


def _ports(section: Section) -> int | None:
    return section.count("ports", most=MOST_PARTS) if section.has("ports") else None


def read_ecmp(section: Section) -> Ecmp:
    """How equal-cost ways are used: `ecmp` spread or hashed, with a `seed`."""
    hashed = section.choice("ecmp", "spread", "hashed") == "hashed"
    seed = section.count("seed", least=0, most=MOST_SEED) if section.has("seed") else 0
    return Hashed(seed) if hashed else Spread()
