"""How do dispatch kernels send tokens to the ranks of their experts, once per node (hierarchical dispatch)?

Dispatch: a rank sends a token once to every other domain that has one of its experts, to the member with the
same local rank there, which forwards it over NVLink to every member that has one; in its own domain the rank
does so itself. Combine takes the same paths back: members sum what they have of a token, and a domain's sum
crosses the network once. All of it is pipelined, so it is one phase. How many tokens reach a domain and a
member follows from the routing (`dispatch_fanout`); shares are fractions of the payload, which counts a token
once for each of its experts.

Where experts are sharded over ranks, each of these gets the token.

Reference: deepseek-ai/DeepEP@84d3d6f, README and csrc/kernels/internode.cu (dispatch, combine); Hybrid-EP
likewise: DeepEP@94a9f8f, docs/README_Hybrid-EP.md.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import accumulate

import numpy as np

from clustersim.collectives.dispatch_fanout import reached_token_fraction
from clustersim.collectives.phase import Flows, GroupTopology, LatencySteps, Phase, build_phase
from clustersim.common.arrays import FloatArray, IntArray
from clustersim.program.task import CollectiveType, TokenRouting

_SHARE_DIGITS = 12  # decimal digits: shares that differ by rounding only are equal


@dataclass(frozen=True, slots=True)
class HierarchicalDispatch:
    """Tokens are sent once to each domain and forwarded from there."""

    def phases(self, collective: CollectiveType, topology: GroupTopology) -> tuple[Phase, ...]:
        """One phase for dispatch and combine, where tokens are routed over the groups."""
        if collective not in (CollectiveType.DISPATCH, CollectiveType.COMBINE) or topology.routing is None:
            return ()
        crosses_domains = topology.domain_count > 1
        latency_steps = LatencySteps(local=1, network=int(crosses_domains), posts=topology.domain_count - 1)
        pattern = _flow_pattern(topology, topology.routing)
        return (
            build_phase(
                *_group_by_share(pattern, topology, is_combine=collective is CollectiveType.COMBINE),
                latency_steps=latency_steps,
            ),
        )


@dataclass(frozen=True, slots=True)
class _FlowPattern:
    """Sender, receiver and payload share of each flow in a group, by member index: [flows] each."""

    sources: IntArray
    targets: IntArray
    shares: FloatArray


def _group_by_share(pattern: _FlowPattern, topology: GroupTopology, *, is_combine: bool) -> Iterator[Flows]:
    """Flows grouped by equal payload share."""
    shares, share_ids = np.unique(pattern.shares, return_inverse=True)
    for share_id, share in enumerate(shares.tolist()):
        selected = share_ids == share_id
        senders, receivers = (
            topology.members[:, pattern.sources[selected]],
            topology.members[:, pattern.targets[selected]],
        )
        yield (
            Flows(receivers, senders, share, is_p2p=True)
            if is_combine
            else Flows(senders, receivers, share, is_p2p=True)
        )


def _flow_pattern(topology: GroupTopology, routing: TokenRouting) -> _FlowPattern:
    """Over the network to the member with the same local rank, and from there to all others of the domain."""
    sizes = topology.domain_sizes
    ranks, local_ranks = np.arange(topology.size), np.concatenate([np.arange(size) for size in sizes])
    sources, targets, shares = [], [], []
    for begin, size in zip(accumulate(sizes, initial=0), sizes, strict=False):
        outside = ranks[(ranks < begin) | (ranks >= begin + size)]
        domain_share = _payload_share(routing, begin, begin + size, topology.size)
        member_shares = [
            _payload_share(routing, member, member + 1, topology.size) for member in range(begin, begin + size)
        ]
        forwarded_count = np.bincount(local_ranks % size, minlength=size)
        head, target = np.nonzero((forwarded_count[:, None] > 0) & ~np.eye(size, dtype=bool))
        sources += [outside, begin + head]
        targets += [begin + local_ranks[outside] % size, begin + target]
        shares += [np.full(len(outside), domain_share), forwarded_count[head] * np.array(member_shares)[target]]
    return _FlowPattern(
        np.concatenate(sources), np.concatenate(targets), np.round(np.concatenate(shares), _SHARE_DIGITS)
    )


def _payload_share(routing: TokenRouting, first: int, last: int, size: int) -> float:
    """Fraction of the payload sent to the experts of members `first` to `last`, a token at most once."""
    holder_count, shard_size = size // routing.expert_shard_size, routing.expert_shard_size
    return (
        reached_token_fraction(routing, first // shard_size / holder_count, -(-last // shard_size) / holder_count)
        / routing.top_k
    )
