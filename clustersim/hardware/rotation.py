"""Rotation symmetry of a regular machine.

Rotate the GPUs of every node by one local rank, in all nodes at once. Where the GPUs of a node have
equivalent links, this is an automorphism of the fabric: it permutes GPUs and links, and maps the route
between two GPUs to the route between their images. So flows that rotations map to each other need to be
routed only once, and each link carries the load of all images.
"""

from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import numpy as np

from clustersim.common.arrays import FloatArray, IntArray
from clustersim.hardware.clos_spec import NetworkSpec, NodeSpec
from clustersim.hardware.clos_wiring import ClosCounts, ClosWiring
from clustersim.hardware.topology import LinkKind


@dataclass(frozen=True, slots=True)
class FabricRotation:
    """Orbits of links under rotation. period: GPUs of a node, i.e. rotations until the identity.

    orbit_of_link: [links + 1] index of each link's orbit, -1 for the last entry (no link); first_link: [orbits]
    the first link of each; multiplicity: [orbits] how often a flow and its images cross each link of the orbit if
    the flow crosses one of them.
    """

    period: int
    orbit_of_link: IntArray
    first_link: IntArray
    multiplicity: FloatArray


@runtime_checkable
class HasRotation(Protocol):
    """A fabric that may have rotation symmetry."""

    @property
    def rotation(self) -> FabricRotation | None:
        """None if the rotation is no automorphism."""


def find_rotation(
    counts: ClosCounts, node: NodeSpec, network: NetworkSpec | None, wiring: ClosWiring
) -> FabricRotation | None:
    """The rotation of a Clos fabric.

    None where a node's GPUs have inequivalent links, or ECMP hashing distinguishes routes.
    """
    if not _is_rotatable(counts, node, network):
        return None
    orbit_sizes = {LinkKind.LEAF: network.leaf.switches_per_unit if network else 1, LinkKind.SPINE: 1}
    ranges = [(link_range, orbit_sizes.get(link_range.kind, node.gpu_count)) for link_range in wiring.link_ranges()]
    orbit_counts = [link_range.count // orbit_size for link_range, orbit_size in ranges]
    orbit_ids = np.arange(sum(orbit_counts), dtype=np.int64)
    return FabricRotation(
        period=node.gpu_count,
        orbit_of_link=np.append(
            np.repeat(orbit_ids, np.repeat([orbit_size for _, orbit_size in ranges], orbit_counts)), -1
        ),
        first_link=np.concatenate(
            [link_range.first_id + np.arange(0, link_range.count, orbit_size) for link_range, orbit_size in ranges]
        ),
        multiplicity=np.repeat([node.gpu_count / orbit_size for _, orbit_size in ranges], orbit_counts),
    )


def _is_rotatable(counts: ClosCounts, node: NodeSpec, network: NetworkSpec | None) -> bool:
    """Whether all nodes are full and their GPUs equivalent; direct links are not supported."""
    has_full_nodes = counts.gpus % node.gpu_count == 0 and (
        node.nvlink is None or node.nvlink.gpu_count % node.gpu_count == 0
    )
    if node.host or not has_full_nodes or (node.nvlink and node.nvlink.direct_links):
        return False
    if network is None:
        return True
    has_equal_nics = node.nics_per_node == node.gpu_count and node.gpu_count % network.leaf.switches_per_unit == 0
    return has_equal_nics and counts.spines <= 1 and counts.cores <= 1
