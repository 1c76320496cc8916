"""How does data travel if each level of the machine is a separate phase (two-level collectives)?

Inside the domain first, then between domains, then inside again. All-reduce: ring reduce-scatter inside, ring
all-reduce of each rail's share between domains, ring all-gather inside. All-gather and reduce-scatter: one
ring phase per level. All-to-all: each member redistributes to its rail's peers inside the domain, then the
rails exchange. Broadcast: over the root's rail, then inside.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final

import numpy as np

from clustersim.collectives.phase import Flows, GroupTopology, LatencySteps, Phase, build_phase
from clustersim.common.arrays import IntArray
from clustersim.program.task import CollectiveType


@dataclass(frozen=True, slots=True)
class HierarchicalAlgorithm:
    """Two levels in sequence; needs several domains of several members."""

    def phases(self, collective: CollectiveType, topology: GroupTopology) -> tuple[Phase, ...]:
        """Two or three phases; domains need equally many members."""
        is_uneven = len(set(topology.domain_sizes)) > 1
        if topology.domain_count < 2 or topology.rails < 2 or is_uneven:
            return ()
        build_phases = _PHASES_BY_COLLECTIVE.get(collective)
        return build_phases(topology) if build_phases else ()


def _intra_domain_ring(members: IntArray) -> Phase:
    """A ring all-gather or reduce-scatter of the full payload in each domain."""
    domain_size = members.shape[2]
    ring = Flows(members, np.roll(members, -1, axis=2), (domain_size - 1) / domain_size)
    return build_phase(ring, latency_steps=LatencySteps(local=domain_size - 1))


def _inter_domain_ring(topology: GroupTopology, passes: int) -> Phase:
    """A ring over the domains on each rail, with the rail's share of the payload; all-reduce makes two passes."""
    members = topology.heads
    domains, domain_size = members.shape[1:]
    share, steps = passes * (domains - 1) / domains / domain_size, passes * (domains - 1)
    site_steps = np.minimum(passes * topology.ring_site_crossings, steps)
    return build_phase(
        Flows(members, np.roll(members, -1, axis=1), share),
        latency_steps=LatencySteps(network=steps, sites=site_steps),
    )


def _all_to_all_along(members: IntArray, axis: int) -> Phase:
    """All-to-all along one axis of members [groups, domains, k]: every pair exchanges an equal share of the payload."""
    size = members.shape[axis]
    flow_list = [
        Flows(members, np.roll(members, -offset, axis=axis), 1 / size, is_p2p=True) for offset in range(1, size)
    ]
    latency_steps = LatencySteps(local=1) if axis == 2 else LatencySteps(network=1, posts=size - 1)
    return build_phase(*flow_list, latency_steps=latency_steps)


def _broadcast_phases(topology: GroupTopology) -> tuple[Phase, ...]:
    """The root scatters inside its domain, rails forward the shares in a chain, domains all-gather."""
    members = topology.heads
    domains, domain_size = members.shape[1:]
    chain_steps = LatencySteps(network=domains - 1, sites=np.minimum(topology.ring_site_crossings, domains - 1))
    root = np.repeat(members[:, :1, :1], domain_size - 1, axis=2)
    scatter = build_phase(
        Flows(root, members[:, :1, 1:], 1 / domain_size, is_p2p=True), latency_steps=LatencySteps(local=1)
    )
    chain = Flows(members[:, :-1], members[:, 1:], 1 / domain_size)
    return (
        scatter,
        build_phase(chain, latency_steps=chain_steps, fill_stages=max(domains - 2, 0)),
        _intra_domain_ring(members),
    )


_PHASES_BY_COLLECTIVE: Final[Mapping[CollectiveType, Callable[[GroupTopology], tuple[Phase, ...]]]] = {
    CollectiveType.ALL_REDUCE: lambda topology: (
        _intra_domain_ring(topology.heads),
        _inter_domain_ring(topology, 2),
        _intra_domain_ring(topology.heads),
    ),
    CollectiveType.ALL_GATHER: lambda topology: (_inter_domain_ring(topology, 1), _intra_domain_ring(topology.heads)),
    CollectiveType.REDUCE_SCATTER: lambda topology: (
        _intra_domain_ring(topology.heads),
        _inter_domain_ring(topology, 1),
    ),
    CollectiveType.ALL_TO_ALL: lambda topology: (
        _all_to_all_along(topology.heads, axis=2),
        _all_to_all_along(topology.heads, axis=1),
    ),
    CollectiveType.BROADCAST: _broadcast_phases,
}
