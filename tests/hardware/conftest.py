"""Small clusters of every topology, with distinct numbers for each kind of link."""

from collections.abc import Callable

import pytest

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
)
from clustersim.hardware.direct_links import DirectLinks
from clustersim.hardware.ecmp import HashedEcmp, SpreadEcmp

US = 1e-6
PCIE = Port(60e9, 0.5 * US)
NVLINK = Port(450e9, 0.6 * US)
NIC = Port(50e9, 0.7 * US)
NVLINK_NODE = NodeSpec(4, pcie=PCIE, nvlink=NvlinkSpec(4, NVLINK), nics=NicSpec(4, NIC))
SHARED_NICS = NodeSpec(4, pcie=PCIE, nvlink=NvlinkSpec(4, NVLINK), nics=NicSpec(2, NIC))
PCIE_NODE = NodeSpec(4, pcie=PCIE, host=HostBridgeSpec(2, Port(20e9, 1.0 * US)), nics=NicSpec(2, NIC))
BRIDGED_NODE = NodeSpec(
    4, pcie=PCIE, nvlink=NvlinkSpec(2, NVLINK), host=HostBridgeSpec(1, Port(20e9, 1.0 * US)), nics=NicSpec(1, NIC)
)
MESH_NODE = NodeSpec(
    4, pcie=PCIE, nvlink=NvlinkSpec(4, NVLINK, direct_links=DirectLinks.fully_connected(4)), nics=NicSpec(4, NIC)
)
RACK_DOMAIN = NodeSpec(2, pcie=PCIE, nvlink=NvlinkSpec(6, NVLINK), nics=NicSpec(2, NIC))


def rail_network(nodes_per_unit: int, rail_count: int, seed: int | None = None) -> NetworkSpec:
    """Units of given nodes, pods of two units, three pods, each tier with its own latency and oversubscription."""
    ecmp = SpreadEcmp() if seed is None else HashedEcmp(seed)
    return NetworkSpec(
        LeafSpec(nodes_per_unit, rail_count, 0.3 * US), ecmp, SpineSpec(2, 0.4 * US, 2.0), CoreSpec(3, 0.5 * US)
    )


MACHINES: dict[str, Callable[[], ClosFabric]] = {
    "one nvlink node": lambda: ClosFabric(NodeSpec(8, nvlink=NvlinkSpec(8, NVLINK)), None, 8),
    "part of a node": lambda: ClosFabric(NodeSpec(8, nvlink=NvlinkSpec(8, NVLINK)), None, 3),
    "part of a mesh": lambda: ClosFabric(
        NodeSpec(8, nvlink=NvlinkSpec(8, NVLINK, direct_links=DirectLinks.fully_connected(8))), None, 3
    ),
    "rails of meshes, last partial": lambda: ClosFabric(MESH_NODE, rail_network(2, 4), 4 * 9),
    "one pcie node": lambda: ClosFabric(NodeSpec(4, pcie=PCIE, host=HostBridgeSpec(2, Port(20e9, 1.0 * US))), None, 4),
    "rails, three pods, last partial": lambda: ClosFabric(NVLINK_NODE, rail_network(2, 4), 4 * 9),
    "rails, hashed": lambda: ClosFabric(NVLINK_NODE, rail_network(2, 4, seed=7), 4 * 9),
    "rails, shared nics": lambda: ClosFabric(SHARED_NICS, rail_network(2, 2), 4 * 9),
    "racks": lambda: ClosFabric(NVLINK_NODE, rail_network(2, 1), 4 * 9),
    "racks of pcie nodes": lambda: ClosFabric(PCIE_NODE, rail_network(2, 1), 4 * 9),
    "nvlink pairs in pcie nodes": lambda: ClosFabric(BRIDGED_NODE, rail_network(2, 1), 4 * 9),
    "domains of three nodes": lambda: ClosFabric(RACK_DOMAIN, rail_network(3, 2), 2 * 14),
    "racks, only one of them used": lambda: ClosFabric(NVLINK_NODE, rail_network(2, 1), 4 * 2),
    "rails, only one pod used": lambda: ClosFabric(NVLINK_NODE, rail_network(2, 4), 4 * 3),
    "one rack without spines": lambda: ClosFabric(
        NVLINK_NODE, NetworkSpec(LeafSpec(4, 1, 0.3 * US), SpreadEcmp()), 4 * 3
    ),
}


@pytest.fixture(params=MACHINES)
def machine(request: pytest.FixtureRequest) -> ClosFabric:
    """Each small cluster in turn."""
    return MACHINES[request.param]()


@pytest.fixture
def build() -> dict[str, Callable[[], ClosFabric]]:
    """All small clusters by name."""
    return MACHINES
