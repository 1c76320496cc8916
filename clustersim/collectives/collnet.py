"""How does data travel if the network's switches reduce and multicast?

SHARP in InfiniBand switches: the head of each of the k rails sends its k-th of the domain's sum once and
receives the sum of all domains once, where a ring or a tree moves both twice. The switches form a tree over
the leaves: each leaf sends one sum up and receives one, whatever is below it, so the flows are written
between neighbouring domains, which load ports and uplinks equally. Inside a domain, NVLink's switches reduce
(`CollNetNvlsAlgorithm`: NCCL's NVLS with CollNet), every member sends each head its share
(`CollNetDirectAlgorithm`, on an NVLink switch), or chains lead to the heads (`CollNetChainAlgorithm`).

Assumption: the switches reduce at line rate; not checked against measurements.
Reference: Graham et al., "Scalable Hierarchical Aggregation and Reduction Protocol (SHARP)", COMHPC 2016;
NVIDIA/nccl@5067397c, src/graph/tuning.cc, src/transport/coll_net.cc.
"""

from dataclasses import dataclass
from typing import Final

import numpy as np

from clustersim.collectives.double_binary_tree import up_down_flows
from clustersim.collectives.nvls import nvls_port_flows
from clustersim.collectives.phase import Flows, GroupTopology, LatencySteps, Phase, build_phase
from clustersim.collectives.tree import chain_flows
from clustersim.common.arrays import IntArray
from clustersim.program.task import CollectiveType

MAX_DIRECT_ARITY: Final = 9  # NCCL_MAX_DIRECT_ARITY and the head itself (src/enqueue.cc, updateCollCostTable)
COLLNET_ALGORITHMS: Final = frozenset({"collnet_chain", "collnet_direct", "collnet_nvls"})
"""Names of the CollNet algorithms in library files."""


@dataclass(frozen=True, slots=True)
class CollNetNvlsAlgorithm:
    """All-reduce in NVLink switches (NVLS) and in network switches (SHARP)."""

    def phases(self, collective: CollectiveType, topology: GroupTopology) -> tuple[Phase, ...]:
        """One phase; several domains of at least two members, each under one NVLink switch."""
        is_supported = topology.domain_count > 1 and topology.rails > 1 and topology.is_switched
        if collective is not CollectiveType.ALL_REDUCE or not is_supported:
            return ()
        return (
            build_phase(
                *nvls_port_flows(topology),
                _inter_domain_flows(topology),
                latency_steps=LatencySteps(local=1, network=1),
            ),
        )


@dataclass(frozen=True, slots=True)
class CollNetDirectAlgorithm:
    """All-reduce directly between members and heads, and in network switches (SHARP)."""

    def phases(self, collective: CollectiveType, topology: GroupTopology) -> tuple[Phase, ...]:
        """One phase; several domains of two to nine members, each under one NVLink switch."""
        is_supported = (
            topology.domain_count > 1 and topology.is_switched and 1 < max(topology.domain_sizes) <= MAX_DIRECT_ARITY
        )
        if collective is not CollectiveType.ALL_REDUCE or not is_supported:
            return ()
        head_flows = [
            flows for domains in topology.domains_by_size for flows in _member_head_flows(domains, topology.rails)
        ]
        return (
            build_phase(*head_flows, _inter_domain_flows(topology), latency_steps=LatencySteps(local=2, network=1)),
        )


@dataclass(frozen=True, slots=True)
class CollNetChainAlgorithm:
    """All-reduce along chains inside domains, and in network switches (SHARP)."""

    def phases(self, collective: CollectiveType, topology: GroupTopology) -> tuple[Phase, ...]:
        """One phase; several domains of at most nine members."""
        longest_chain = max(topology.domain_sizes) - 1
        if (
            collective is not CollectiveType.ALL_REDUCE
            or topology.domain_count == 1
            or longest_chain >= MAX_DIRECT_ARITY
        ):
            return ()
        chain_flow_list = [
            flows for domains in topology.domains_by_size for flows in chain_flows(domains, up=True, down=True)
        ]
        latency_steps = LatencySteps(local=2 * longest_chain, network=1)
        return (
            build_phase(
                *chain_flow_list,
                _inter_domain_flows(topology),
                latency_steps=latency_steps,
                fill_stages=float(longest_chain),
            ),
        )


def _member_head_flows(domains: IntArray, rails: int) -> list[Flows]:
    """Flows of each member's share to every head of domains [groups, domains, members], and of its sum back."""
    heads, local = domains[:, :, :rails], domains.shape[2]
    ends = np.broadcast_arrays(domains[:, :, :, None], heads[:, :, None, :])
    members, targets = (gpus.reshape(*domains.shape[:2], -1) for gpus in ends)
    is_other = np.arange(local)[:, None] != np.arange(rails)
    members, targets = members[:, :, is_other.reshape(-1)], targets[:, :, is_other.reshape(-1)]
    return up_down_flows(members, targets, 1 / rails, up=True, down=True) if members.size else []


def _inter_domain_flows(topology: GroupTopology) -> Flows:
    """Flows of each rail's share, out of and into each head."""
    heads = topology.heads
    return Flows(heads, np.roll(heads, -1, axis=1), 1 / topology.rails)
