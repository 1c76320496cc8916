"""How does data travel if the switches add and copy?

NVLink SHARP: a rank loads its n-th of the sum from the switch, which reads that part from all n members and adds
(each port out carries the whole payload, each port in its n-th), and stores it to all members through the switch (out
its n-th, in the whole payload): (n+1)/n of the payload per port and direction. The flows are written between
neighbours, because only ports are loaded. Between domains the sums of each rail travel over double binary trees
(NCCL's NVLSTree), pipelined with the work inside; where domains hold different numbers of members, only the heads of
the k rails load and store, a k-th each.

Reference: NCCL 2.17 (NVLS), 2.18 (NVLSTree); Klenk et al., "An in-network architecture for accelerating shared-memory
multiprocessor collectives", ISCA 2020.
"""

from dataclasses import dataclass

import numpy as np

from clustersim.collectives.double_binary_tree import depth, tree_flows, tree_stages
from clustersim.collectives.phase import Arrangement, Flows, Phase, Rounds, phase
from clustersim.common.arrays import IntArray
from clustersim.program.task import CollectiveType


@dataclass(frozen=True, slots=True)
class InNetwork:
    """All-reduce in the NVLink switches of one domain, or of several joined by trees."""

    def phases(self, kind: CollectiveType, arrangement: Arrangement) -> tuple[Phase, ...]:
        """One phase; a domain needs at least two members."""
        spans, heads = arrangement.spans, arrangement.heads
        if kind is not CollectiveType.ALL_REDUCE or arrangement.rails < 2 or not arrangement.switched:
            return ()
        ports = inside(arrangement)
        if spans == 1:
            return (phase(*ports, rounds=Rounds(local=1), stages=2.0),)  # a chunk is stored once it was loaded
        rounds = Rounds(local=1, network=2 * depth(spans))
        trees = tree_flows(heads, up=True, down=True)
        return (phase(*ports, *trees, rounds=rounds, stages=tree_stages(spans)),)


def inside(arrangement: Arrangement) -> list[Flows]:
    """What loads ports: of heads what they load and store, of all members what is read from and stored to them."""
    heads, rails = arrangement.heads, arrangement.rails
    if len(set(arrangement.per_domain)) == 1:
        return [_between_neighbours(heads, (rails + 1) / rails)]
    return [
        _between_neighbours(heads, 1 / rails),
        *(_between_neighbours(domain, 1.0) for domain in arrangement.domains),
    ]


def _between_neighbours(members: IntArray, share: float) -> Flows:
    return Flows(members, np.roll(members, -1, axis=2), share)
