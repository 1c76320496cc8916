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

NETWORK: Final = (LinkKind.NIC, LinkKind.LEAF, LinkKind.SPINE)
"""What leads from node to node."""
_TO_NICS: Final = (LinkKind.PCIE, LinkKind.HOST)


def network_links(scenario: Scenario) -> tuple[LinkKind, ...]:
    """Kinds of links from node to node, if the layout's ranks are on several."""
    nodes = scenario.cluster.fabric.nodes(np.arange(scenario.layout.world_size))
    return _there(scenario, NETWORK) if len(np.unique(nodes)) > 1 else ()


def links_to_nics(scenario: Scenario, bandwidth: float) -> tuple[LinkKind, ...]:
    """Kinds of links between GPUs and NICs that are slower than NICs of so many times their bandwidth would be."""
    links = scenario.cluster.fabric.links
    fastest = {kind: links.bandwidth[links.kind == LINK_KINDS.index(kind)].max(initial=0.0) for kind in _TO_NICS}
    nics = links.bandwidth[links.kind == LINK_KINDS.index(LinkKind.NIC)].max(initial=0.0)
    return tuple(kind for kind in _there(scenario, _TO_NICS) if fastest[kind] < bandwidth * nics)


def nvlink(scenario: Scenario) -> tuple[LinkKind, ...]:
    """NVLink (or xGMI), where there is any and ranks to use it."""
    return _there(scenario, (LinkKind.NVLINK,)) if scenario.layout.world_size > 1 else ()


def pcie_links(scenario: Scenario) -> tuple[LinkKind, ...]:
    """Where there is no NVLink: PCIe, and what joins root complexes."""
    several = scenario.layout.world_size > 1
    return _there(scenario, _TO_NICS) if several and not nvlink(scenario) else ()


def with_links(scenario: Scenario, kinds: Sequence[LinkKind], bandwidth: float) -> Scenario:
    """Links of some kinds have a part (or a multiple) of their bandwidth."""
    fabric = scenario.cluster.fabric
    numbers = [LINK_KINDS.index(kind) for kind in kinds]
    left = np.where(np.isin(fabric.links.kind, numbers), bandwidth, 1.0)
    cluster = replace(scenario.cluster, fabric=fabric.changed(left))
    return replace(without_measured_collectives(scenario), cluster=cluster)


def without_measured_collectives(scenario: Scenario) -> Scenario:
    """Collectives take what the model says; the same scenario where none were measured."""
    record = scenario.cost.record
    if record is None or not record.collectives:
        return scenario
    return replace(scenario, cost=replace(scenario.cost, record=replace(record, collectives=())))


def _there(scenario: Scenario, kinds: Sequence[LinkKind]) -> tuple[LinkKind, ...]:
    there = np.unique(scenario.cluster.fabric.links.kind)
    return tuple(kind for kind in kinds if LINK_KINDS.index(kind) in there)
