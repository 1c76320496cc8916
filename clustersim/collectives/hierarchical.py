"""How does data travel if each level of the machine has its own turn?

Inside the domain first, then between domains, then inside again. All-reduce: ring reduce-scatter inside, ring
all-reduce of each rail's part between domains, ring all-gather inside. All-gather and reduce-scatter: one ring phase
for each level. All-to-all: each member sorts for its rail's peers inside the domain, then the rails exchange.
Broadcast: over the root's rail, then inside.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final

import numpy as np

from clustersim.collectives.phase import Arrangement, Flows, Phase, Rounds, phase
from clustersim.common.arrays import IntArray
from clustersim.program.task import CollectiveType


@dataclass(frozen=True, slots=True)
class Hierarchical:
    """Two levels, one after the other; needs several domains of several members."""

    def phases(self, kind: CollectiveType, arrangement: Arrangement) -> tuple[Phase, ...]:
        """Two or three phases; domains need equally many members."""
        uneven = len(set(arrangement.per_domain)) > 1
        if arrangement.spans < 2 or arrangement.rails < 2 or uneven:
            return ()
        turns = _TURNS.get(kind)
        return turns(arrangement.heads) if turns else ()


def _inside(members: IntArray) -> Phase:
    """A ring all-gather or reduce-scatter of the whole payload in each domain."""
    local = members.shape[2]
    ring = Flows(members, np.roll(members, -1, axis=2), (local - 1) / local)
    return phase(ring, rounds=Rounds(local=local - 1))


def _between(members: IntArray, passes: int) -> Phase:
    """A ring over the domains on each rail, with the rail's part of the payload; all-reduce makes two passes."""
    domains, local = members.shape[1:]
    share = passes * (domains - 1) / domains / local
    return phase(Flows(members, np.roll(members, -1, axis=1), share), rounds=Rounds(network=passes * (domains - 1)))


def _exchange(members: IntArray, axis: int) -> Phase:
    """All-to-all along one axis of members [groups, domains, k]: every pair exchanges an equal part of the payload."""
    size = members.shape[axis]
    parts = [Flows(members, np.roll(members, -offset, axis=axis), 1 / size, message=True) for offset in range(1, size)]
    rounds = Rounds(local=1) if axis == 2 else Rounds(network=1, posts=size - 1)
    return phase(*parts, rounds=rounds)


def _broadcast(members: IntArray) -> tuple[Phase, ...]:
    """The root scatters inside its domain, rails carry the parts on in a chain, domains gather."""
    domains, local = members.shape[1:]
    root = np.repeat(members[:, :1, :1], local - 1, axis=2)
    scatter = phase(Flows(root, members[:, :1, 1:], 1 / local, message=True), rounds=Rounds(local=1))
    chain = Flows(members[:, :-1], members[:, 1:], 1 / local)
    return scatter, phase(chain, rounds=Rounds(network=domains - 1), stages=max(domains - 2, 0)), _inside(members)


_TURNS: Final[Mapping[CollectiveType, Callable[[IntArray], tuple[Phase, ...]]]] = {
    CollectiveType.ALL_REDUCE: lambda members: (_inside(members), _between(members, 2), _inside(members)),
    CollectiveType.ALL_GATHER: lambda members: (_between(members, 1), _inside(members)),
    CollectiveType.REDUCE_SCATTER: lambda members: (_inside(members), _between(members, 1)),
    CollectiveType.ALL_TO_ALL: lambda members: (_exchange(members, axis=2), _exchange(members, axis=1)),
    CollectiveType.BROADCAST: _broadcast,
}
