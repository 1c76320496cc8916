"""How does data travel if the network's switches add and copy?

SHARP in InfiniBand switches: the head of each rail sends its k-th of the domain's sum once and receives the sum of all
domains once, where a ring or a tree moves both twice. The switches form a tree over the leaves: each leaf sends one sum
up and receives one, whatever it has below, so the flows are written between neighbouring domains, which load ports
and uplinks alike. Inside a domain, NVLink's switches add (`NvlsSharp`: NCCL's NVLS with CollNet), every member sends
each head its part (`CollNetDirect`, on an NVLink switch), or chains lead to the heads (`CollNetChain`).

Assumption: the switches add as fast as their ports carry; not checked against measurements.
Reference: Graham et al., "Scalable Hierarchical Aggregation and Reduction Protocol (SHARP)", COMHPC 2016;
NVIDIA/nccl@5067397c, src/graph/tuning.cc, src/transport/coll_net.cc.
"""

from dataclasses import dataclass
from typing import Final

import numpy as np

from clustersim.collectives.double_binary_tree import both_ways
from clustersim.collectives.nvls import inside
from clustersim.collectives.phase import Arrangement, Flows, Phase, Rounds, phase
from clustersim.collectives.tree import chains
from clustersim.common.arrays import IntArray
from clustersim.program.task import CollectiveType

MOST_DIRECT: Final = 9  # NCCL_MAX_DIRECT_ARITY and the head itself (src/enqueue.cc, updateCollCostTable)
COLLNET: Final = frozenset({"collnet_chain", "collnet_direct", "collnet_nvls"})
"""The names of these algorithms in libraries."""


@dataclass(frozen=True, slots=True)
class NvlsSharp:
    """All-reduce in NVLink's switches and in the network's."""

    def phases(self, kind: CollectiveType, arrangement: Arrangement) -> tuple[Phase, ...]:
        """One phase; several domains of at least two members, each under one NVLink switch."""
        able = arrangement.spans > 1 and arrangement.rails > 1 and arrangement.switched
        if kind is not CollectiveType.ALL_REDUCE or not able:
            return ()
        return (phase(*inside(arrangement), _between(arrangement), rounds=Rounds(local=1, network=1)),)


@dataclass(frozen=True, slots=True)
class CollNetDirect:
    """All-reduce straight to the heads and in the network's switches."""

    def phases(self, kind: CollectiveType, arrangement: Arrangement) -> tuple[Phase, ...]:
        """One phase; several domains of two to nine members, each under one NVLink switch."""
        able = arrangement.spans > 1 and arrangement.switched and 1 < max(arrangement.per_domain) <= MOST_DIRECT
        if kind is not CollectiveType.ALL_REDUCE or not able:
            return ()
        parts = [flows for domain in arrangement.domains for flows in _to_heads(domain, arrangement.rails)]
        return (phase(*parts, _between(arrangement), rounds=Rounds(local=2, network=1)),)


@dataclass(frozen=True, slots=True)
class CollNetChain:
    """All-reduce along chains inside domains and in the network's switches."""

    def phases(self, kind: CollectiveType, arrangement: Arrangement) -> tuple[Phase, ...]:
        """One phase; several domains of at most nine members."""
        longest = max(arrangement.per_domain) - 1
        if kind is not CollectiveType.ALL_REDUCE or arrangement.spans == 1 or longest >= MOST_DIRECT:
            return ()
        parts = [flows for domain in arrangement.domains for flows in chains(domain, up=True, down=True)]
        rounds = Rounds(local=2 * longest, network=1)
        return (phase(*parts, _between(arrangement), rounds=rounds, stages=float(longest)),)


def _to_heads(domains: IntArray, rails: int) -> list[Flows]:
    """Each member's part of the payload to every head of domains [groups, domains, members], and its sum back."""
    heads, local = domains[:, :, :rails], domains.shape[2]
    ends = np.broadcast_arrays(domains[:, :, :, None], heads[:, :, None, :])
    members, own = (end.reshape(*domains.shape[:2], -1) for end in ends)
    others = np.arange(local)[:, None] != np.arange(rails)
    members, own = members[:, :, others.reshape(-1)], own[:, :, others.reshape(-1)]
    return both_ways(members, own, 1 / rails, up=True, down=True) if members.size else []


def _between(arrangement: Arrangement) -> Flows:
    """A rail's part of the payload, out of each head and into each."""
    heads = arrangement.heads
    return Flows(heads, np.roll(heads, -1, axis=1), 1 / arrangement.rails)
