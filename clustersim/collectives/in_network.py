"""How does data travel if the switches add and copy?

NVLink SHARP: a rank loads its n-th of the sum from the switch, which reads that part from all n members and adds
(each port out carries the whole payload, each port in its n-th), and stores it to all members through the switch (out
its n-th, in the whole payload): (n+1)/n of the payload per port and direction. The flows are written between
neighbours, because only ports are loaded. Between domains the sums of each rail travel over double binary trees
(NCCL's NVLSTree), pipelined with the work inside.

Reference: NCCL 2.17 (NVLS), 2.18 (NVLSTree); Klenk et al., "An in-network architecture for accelerating shared-memory
multiprocessor collectives", ISCA 2020.
"""

from dataclasses import dataclass

import numpy as np

from clustersim.collectives.double_tree import depth, tree_flows, tree_stages
from clustersim.collectives.phase import Arrangement, Flows, Phase, Rounds, phase
from clustersim.program.task import Collective


@dataclass(frozen=True, slots=True)
class InNetwork:
    """All-reduce in the NVLink switches of one domain, or of several joined by trees."""

    def phases(self, kind: Collective, arrangement: Arrangement) -> tuple[Phase, ...]:
        """One phase; a domain needs at least two members."""
        members = arrangement.members
        domains, local = members.shape[1:]
        if kind is not Collective.ALL_REDUCE or local < 2 or not arrangement.switched:
            return ()
        inside = Flows(members, np.roll(members, -1, axis=2), (local + 1) / local)
        if domains == 1:
            return (phase(inside, rounds=Rounds(local=1)),)
        rounds = Rounds(local=1, network=2 * depth(domains))
        trees = tree_flows(members, up=True, down=True)
        return (phase(inside, *trees, rounds=rounds, stages=tree_stages(domains)),)
