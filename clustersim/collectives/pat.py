"""How is data gathered in a logarithmic number of steps (PAT)?

Parallel aggregated trees (PAT): a block reaches the rank at distance d by hops of decreasing powers of two,
the lowest set bit of d last. Every rank receives each block once, and the shorter a hop is the more blocks
use it: half of all blocks go over distance one, a single block over the longest distance. Reduce-scatter is
the mirror image. Only groups with one member per domain are supported, as in NCCL.

Reference: Jeaugey, "PAT: a new algorithm for all-gather and reduce-scatter operations at scale",
arXiv:2506.20252; NCCL 2.23.
"""

from dataclasses import dataclass
from typing import Final

import numpy as np

from clustersim.collectives.phase import Flows, GroupTopology, LatencySteps, Phase, build_phase
from clustersim.program.task import CollectiveType

_COLLECTIVES: Final = (CollectiveType.ALL_GATHER, CollectiveType.REDUCE_SCATTER)


@dataclass(frozen=True, slots=True)
class PatAlgorithm:
    """PAT; every block is also posted once, so a latency remains that grows with the number of ranks."""

    def phases(self, collective: CollectiveType, topology: GroupTopology) -> tuple[Phase, ...]:
        """One phase."""
        members, size = topology.members, topology.size
        if collective not in _COLLECTIVES or topology.domain_count != size:
            return ()
        offsets = np.arange(1, size)
        hops, counts = np.unique(offsets & -offsets, return_counts=True)
        direction = -1 if collective is CollectiveType.ALL_GATHER else 1
        flow_list = [
            Flows(members, np.roll(members, direction * int(hop), axis=1), count / size)
            for hop, count in zip(hops, counts, strict=True)
        ]
        return (build_phase(*flow_list, latency_steps=LatencySteps(network=len(hops), posts=size)),)
