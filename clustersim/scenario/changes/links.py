"""Changes of link bandwidth.

All links of some kinds are scaled, everywhere. Collectives measured on the original links do not apply to
scaled ones, so they are modelled instead; compare such a scenario with one `without_measured_collectives`.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Final

import numpy as np

from clustersim.hardware.topology import LINK_KINDS, LinkKind
from clustersim.scenario.scenario import Scenario

NETWORK_LINK_KINDS: Final = (LinkKind.NIC, LinkKind.LEAF, LinkKind.SPINE)
"""Link kinds between nodes."""
_NIC_PATH_KINDS: Final = (LinkKind.PCIE, LinkKind.HOST)


def network_link_kinds(scenario: Scenario) -> tuple[LinkKind, ...]:
    """Link kinds between nodes; empty if all ranks are on one node."""
    nodes = scenario.cluster.fabric.node_ids(np.arange(scenario.layout.world_size))
    return _present_kinds(scenario, NETWORK_LINK_KINDS) if len(np.unique(nodes)) > 1 else ()


def site_link_kinds(scenario: Scenario) -> tuple[LinkKind, ...]:
    """Links between sites, if the cluster has several."""
    return _present_kinds(scenario, (LinkKind.WAN,))


def nic_path_bottlenecks(scenario: Scenario, nic_bandwidth_factor: float) -> tuple[LinkKind, ...]:
    """Link kinds between GPU and NIC that would be the bottleneck with NICs scaled by a factor."""
    links = scenario.cluster.fabric.links
    max_bandwidth = {
        kind: links.bandwidth[links.kind == LINK_KINDS.index(kind)].max(initial=0.0) for kind in _NIC_PATH_KINDS
    }
    nic_bandwidth = links.bandwidth[links.kind == LINK_KINDS.index(LinkKind.NIC)].max(initial=0.0)
    return tuple(
        kind
        for kind in _present_kinds(scenario, _NIC_PATH_KINDS)
        if max_bandwidth[kind] < nic_bandwidth_factor * nic_bandwidth
    )


def nvlink_kinds(scenario: Scenario) -> tuple[LinkKind, ...]:
    """NVLink (or xGMI), if the cluster has it and the layout has several ranks."""
    return _present_kinds(scenario, (LinkKind.NVLINK,)) if scenario.layout.world_size > 1 else ()


def pcie_link_kinds(scenario: Scenario) -> tuple[LinkKind, ...]:
    """PCIe and host interconnect, if there is no NVLink and the layout has several ranks."""
    has_several_ranks = scenario.layout.world_size > 1
    return _present_kinds(scenario, _NIC_PATH_KINDS) if has_several_ranks and not nvlink_kinds(scenario) else ()


def nic_path_kinds(scenario: Scenario) -> tuple[LinkKind, ...]:
    """PCIe and host links between GPUs and NICs, if there is NVLink and a network is used."""
    return _present_kinds(scenario, _NIC_PATH_KINDS) if nvlink_kinds(scenario) and network_link_kinds(scenario) else ()


def pcie_over_nvlink(scenario: Scenario) -> float | None:
    """PCIe's bandwidth over NVLink's, of one GPU; None if the layout does not use both."""
    links = scenario.cluster.fabric.links
    bandwidths = [
        links.bandwidth[links.kind == LINK_KINDS.index(kind)].max(initial=0.0)
        for kind in (LinkKind.PCIE, LinkKind.NVLINK)
    ]
    is_used = bool(nvlink_kinds(scenario)) and all(bandwidths)
    return float(bandwidths[0] / bandwidths[1]) if is_used else None


def node_link_kinds(scenario: Scenario) -> tuple[LinkKind, ...]:
    """NVLink, else PCIe and host interconnect."""
    return nvlink_kinds(scenario) or pcie_link_kinds(scenario)


def with_link_bandwidth(scenario: Scenario, kinds: Sequence[LinkKind], factor: float) -> Scenario:
    """The scenario with the bandwidth of some link kinds scaled by a factor."""
    fabric = scenario.cluster.fabric
    kind_indices = [LINK_KINDS.index(kind) for kind in kinds]
    factors = np.where(np.isin(fabric.links.kind, kind_indices), factor, 1.0)
    cluster = replace(scenario.cluster, fabric=fabric.with_degraded_links(factors))
    return replace(without_measured_collectives(scenario), cluster=cluster)


def without_measured_collectives(scenario: Scenario) -> Scenario:
    """The scenario with modelled instead of measured collectives; unchanged if none were measured."""
    record = scenario.cost.record
    if record is None or not record.collectives:
        return scenario
    return replace(scenario, cost=replace(scenario.cost, record=replace(record, collectives=())))


def _present_kinds(scenario: Scenario, kinds: Sequence[LinkKind]) -> tuple[LinkKind, ...]:
    present = np.unique(scenario.cluster.fabric.links.kind)
    return tuple(kind for kind in kinds if LINK_KINDS.index(kind) in present)
