"""How does data travel round a ring?

Each rank sends only to its neighbour. An all-gather passes every rank's part n-1 times on, a reduce-scatter likewise
with an addition at each hop, an all-reduce is both. Broadcast and reduce are pipelined along the rings cut open at the
root.

Domains of k members are left by k rings, each with 1/k of the payload and by a different member, so that every network
interface is used. Domains are passed in alternating direction (out by member j, into the next domain by member j): all
traffic between domains stays on its rail, but for one hop where the number of domains is odd. Inside a domain k-1 of
the k rings pass each pair of neighbours. Where domains hold different numbers of members, there are as many rings as
the smallest has; a ring passes a domain of m members in m-1 hops, which are taken as spread evenly over the m pairs of
neighbours.

Reference: Patarasuk and Yuan, "Bandwidth optimal all-reduce algorithms for clusters of workstations", 2009; NCCL's
rings with NCCL_CROSS_NIC=2.
"""

from dataclasses import dataclass
from typing import Final

import numpy as np

from clustersim.collectives.phase import Arrangement, Flows, Phase, Rounds, phase
from clustersim.common.arrays import IntArray
from clustersim.program.task import CollectiveType

_PASSES: Final = {CollectiveType.ALL_REDUCE: 2, CollectiveType.ALL_GATHER: 1, CollectiveType.REDUCE_SCATTER: 1}
_ROOTED: Final = (CollectiveType.BROADCAST, CollectiveType.REDUCE)


@dataclass(frozen=True, slots=True)
class Ring:
    """One ring per member of a domain."""

    def phases(self, kind: CollectiveType, arrangement: Arrangement) -> tuple[Phase, ...]:
        """One phase for all collectives with a ring form."""
        if kind in _PASSES:
            return (_round_trip(arrangement, _PASSES[kind]),)
        if kind in _ROOTED:
            return (_chain(arrangement, kind),)
        return ()


def _round_trip(arrangement: Arrangement, passes: int) -> Phase:
    """All-gather or reduce-scatter (one pass), or both one after the other."""
    size = arrangement.size
    network = passes * (arrangement.spans - 1)
    rounds = Rounds(local=passes * (size - 1) - network, network=network)
    return phase(*ring_flows(arrangement, passes * (size - 1) / size), rounds=rounds)


def ring_flows(arrangement: Arrangement, share: float) -> list[Flows]:
    """Flows of all rings; `share` of the payload passes each member."""
    if arrangement.spans == 1:
        members = arrangement.heads
        return [Flows(members, np.roll(members, -1, axis=2), share)]
    passed = [_passed(domains, share) for domains in arrangement.domains if domains.shape[2] > 1]
    heads = arrangement.heads
    return [*passed, Flows(heads, np.roll(heads, -1, axis=1), share / arrangement.rails)]


def _passed(domains: IntArray, share: float) -> Flows:
    """What passes each pair of neighbours inside domains [groups, domains, members]."""
    count, local = domains.shape[1:]
    forward = (np.arange(count) % 2 == 0)[None, :, None]
    following = np.where(forward, np.roll(domains, -1, axis=2), np.roll(domains, 1, axis=2))
    return Flows(domains, following, share * (local - 1) / local)


def _chain(arrangement: Arrangement, kind: CollectiveType) -> Phase:
    """The rings without the hops back to the root."""
    network = arrangement.spans - 1
    rounds = Rounds(local=arrangement.size - 1 - network, network=network)
    parts = _outwards(arrangement)
    if kind is CollectiveType.REDUCE:
        parts = [Flows(part.targets, part.sources, part.share) for part in parts]
    return phase(*parts, rounds=rounds, stages=max(arrangement.size - 2, 0))


def _outwards(arrangement: Arrangement) -> list[Flows]:
    """From the root through its domain, on all rails from domain to domain, and through each of these."""
    own = arrangement.members[:, : arrangement.per_domain[0]]
    parts = [Flows(own[:, :-1], own[:, 1:], 1.0)] if own.shape[1] > 1 else []
    if arrangement.spans == 1:
        return parts
    beyond, heads = arrangement.beyond_the_first, arrangement.heads
    parts += [_passed(domains, 1.0) for domains in beyond.domains if domains.shape[2] > 1]
    return [*parts, Flows(heads[:, :-1], heads[:, 1:], 1 / arrangement.rails)]
