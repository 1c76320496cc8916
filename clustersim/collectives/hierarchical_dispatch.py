"""How do kernels send tokens to the ranks of their experts, each once to a node?

Dispatch: a rank sends a token once to every other domain that has one of its experts, to the member at its own place
there, which passes it on over NVLink to every member that has one; in its own domain it does so itself. Combine goes
the same ways back: members sum what they have of a token, a domain's sum crosses the network once. All of it is
pipelined, so it is one phase. How many tokens reach a domain and a member follows from the routing (`routed`); a part
of the payload is what a token's rows, one for each of its experts, are of that.

Where experts are cut over ranks, each of these gets the token.

Reference: deepseek-ai/DeepEP@84d3d6f, README and csrc/kernels/internode.cu (dispatch, combine); Hybrid-EP likewise:
DeepEP@94a9f8f, docs/README_Hybrid-EP.md.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import accumulate

import numpy as np

from clustersim.collectives.dispatch_fanout import reached
from clustersim.collectives.phase import Arrangement, Flows, Phase, Rounds, phase
from clustersim.common.arrays import FloatArray, IntArray
from clustersim.program.task import CollectiveType, TokenRouting

_DIGITS = 12  # shares that differ by rounding are equal


@dataclass(frozen=True, slots=True)
class Forwarded:
    """Tokens once to each domain, and on from there."""

    def phases(self, kind: CollectiveType, arrangement: Arrangement) -> tuple[Phase, ...]:
        """One phase for dispatch and combine, where tokens are routed over the groups."""
        if kind not in (CollectiveType.DISPATCH, CollectiveType.COMBINE) or arrangement.routing is None:
            return ()
        crosses = arrangement.spans > 1
        rounds = Rounds(local=1, network=int(crosses), posts=arrangement.spans - 1)
        ways = _ways(arrangement, arrangement.routing)
        return (phase(*_flows(ways, arrangement, back=kind is CollectiveType.COMBINE), rounds=rounds),)


@dataclass(frozen=True, slots=True)
class _Ways:
    """Who sends to whom within a group, by place, and which part of the payload: [flows] each."""

    sources: IntArray
    targets: IntArray
    shares: FloatArray


def _flows(ways: _Ways, arrangement: Arrangement, *, back: bool) -> Iterator[Flows]:
    """Flows that carry equally much, together."""
    shares, number = np.unique(ways.shares, return_inverse=True)
    for place, share in enumerate(shares.tolist()):
        own = number == place
        ahead, behind = arrangement.members[:, ways.sources[own]], arrangement.members[:, ways.targets[own]]
        yield Flows(behind, ahead, share, message=True) if back else Flows(ahead, behind, share, message=True)


def _ways(arrangement: Arrangement, routing: TokenRouting) -> _Ways:
    """Over the network to the member at one's place, and from there to all others of the domain."""
    sizes = arrangement.per_domain
    ranks, places = np.arange(arrangement.size), np.concatenate([np.arange(size) for size in sizes])
    sources, targets, shares = [], [], []
    for begin, size in zip(accumulate(sizes, initial=0), sizes, strict=False):
        outside = ranks[(ranks < begin) | (ranks >= begin + size)]
        sent = _part(routing, begin, begin + size, arrangement.size)
        passed = [_part(routing, place, place + 1, arrangement.size) for place in range(begin, begin + size)]
        through = np.bincount(places % size, minlength=size)
        head, target = np.nonzero((through[:, None] > 0) & ~np.eye(size, dtype=bool))
        sources += [outside, begin + head]
        targets += [begin + places[outside] % size, begin + target]
        shares += [np.full(len(outside), sent), through[head] * np.array(passed)[target]]
    return _Ways(np.concatenate(sources), np.concatenate(targets), np.round(np.concatenate(shares), _DIGITS))


def _part(routing: TokenRouting, first: int, last: int, size: int) -> float:
    """Of the payload, what goes to the experts of members `first` up to `last`: one of a token's rows, or none."""
    holders, cut = size // routing.expert_shard_size, routing.expert_shard_size
    return reached(routing, first // cut / holders, -(-last // cut) / holders) / routing.top_k
