"""How does data travel directly between all pairs of ranks?

Send/recv is one flow, or one from each sender to each receiver, all at once: a tensor on the ranks of one mesh goes to
those of another (cross-mesh resharding, Zhuang et al. 2023, arXiv:2211.05322). A shift sends to the next member and
receives from the previous one, n - 1 times, so that every share goes round the ring; the slowest hop limits each step.
All-to-all sends an n-th of the payload to every other member, all at once.
In very large groups an evenly spread sample of distances represents all of them (their shares are scaled up),
because the flows of one distance load a regular fabric like those of similar distances.
"""

from dataclasses import dataclass
from typing import Final

import numpy as np

from clustersim.collectives.phase import Flows, GroupTopology, LatencySteps, Phase, build_phase
from clustersim.common.arrays import IntArray
from clustersim.program.task import CollectiveType

_MAX_FLOWS: Final = 2**20  # sample distances rather than list more flows than this ...
_MIN_DISTANCES: Final = 127  # ... but never fewer distances than these; a prime has no common stride with domains


@dataclass(frozen=True, slots=True)
class PairwiseAlgorithm:
    """Direct flows between pairs."""

    def phases(self, collective: CollectiveType, topology: GroupTopology) -> tuple[Phase, ...]:
        """One phase for send/recv, shift and all-to-all."""
        if collective is CollectiveType.SEND_RECV:
            return (_send_recv_phase(topology),)
        if collective is CollectiveType.SHIFT:
            return (_shift_phase(topology),)
        if collective is CollectiveType.ALL_TO_ALL:
            return (_all_to_all_phase(topology),)
        return ()


def _send_recv_phase(topology: GroupTopology) -> Phase:
    """From each sender to each receiver; the first message's time is a step, the others are posted behind it."""
    senders, receivers = topology.senders_and_receivers
    shape = len(senders), senders.shape[1], receivers.shape[1]
    sources, targets = np.broadcast_to(senders[:, :, None], shape), np.broadcast_to(receivers[:, None, :], shape)
    crosses_domains = int(topology.domain_count > 1)
    posts = crosses_domains * (receivers.shape[1] - 1)
    return build_phase(
        Flows(sources, targets, 1.0 / (shape[1] * shape[2]), is_p2p=True),
        latency_steps=LatencySteps(local=1 - crosses_domains, network=crosses_domains, posts=posts),
    )


def _shift_phase(topology: GroupTopology) -> Phase:
    """From each member to the next, one share at a time."""
    members, hops = topology.members, topology.size - 1
    network_steps = hops if topology.domain_count > 1 else 0
    ring_flow = Flows(members, np.roll(members, -1, axis=1), hops / topology.size, is_p2p=True)
    site_steps = np.minimum(topology.ring_site_crossings, network_steps)
    latency_steps = LatencySteps(local=hops - network_steps, network=network_steps, sites=site_steps)
    return build_phase(ring_flow, latency_steps=latency_steps)


def _all_to_all_phase(topology: GroupTopology) -> Phase:
    """From every member to every other; messages to other domains are posted back to back."""
    members, size = topology.members, topology.size
    distances = _sample_distances(size, max(_MIN_DISTANCES, _MAX_FLOWS // members.size))
    share = (size - 1) / size / len(distances)
    targets = np.stack([np.roll(members, -int(distance), axis=1) for distance in distances], axis=2)
    sources = np.broadcast_to(members[:, :, None], targets.shape)
    crosses_domains = int(topology.domain_count > 1)
    posts = crosses_domains * (size - size // topology.domain_count)
    return build_phase(
        Flows(sources, targets, share, is_p2p=True),
        latency_steps=LatencySteps(local=1 - crosses_domains, network=crosses_domains, posts=posts),
    )


def _sample_distances(size: int, count: int) -> IntArray:
    """Distances 1 ... size-1, or `count` evenly spread ones among them."""
    if size - 1 <= count:
        return np.arange(1, size)
    return 1 + (np.arange(count) * (size - 1) + (size - 1) // 2) // count
