"""How does data travel if the network's switches add and copy?

SHARP in InfiniBand switches: the head of each rail sends its k-th of the domain's sum once and receives the sum of all
domains once, where a ring or a tree moves both twice. The switches form a tree over the leaves: each leaf sends one sum
up and receives one, whatever it has below, so the flows are written between neighbouring domains, which load ports
and uplinks alike. Inside a domain, NVLink's switches add (`NvlsSharp`: NCCL's NVLS with CollNet) or chains lead to the
heads (`CollNetChain`).

Assumption: the switches add as fast as their ports carry. Reference: Graham et al., "Scalable Hierarchical Aggregation
and Reduction Protocol (SHARP)", COMHPC 2016; NVIDIA/nccl@5067397c, src/graph/tuning.cc, src/transport/coll_net.cc.
"""

from dataclasses import dataclass

import numpy as np

from clustersim.collectives.in_network import inside
from clustersim.collectives.phase import Arrangement, Flows, Phase, Rounds, phase
from clustersim.collectives.tree import chains
from clustersim.program.task import Collective


@dataclass(frozen=True, slots=True)
class NvlsSharp:
    """All-reduce in NVLink's switches and in the network's."""

    def phases(self, kind: Collective, arrangement: Arrangement) -> tuple[Phase, ...]:
        """One phase; several domains of at least two members, each under one NVLink switch."""
        able = arrangement.spans > 1 and arrangement.rails > 1 and arrangement.switched
        if kind is not Collective.ALL_REDUCE or not able:
            return ()
        return (phase(*inside(arrangement), _between(arrangement), rounds=Rounds(local=1, network=1)),)


@dataclass(frozen=True, slots=True)
class CollNetChain:
    """All-reduce along chains inside domains and in the network's switches."""

    def phases(self, kind: Collective, arrangement: Arrangement) -> tuple[Phase, ...]:
        """One phase; several domains."""
        if kind is not Collective.ALL_REDUCE or arrangement.spans == 1:
            return ()
        longest = max(arrangement.per_domain) - 1
        parts = [flows for each in arrangement.domains for flows in chains(each, up=True, down=True)]
        rounds = Rounds(local=2 * longest, network=1)
        return (phase(*parts, _between(arrangement), rounds=rounds, stages=float(longest)),)


def _between(arrangement: Arrangement) -> Flows:
    """A rail's part of the payload, out of each head and into each."""
    heads = arrangement.heads
    return Flows(heads, np.roll(heads, -1, axis=1), 1 / arrangement.rails)
