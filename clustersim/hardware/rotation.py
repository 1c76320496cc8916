"""Which GPUs of a regular machine can change places?

Let every GPU take the place of the next one in its node, the last that of the first, in all nodes at once. Where GPUs
of a node have equal ways out, this turn changes nothing but the numbers of GPUs and links: the route between two GPUs
becomes the route between those whose places they took. So flows that the turn maps to each other need one route for
all, as long as each link carries what its images carry.
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
    """A link and its images are one orbit. places: GPUs of a node, and turns until everyone is back.

    orbit: [links + 1] number of each link's orbit, -1 for the last (no link); first: [orbits] the first link of each;
    copies: [orbits] how often a flow and its images cross each link of the orbit if the flow crosses one of them.
    """

    period: int
    orbit_of_link: IntArray
    first_link: IntArray
    multiplicity: FloatArray


@runtime_checkable
class HasRotation(Protocol):
    """A fabric that knows how GPUs can change places."""

    @property
    def rotation(self) -> FabricRotation | None:
        """None where they cannot."""


def find_rotation(
    counts: ClosCounts, node: NodeSpec, network: NetworkSpec | None, wiring: ClosWiring
) -> FabricRotation | None:
    """The turn of a Clos fabric; None where a node's GPUs have no equal ways out, or hashing tells routes apart."""
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
    """Whether the GPUs of every node are whole in number, and alike; with links of pairs they are not looked at."""
    has_full_nodes = counts.gpus % node.gpu_count == 0 and (
        node.nvlink is None or node.nvlink.gpu_count % node.gpu_count == 0
    )
    if node.host or not has_full_nodes or (node.nvlink and node.nvlink.direct_links):
        return False
    if network is None:
        return True
    has_equal_nics = node.nics_per_node == node.gpu_count and node.gpu_count % network.leaf.switches_per_unit == 0
    return has_equal_nics and counts.spines <= 1 and counts.cores <= 1
