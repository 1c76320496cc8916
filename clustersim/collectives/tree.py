"""How does data travel up and down a tree?

Double binary trees over the domains (see `double_binary_tree`): latency grows with the logarithm of their
number. Each of k rails has its own pair of trees with 1/k of the payload; inside a domain a chain leads to
the member that owns the rail. Chains of a domain of m members begin at different ones: (m-1)/m of the payload
passes each pair of neighbours.

All-reduce goes up and down at the same time, chunk by chunk; broadcast only down, reduce only up.
"""

from dataclasses import dataclass
from typing import Final

import numpy as np

from clustersim.collectives.double_binary_tree import (
    tree_depth,
    tree_fill_stages,
    tree_flows,
    tree_site_crossings,
    up_down_flows,
)
from clustersim.collectives.phase import Flows, GroupTopology, LatencySteps, Phase, build_phase
from clustersim.common.arrays import IntArray
from clustersim.program.task import CollectiveType

_UP_COLLECTIVES: Final = (CollectiveType.ALL_REDUCE, CollectiveType.REDUCE)
_DOWN_COLLECTIVES: Final = (CollectiveType.ALL_REDUCE, CollectiveType.BROADCAST)


@dataclass(frozen=True, slots=True)
class TreeAlgorithm:
    """Double binary trees between domains, chains inside."""

    def phases(self, collective: CollectiveType, topology: GroupTopology) -> tuple[Phase, ...]:
        """One phase: chains and trees are pipelined into each other."""
        up, down = collective in _UP_COLLECTIVES, collective in _DOWN_COLLECTIVES
        if not (up or down):
            return ()
        domain_count, longest_chain, directions = topology.domain_count, max(topology.domain_sizes) - 1, up + down
        flow_list = [flows for domains in topology.domains_by_size for flows in chain_flows(domains, up=up, down=down)]
        flow_list += tree_flows(topology.heads, up=up, down=down) if domain_count > 1 else []
        latency_steps = LatencySteps(
            local=directions * longest_chain,
            network=directions * tree_depth(domain_count),
            sites=directions * tree_site_crossings(topology.domain_sites),
        )
        stages = tree_fill_stages(domain_count) if domain_count > 1 else float(longest_chain)
        return (build_phase(*flow_list, latency_steps=latency_steps, fill_stages=stages),)


def chain_flows(domains: IntArray, *, up: bool, down: bool) -> list[Flows]:
    """Chain flows inside domains [groups, domains, members]."""
    domain_size = domains.shape[2]
    successors = np.roll(domains, -1, axis=2)
    return (
        up_down_flows(domains, successors, (domain_size - 1) / domain_size, up=up, down=down) if domain_size > 1 else []
    )
