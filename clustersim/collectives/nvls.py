"""How does data travel if NVLink switches reduce and multicast (NVLS)?

NVLink SHARP: a rank loads its n-th of the sum from the switch, which reads that share from all n members and
reduces (each port carries the full payload out and an n-th in), and stores it to all members through the
switch (an n-th out, the full payload in): (n+1)/n of the payload per port and direction. The flows are
written between neighbours, because only ports are loaded. Between domains the sums of each rail travel over
double binary trees (NCCL's NVLSTree), pipelined with the work inside; where domain sizes differ, only the
heads of the k rails load and store, a k-th each.

Reference: NCCL 2.17 (NVLS), 2.18 (NVLSTree); Klenk et al., "An in-network architecture for accelerating
shared-memory multiprocessor collectives", ISCA 2020.
"""

from dataclasses import dataclass

import numpy as np

from clustersim.collectives.double_binary_tree import tree_depth, tree_fill_stages, tree_flows, tree_site_crossings
from clustersim.collectives.phase import Flows, GroupTopology, LatencySteps, Phase, build_phase
from clustersim.common.arrays import IntArray
from clustersim.program.task import CollectiveType


@dataclass(frozen=True, slots=True)
class NvlsAlgorithm:
    """All-reduce in the NVLink switches of one domain (NVLS), or of several joined by trees (NVLSTree)."""

    def phases(self, collective: CollectiveType, topology: GroupTopology) -> tuple[Phase, ...]:
        """One phase; a domain needs at least two members."""
        domain_count, heads = topology.domain_count, topology.heads
        if collective is not CollectiveType.ALL_REDUCE or topology.rails < 2 or not topology.is_switched:
            return ()
        ports = nvls_port_flows(topology)
        if domain_count == 1:
            return (
                build_phase(*ports, latency_steps=LatencySteps(local=1), fill_stages=2.0),
            )  # a chunk is stored after it has been loaded
        latency_steps = LatencySteps(
            local=1,
            network=2 * tree_depth(domain_count),
            sites=2 * tree_site_crossings(topology.domain_sites),
        )
        trees = tree_flows(heads, up=True, down=True)
        return (build_phase(*ports, *trees, latency_steps=latency_steps, fill_stages=tree_fill_stages(domain_count)),)


def nvls_port_flows(topology: GroupTopology) -> list[Flows]:
    """Port loads inside domains: loads and stores of the heads, reads from and stores to all members."""
    heads, rails = topology.heads, topology.rails
    if len(set(topology.domain_sizes)) == 1:
        return [_neighbour_flows(heads, (rails + 1) / rails)]
    return [
        _neighbour_flows(heads, 1 / rails),
        *(_neighbour_flows(domains, 1.0) for domains in topology.domains_by_size),
    ]


def _neighbour_flows(members: IntArray, share: float) -> Flows:
    return Flows(members, np.roll(members, -1, axis=2), share)
