"""Reads a regular cluster from a file.

    node:   {gpus, pcie?, nvlink?: {gpus, links?, ...}, host?: {bridges, ...}, nic?: {per_node, ...}}
    fabric: {leaf: {arrangement, nodes, ...}, spine?: {units, ...}, core?: {pods, ...}, ecmp?, seed?}

Every link has a `bandwidth` per direction and a `latency`, every switch a `latency`; oversubscription
defaults to 1. NVLink has a `generation` (default: the accelerator's own), the NICs a `network` (default:
InfiniBand). Without `nic` and `fabric`, the cluster is one scale-up domain, joined by NVLink or the host.
"""

from dataclasses import replace
from typing import Final

from clustersim.common.mapping_reader import MappingReader
from clustersim.common.units import Dimension
from clustersim.hardware.clos_fabric import ClosFabric
from clustersim.hardware.clos_spec import (
    CoreSpec,
    HostBridgeSpec,
    LeafSpec,
    NetworkSpec,
    NicSpec,
    NodeSpec,
    NvlinkSpec,
    Port,
    SpineSpec,
    spread_evenly,
)
from clustersim.hardware.direct_links_reader import read_direct_links
from clustersim.hardware.ecmp import Ecmp, HashedEcmp, SpreadEcmp
from clustersim.hardware.link_technology import LinkTechnology
from clustersim.hardware.technology_reader import read_generation, read_network_kind

MAX_COMPONENTS: Final = 2**20  # of any kind: nodes in a unit, units in a pod, pods, switches
MAX_OVERSUBSCRIPTION: Final = 1000.0
MAX_LINKS: Final = 2**24
MAX_SEED: Final = 2**63 - 1


def read_clos(
    section: MappingReader, gpu_count: int, default_generation: LinkTechnology | None, *, evenly: bool
) -> ClosFabric:
    """The fabric of a cluster file for `gpu_count` GPUs; raise InputError if it cannot connect them.

    default_generation: NVLink generation of the accelerator, if it has one; evenly: whether the GPUs are those of
    a job that is spread evenly over NVLink domains (`spread_evenly`), else domains are filled one after the
    other.
    """
    node = read_node(section.get_section("node"), default_generation)
    network = read_network(section.get_section("fabric"), node) if node.nics else None
    if evenly:
        node, network = spread_evenly(node, network, gpu_count)
    if network is None and section.has_key("fabric"):
        raise section.input_error("fabric", "there are switches but no node.nic to reach them")
    if (
        node.nvlink
        and node.nvlink.direct_links
        and (node.nvlink.direct_links.restrict_to_first(gpu_count).relay < 0).any()
    ):
        raise section.input_error("gpus", f"node.nvlink.links do not join the first {gpu_count} GPUs with each other")
    fabric = ClosFabric(node, network, gpu_count)
    if gpu_count > fabric.max_gpus:
        raise section.input_error("gpus", f"{gpu_count:,} GPUs do not fit; {_size_limit_message(node, network)}")
    link_count = sum(link_range.count for link_range in fabric.wiring.link_ranges())
    if link_count > MAX_LINKS:
        raise section.input_error(
            "fabric", f"makes {link_count:,} links; at most {MAX_LINKS:,} fit, so let ecmp be spread"
        )
    return fabric


def _size_limit_message(node: NodeSpec, network: NetworkSpec | None) -> str:
    """Why a cluster cannot be larger."""
    if network is None:
        return f"without a network it has at most {node.scale_up_gpus}"
    pods = network.core.max_pods if network.core else 1
    factors = (
        f"{pods:,} pods × {network.units_per_pod:,} units × {network.leaf.nodes_per_unit:,} nodes × "
        f"{node.gpu_count} GPUs"
    )
    return f"the fabric connects at most {network.max_nodes * node.gpu_count:,} ({factors})"


def read_node(section: MappingReader, default_generation: LinkTechnology | None) -> NodeSpec:
    """The specification of a node."""
    node = NodeSpec(
        gpu_count=section.get_int("gpus", max_value=MAX_COMPONENTS),
        pcie=_read_port(section.get_section("pcie")) if section.has_key("pcie") else None,
        nvlink=_read_nvlink(section.get_section("nvlink"), default_generation) if section.has_key("nvlink") else None,
        host=_read_host(section.get_section("host")) if section.has_key("host") else None,
    )
    if max(node.gpu_count, node.domain_gpus) % min(node.gpu_count, node.domain_gpus):
        raise section.input_error(
            "nvlink.gpus", f"domains of {node.domain_gpus} do not divide into nodes of {node.gpu_count}"
        )
    if node.domain_gpus < node.gpu_count and (node.host is None or node.pcie is None):
        raise section.input_error(
            "host", f"is missing, with pcie, to join the {node.gpu_count} GPUs that NVLink does not join"
        )
    if node.host and node.gpu_count % node.host.bridge_count:
        raise section.input_error(
            "host.bridges", f"{node.host.bridge_count} do not divide {node.gpu_count} GPUs evenly"
        )
    return replace(node, nics=_read_nics(section.get_section("nic"), node)) if section.has_key("nic") else node


def _read_port(section: MappingReader) -> Port:
    return Port(section.get_quantity("bandwidth", Dimension.BANDWIDTH), _read_latency(section))


def _read_latency(section: MappingReader) -> float:
    return section.get_quantity("latency", Dimension.TIME, allow_zero=True)


def _read_nvlink(section: MappingReader, default_generation: LinkTechnology | None) -> NvlinkSpec:
    gpus = section.get_int("gpus", min_value=2, max_value=MAX_COMPONENTS)
    pairs = read_direct_links(section, gpus) if section.has_key("links") else None
    return NvlinkSpec(gpus, _read_port(section), read_generation(section, default_generation), pairs)


def _read_host(section: MappingReader) -> HostBridgeSpec:
    return HostBridgeSpec(section.get_int("bridges", max_value=MAX_COMPONENTS), _read_port(section))


def _read_nics(section: MappingReader, node: NodeSpec) -> NicSpec:
    """NICs; several per GPU are modelled as one of their summed bandwidth."""
    per_node, port = section.get_int("per_node", max_value=MAX_COMPONENTS), _read_port(section)
    network = read_network_kind(section)
    if node.pcie is None:
        raise section.input_error("per_node", "NICs need node.pcie, the link that joins a GPU to its NIC")
    if per_node <= node.gpu_count:
        return NicSpec(per_node, port, network)
    if per_node % node.gpu_count:
        raise section.input_error("per_node", f"{per_node} NICs do not divide evenly among {node.gpu_count} GPUs")
    return NicSpec(node.gpu_count, Port(port.bandwidth * per_node / node.gpu_count, port.latency), network)


def read_network(section: MappingReader, node: NodeSpec) -> NetworkSpec:
    """The specification of the switches."""
    network = NetworkSpec(
        leaf=_read_leaf(section.get_section("leaf"), node),
        spine=_read_spine(section.get_section("spine")) if section.has_key("spine") else None,
        core=_read_core(section.get_section("core")) if section.has_key("core") else None,
        ecmp=read_ecmp(section),
    )
    if network.spine is None and (network.leaf.switches_per_unit > 1 or network.core):
        raise section.input_error("spine", "is missing: nothing joins the leaf switches")
    return network


def _read_leaf(section: MappingReader, node: NodeSpec) -> LeafSpec:
    rails = section.get_choice("arrangement", "rail", "rack") == "rail"
    return LeafSpec(
        nodes_per_unit=section.get_int("nodes", max_value=MAX_COMPONENTS),
        switches_per_unit=node.nics_per_node if rails else 1,
        latency=_read_latency(section),
        oversubscription=_read_oversubscription(section),
    )


def _read_spine(section: MappingReader) -> SpineSpec:
    units = section.get_int("units", max_value=MAX_COMPONENTS)
    return SpineSpec(units, _read_latency(section), _read_oversubscription(section), _read_ports(section))


def _read_core(section: MappingReader) -> CoreSpec:
    return CoreSpec(section.get_int("pods", max_value=MAX_COMPONENTS), _read_latency(section), _read_ports(section))


def _read_oversubscription(section: MappingReader) -> float:
    return section.get_ratio("oversubscription", max_value=MAX_OVERSUBSCRIPTION)


def _read_ports(section: MappingReader) -> int | None:
    return section.get_int("ports", max_value=MAX_COMPONENTS) if section.has_key("ports") else None


def read_ecmp(section: MappingReader) -> Ecmp:
    """How equal-cost paths are used: `ecmp` spread or hashed, with a `seed`."""
    hashed = section.get_choice("ecmp", "spread", "hashed") == "hashed"
    seed = section.get_int("seed", min_value=0, max_value=MAX_SEED) if section.has_key("seed") else 0
    return HashedEcmp(seed) if hashed else SpreadEcmp()
