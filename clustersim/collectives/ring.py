"""How does data travel round a ring?

Each rank sends only to its neighbour. An all-gather passes every rank's part n-1 times on, a reduce-scatter likewise
with an addition at each hop, an all-reduce is both. Broadcast and reduce are pipelined along the rings cut open at the
root.

Domains of k members are left by k rings, each with 1/k of the payload and by a different member, so that every network
interface is used. Domains are passed in alternating direction (out by member j, into the next domain by member j): all
traffic between domains stays on its rail, but for one hop where the number of domains is odd. Inside a domain k-1 of
the k rings pass each pair of neighbours. Where domains hold different numbers of members, there are as many rings as
the smallest has; a ring passes a domain of m members in m-1 hops, which are taken as spread evenly over the m pairs of
neighbours.

Reference: Patarasuk and Yuan, "Bandwidth optimal all-reduce algorithms for clusters of workstations", 2009; NCCL's
rings with NCCL_CROSS_NIC=2.
"""

from dataclasses import dataclass
from typing import Final

import numpy as np

from clustersim.collectives.phase import Flows, GroupTopology, LatencySteps, Phase, build_phase
from clustersim.common.arrays import IntArray
from clustersim.program.task import CollectiveType

_RING_PASSES: Final = {CollectiveType.ALL_REDUCE: 2, CollectiveType.ALL_GATHER: 1, CollectiveType.REDUCE_SCATTER: 1}
_ROOTED_COLLECTIVES: Final = (CollectiveType.BROADCAST, CollectiveType.REDUCE)


@dataclass(frozen=True, slots=True)
class RingAlgorithm:
    """One ring per member of a domain."""

    def phases(self, collective: CollectiveType, topology: GroupTopology) -> tuple[Phase, ...]:
        """One phase for all collectives with a ring form."""
        if collective in _RING_PASSES:
            return (_ring_phase(topology, _RING_PASSES[collective]),)
        if collective in _ROOTED_COLLECTIVES:
            return (_chain_phase(topology, collective),)
        return ()


def _ring_phase(topology: GroupTopology, passes: int) -> Phase:
    """All-gather or reduce-scatter (one pass), or both one after the other."""
    size = topology.size
    network_steps = passes * (topology.domain_count - 1)
    latency_steps = LatencySteps(local=passes * (size - 1) - network_steps, network=network_steps)
    return build_phase(*ring_flows(topology, passes * (size - 1) / size), latency_steps=latency_steps)


def ring_flows(topology: GroupTopology, share: float) -> list[Flows]:
    """Flows of all rings; `share` of the payload passes each member."""
    if topology.domain_count == 1:
        members = topology.heads
        return [Flows(members, np.roll(members, -1, axis=2), share)]
    domain_rings = [_intra_domain_ring(domains, share) for domains in topology.domains_by_size if domains.shape[2] > 1]
    heads = topology.heads
    return [*domain_rings, Flows(heads, np.roll(heads, -1, axis=1), share / topology.rails)]


def _intra_domain_ring(domains: IntArray, share: float) -> Flows:
    """What passes each pair of neighbours inside domains [groups, domains, members]."""
    domain_count, domain_size = domains.shape[1:]
    is_forward = (np.arange(domain_count) % 2 == 0)[None, :, None]
    successors = np.where(is_forward, np.roll(domains, -1, axis=2), np.roll(domains, 1, axis=2))
    return Flows(domains, successors, share * (domain_size - 1) / domain_size)


def _chain_phase(topology: GroupTopology, collective: CollectiveType) -> Phase:
    """The rings without the hops back to the root."""
    network_steps = topology.domain_count - 1
    latency_steps = LatencySteps(local=topology.size - 1 - network_steps, network=network_steps)
    flow_list = _broadcast_chain(topology)
    if collective is CollectiveType.REDUCE:
        flow_list = [Flows(flows.targets, flows.sources, flows.share) for flows in flow_list]
    return build_phase(*flow_list, latency_steps=latency_steps, fill_stages=max(topology.size - 2, 0))


def _broadcast_chain(topology: GroupTopology) -> list[Flows]:
    """From the root through its domain, on all rails from domain to domain, and through each of these."""
    root_domain = topology.members[:, : topology.domain_sizes[0]]
    flow_list = [Flows(root_domain[:, :-1], root_domain[:, 1:], 1.0)] if root_domain.shape[1] > 1 else []
    if topology.domain_count == 1:
        return flow_list
    other_domains, heads = topology.without_root_domain, topology.heads
    flow_list += [_intra_domain_ring(domains, 1.0) for domains in other_domains.domains_by_size if domains.shape[2] > 1]
    return [*flow_list, Flows(heads[:, :-1], heads[:, 1:], 1 / topology.rails)]
