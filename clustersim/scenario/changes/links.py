"""What would a scenario be with faster or slower links?

All links of some kinds have a part of their bandwidth, everywhere. What was measured on the links as they are does not
say what others do: then collectives take what the model says, so such a scenario is to be compared with one
`without_measured_collectives`.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Final

import numpy as np

from clustersim.hardware.topology import LINK_KINDS, LinkKind
from clustersim.scenario.scenario import Scenario

NETWORK_LINK_KINDS: Final = (LinkKind.NIC, LinkKind.LEAF, LinkKind.SPINE)
"""What leads from node to node."""
_NIC_PATH_KINDS: Final = (LinkKind.PCIE, LinkKind.HOST)


def network_link_kinds(scenario: Scenario) -> tuple[LinkKind, ...]:
    """Kinds of links from node to node, if the layout's ranks are on several."""
    nodes = scenario.cluster.fabric.node_ids(np.arange(scenario.layout.world_size))
    return _present_kinds(scenario, NETWORK_LINK_KINDS) if len(np.unique(nodes)) > 1 else ()


def nic_path_bottlenecks(scenario: Scenario, nic_bandwidth_factor: float) -> tuple[LinkKind, ...]:
    """Kinds of links between GPUs and NICs that are slower than NICs of so many times their bandwidth would be."""
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
    """NVLink (or xGMI), where there is any and ranks to use it."""
    return _present_kinds(scenario, (LinkKind.NVLINK,)) if scenario.layout.world_size > 1 else ()


def pcie_link_kinds(scenario: Scenario) -> tuple[LinkKind, ...]:
    """Where there is no NVLink: PCIe, and what joins root complexes."""
    has_several_ranks = scenario.layout.world_size > 1
    return _present_kinds(scenario, _NIC_PATH_KINDS) if has_several_ranks and not nvlink_kinds(scenario) else ()


def with_link_bandwidth(scenario: Scenario, kinds: Sequence[LinkKind], factor: float) -> Scenario:
    """Links of some kinds have a part (or a multiple) of their bandwidth."""
    fabric = scenario.cluster.fabric
    kind_indices = [LINK_KINDS.index(kind) for kind in kinds]
    factors = np.where(np.isin(fabric.links.kind, kind_indices), factor, 1.0)
    cluster = replace(scenario.cluster, fabric=fabric.with_degraded_links(factors))
    return replace(without_measured_collectives(scenario), cluster=cluster)


def without_measured_collectives(scenario: Scenario) -> Scenario:
    """Collectives take what the model says; the same scenario where none were measured."""
    record = scenario.cost.record
    if record is None or not record.collectives:
        return scenario
    return replace(scenario, cost=replace(scenario.cost, record=replace(record, collectives=())))


def _present_kinds(scenario: Scenario, kinds: Sequence[LinkKind]) -> tuple[LinkKind, ...]:
    present = np.unique(scenario.cluster.fabric.links.kind)
    return tuple(kind for kind in kinds if LINK_KINDS.index(kind) in present)
