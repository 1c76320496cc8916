"""How does data travel if the root sends to or receives from every rank directly (linear)?

The root sends the full payload to each other member (broadcast) or receives it from each (reduce): its port
carries n-1 payloads. Scatter and gather move an n-th for each member. This is what `torch.nn.DataParallel`
and naive parameter servers do.
"""

from dataclasses import dataclass

import numpy as np

from clustersim.collectives.phase import Flows, GroupTopology, LatencySteps, Phase, build_phase
from clustersim.program.task import CollectiveType


@dataclass(frozen=True, slots=True)
class LinearAlgorithm:
    """Everything through the root; all-reduce is reduce, then broadcast."""

    def phases(self, collective: CollectiveType, topology: GroupTopology) -> tuple[Phase, ...]:
        """One phase, or two for all-reduce."""
        nth_share = 1 / topology.size
        steps_by_collective = {
            CollectiveType.BROADCAST: ((1.0, True),),
            CollectiveType.REDUCE: ((1.0, False),),
            CollectiveType.SCATTER: ((nth_share, True),),
            CollectiveType.GATHER: ((nth_share, False),),
            CollectiveType.ALL_REDUCE: ((1.0, False), (1.0, True)),
        }
        return tuple(
            _root_phase(topology, share, outward=outward) for share, outward in steps_by_collective.get(collective, ())
        )


def _root_phase(topology: GroupTopology, share: float, *, outward: bool) -> Phase:
    peers = topology.members[:, 1:]
    root = np.broadcast_to(topology.members[:, :1], peers.shape)
    endpoints = (root, peers) if outward else (peers, root)
    crosses_domains = int(topology.domain_count > 1)
    return build_phase(
        Flows(*endpoints, share, is_p2p=True),
        latency_steps=LatencySteps(
            local=1 - crosses_domains, network=crosses_domains, posts=crosses_domains * peers.shape[1]
        ),
    )
