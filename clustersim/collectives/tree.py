"""How does data travel up and down a tree?

Double binary trees over the domains (see `double_binary_tree`): latency grows with the logarithm of their number. Each of k
rails has its own pair of trees with 1/k of the payload; inside a domain a chain leads to the member that holds the
rail. Chains of a domain of m members begin at different ones: (m-1)/m of the payload passes each pair of neighbours.

All-reduce goes up and down at the same time, chunk by chunk; broadcast only down, reduce only up.
"""

from dataclasses import dataclass
from typing import Final

import numpy as np

from clustersim.collectives.double_binary_tree import both_ways, depth, tree_flows, tree_stages
from clustersim.collectives.phase import Arrangement, Flows, Phase, Rounds, phase
from clustersim.common.arrays import IntArray
from clustersim.program.task import CollectiveType

_UP: Final = (CollectiveType.ALL_REDUCE, CollectiveType.REDUCE)
_DOWN: Final = (CollectiveType.ALL_REDUCE, CollectiveType.BROADCAST)


@dataclass(frozen=True, slots=True)
class Tree:
    """Double binary trees between domains, chains inside."""

    def phases(self, kind: CollectiveType, arrangement: Arrangement) -> tuple[Phase, ...]:
        """One phase: chains and trees are pipelined into each other."""
        up, down = kind in _UP, kind in _DOWN
        if not (up or down):
            return ()
        spans, longest, ways = arrangement.spans, max(arrangement.per_domain) - 1, up + down
        parts = [flows for domain in arrangement.domains for flows in chains(domain, up=up, down=down)]
        parts += tree_flows(arrangement.heads, up=up, down=down) if spans > 1 else []
        rounds = Rounds(local=ways * longest, network=ways * depth(spans))
        stages = tree_stages(spans) if spans > 1 else float(longest)
        return (phase(*parts, rounds=rounds, stages=stages),)


def chains(domains: IntArray, *, up: bool, down: bool) -> list[Flows]:
    """Flows inside domains [groups, domains, members]."""
    local = domains.shape[2]
    following = np.roll(domains, -1, axis=2)
    return both_ways(domains, following, (local - 1) / local, up=up, down=down) if local > 1 else []
