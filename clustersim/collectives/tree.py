"""How does data travel up and down a tree?

Double binary trees over the domains (see `double_tree`): latency grows with the logarithm of their number. Each member
of a domain has its own pair of trees over its rail with 1/k of the payload; inside the domain a chain leads to
the member that holds the rail.

All-reduce goes up and down at the same time, chunk by chunk; broadcast only down, reduce only up.
"""

from dataclasses import dataclass
from typing import Final

import numpy as np

from clustersim.collectives.double_tree import both_ways, depth, tree_flows, tree_stages
from clustersim.collectives.phase import Arrangement, Phase, Rounds, phase
from clustersim.program.task import Collective

_UP: Final = (Collective.ALL_REDUCE, Collective.REDUCE)
_DOWN: Final = (Collective.ALL_REDUCE, Collective.BROADCAST)


@dataclass(frozen=True, slots=True)
class Tree:
    """Double binary trees between domains, chains inside."""

    def phases(self, kind: Collective, arrangement: Arrangement) -> tuple[Phase, ...]:
        """One phase: chains and trees are pipelined into each other."""
        up, down = kind in _UP, kind in _DOWN
        if not (up or down):
            return ()
        members = arrangement.members
        domains, local = members.shape[1:]
        following = np.roll(members, -1, axis=2)  # k chains, each from another member on: k-1 pass each pair
        parts = both_ways(members, following, (local - 1) / local, up=up, down=down) if local > 1 else []
        parts += tree_flows(members, up=up, down=down) if domains > 1 else []
        ways = up + down
        rounds = Rounds(local=ways * (local - 1), network=ways * depth(domains))
        stages = tree_stages(domains) if domains > 1 else float(local - 1)
        return (phase(*parts, rounds=rounds, stages=stages),)
