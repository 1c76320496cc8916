"""How does data travel round a ring?

Each rank sends only to its successor. An all-gather forwards every rank's shard n-1 times, a reduce-scatter
likewise with a reduction at each hop, an all-reduce is both. Broadcast and reduce are pipelined along the
rings cut open at the root.

All rings pass through all members. A group whose domains (NVLink domains or nodes, see `phase`) have k
members each has k rings, NCCL's channels, each with 1/k of the payload and leaving a domain by a different
member, so that every NIC is used. Domains are traversed in alternating direction (out by member j, into the
next domain by member j), so traffic between domains stays on its rail. Where the number of domains is odd,
the hop that closes the ring would change rails; it is modelled on its rail, too. Inside a domain k-1 of the k
rings use each pair of neighbours. Where domain sizes differ, there are as many rings as the smallest domain
has members; a ring traverses a domain of m members in m-1 hops, which are modelled as spread evenly over the
m pairs of neighbours.

Reference: Patarasuk and Yuan, "Bandwidth optimal all-reduce algorithms for clusters of workstations", 2009;
NCCL's rings with NCCL_CROSS_NIC=2.
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
    """One ring per rail: as many as the smallest domain has members."""

    def phases(self, collective: CollectiveType, topology: GroupTopology) -> tuple[Phase, ...]:
        """One phase for all collectives with a ring form."""
        if collective in _RING_PASSES:
            return (_ring_phase(topology, _RING_PASSES[collective]),)
        if collective in _ROOTED_COLLECTIVES:
            return (_chain_phase(topology, collective),)
        return ()


def _ring_phase(topology: GroupTopology, passes: int) -> Phase:
    """All-gather or reduce-scatter (one pass), or both in sequence (all-reduce)."""
    size = topology.size
    network_steps = passes * (topology.domain_count - 1)
    latency_steps = LatencySteps(
        local=passes * (size - 1) - network_steps,
        network=network_steps,
        sites=np.minimum(passes * topology.ring_site_crossings, network_steps),
    )
    return build_phase(*ring_flows(topology, passes * (size - 1) / size), latency_steps=latency_steps)


def ring_flows(topology: GroupTopology, share: float) -> list[Flows]:
    """Flows of all rings; share: what each member sends in total, in payloads (more than 1 for an all-reduce)."""
    if topology.domain_count == 1:
        members = topology.heads  # [groups, 1, size]: all members
        return [Flows(members, np.roll(members, -1, axis=2), share)]
    inside = [_intra_domain_flows(domains, share) for domains in topology.domains_by_size if domains.shape[2] > 1]
    heads = topology.heads
    return [*inside, Flows(heads, np.roll(heads, -1, axis=1), share / topology.rails)]


def _intra_domain_flows(domains: IntArray, share: float) -> Flows:
    """What all rings together move between neighbours inside domains [groups, domains, members]."""
    domain_count, domain_size = domains.shape[1:]
    is_forward = (np.arange(domain_count) % 2 == 0)[None, :, None]
    successors = np.where(is_forward, np.roll(domains, -1, axis=2), np.roll(domains, 1, axis=2))
    return Flows(domains, successors, share * (domain_size - 1) / domain_size)


def _chain_phase(topology: GroupTopology, collective: CollectiveType) -> Phase:
    """Broadcast or reduce along the rings cut open at the root."""
    network_steps = topology.domain_count - 1
    latency_steps = LatencySteps(
        local=topology.size - 1 - network_steps,
        network=network_steps,
        sites=np.minimum(topology.ring_site_crossings, network_steps),
    )
    flow_list = _broadcast_chain(topology)
    if collective is CollectiveType.REDUCE:
        flow_list = [Flows(flows.targets, flows.sources, flows.share) for flows in flow_list]
    return build_phase(*flow_list, latency_steps=latency_steps, fill_stages=max(topology.size - 2, 0))


def _broadcast_chain(topology: GroupTopology) -> list[Flows]:
    """From the root through its domain, from domain to domain on all rails, and through each of the other domains."""
    root_domain = topology.members[:, : topology.domain_sizes[0]]
    flow_list = [Flows(root_domain[:, :-1], root_domain[:, 1:], 1.0)] if root_domain.shape[1] > 1 else []
    if topology.domain_count == 1:
        return flow_list
    other_domains, heads = topology.without_root_domain, topology.heads
    flow_list += [
        _intra_domain_flows(domains, 1.0) for domains in other_domains.domains_by_size if domains.shape[2] > 1
    ]
    return [*flow_list, Flows(heads[:, :-1], heads[:, 1:], 1 / topology.rails)]
