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
from clustersim.hardware.clos_spec import Network, Node
from clustersim.hardware.clos_wiring import Counts, Wiring
from clustersim.hardware.topology import LinkKind


@dataclass(frozen=True, slots=True)
class Turn:
    """A link and its images are one orbit. places: GPUs of a node, and turns until everyone is back.

    orbit: [links + 1] number of each link's orbit, -1 for the last (no link); first: [orbits] the first link of each;
    copies: [orbits] how often a flow and its images cross each link of the orbit if the flow crosses one of them.
    """

    places: int
    orbit: IntArray
    first: IntArray
    copies: FloatArray


@runtime_checkable
class Turning(Protocol):
    """A fabric that knows how GPUs can change places."""

    @property
    def turn(self) -> Turn | None:
        """None where they cannot."""


def turn_of(counts: Counts, node: Node, network: Network | None, wiring: Wiring) -> Turn | None:
    """The turn of a Clos fabric; None where a node's GPUs have no equal ways out, or hashing tells routes apart."""
    if not _turns(counts, node, network):
        return None
    widths = {LinkKind.LEAF: network.leaf.switches if network else 1, LinkKind.SPINE: 1}
    runs = [(run, widths.get(run.kind, node.gpus)) for run in wiring.runs()]
    sizes = [run.count // width for run, width in runs]
    numbers = np.arange(sum(sizes), dtype=np.int64)
    return Turn(
        places=node.gpus,
        orbit=np.append(np.repeat(numbers, np.repeat([width for _, width in runs], sizes)), -1),
        first=np.concatenate([run.first + np.arange(0, run.count, width) for run, width in runs]),
        copies=np.repeat([node.gpus / width for _, width in runs], sizes),
    )


def _turns(counts: Counts, node: Node, network: Network | None) -> bool:
    """Whether the GPUs of every node are whole in number, and alike; with links of pairs they are not looked at."""
    whole = counts.gpus % node.gpus == 0 and (node.nvlink is None or node.nvlink.gpus % node.gpus == 0)
    if node.host or not whole or (node.nvlink and node.nvlink.pairs):
        return False
    if network is None:
        return True
    own = node.nics_per_node == node.gpus and node.gpus % network.leaf.switches == 0
    return own and counts.spines <= 1 and counts.cores <= 1
