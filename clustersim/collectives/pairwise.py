"""How does data travel straight from each rank to each other?

Send/recv is one flow. A shift sends to the next member and receives from the one before, n - 1 times, so that every
part goes round the ring; the slowest hop sets the pace of each round. All-to-all sends an n-th of the payload to every
other member, all at once.
In very large groups an evenly spread sample of distances stands for all of them (their shares are scaled up), because
the flows of one distance load a regular fabric like those of its neighbours.
"""

from dataclasses import dataclass
from typing import Final

import numpy as np

from clustersim.collectives.phase import Arrangement, Flows, Phase, Rounds, phase
from clustersim.common.arrays import IntArray
from clustersim.program.task import CollectiveType

_FLOWS: Final = 2**20  # sample distances rather than list more flows than this ...
_DISTANCES: Final = 127  # ... but never fewer distances than these; a prime has no common stride with domains


@dataclass(frozen=True, slots=True)
class Pairwise:
    """Direct flows."""

    def phases(self, kind: CollectiveType, arrangement: Arrangement) -> tuple[Phase, ...]:
        """One phase for send/recv (in groups of two), shift and all-to-all."""
        if kind is CollectiveType.SEND_RECV and arrangement.size == 2:
            return (_send(arrangement),)
        if kind is CollectiveType.SHIFT:
            return (_shift(arrangement),)
        if kind is CollectiveType.ALL_TO_ALL:
            return (_all_to_all(arrangement),)
        return ()


def _send(arrangement: Arrangement) -> Phase:
    """From the first member to the second."""
    members = arrangement.members
    crosses = int(arrangement.spans > 1)
    return phase(
        Flows(members[:, :1], members[:, 1:], 1.0, message=True), rounds=Rounds(local=1 - crosses, network=crosses)
    )


def _shift(arrangement: Arrangement) -> Phase:
    """From each member to the next, one part at a time."""
    members, hops = arrangement.members, arrangement.size - 1
    network = hops if arrangement.spans > 1 else 0
    around = Flows(members, np.roll(members, -1, axis=1), hops / arrangement.size, message=True)
    return phase(around, rounds=Rounds(local=hops - network, network=network))


def _all_to_all(arrangement: Arrangement) -> Phase:
    """Every member to every other; messages to other domains are posted one after the other."""
    members, size = arrangement.members, arrangement.size
    distances = _sample(size, max(_DISTANCES, _FLOWS // members.size))
    share = (size - 1) / size / len(distances)
    targets = np.stack([np.roll(members, -int(distance), axis=1) for distance in distances], axis=2)
    sources = np.broadcast_to(members[:, :, None], targets.shape)
    crosses = int(arrangement.spans > 1)
    posts = crosses * (size - size // arrangement.spans)
    return phase(
        Flows(sources, targets, share, message=True), rounds=Rounds(local=1 - crosses, network=crosses, posts=posts)
    )


def _sample(size: int, count: int) -> IntArray:
    """Distances 1 ... size-1, or `count` evenly spread ones among them."""
    if size - 1 <= count:
        return np.arange(1, size)
    return 1 + (np.arange(count) * (size - 1) + (size - 1) // 2) // count
