"""How many different ranks and nodes does a token's choice of experts reach?

Experts lie on ranks in order, so a rank or a node has a block of them. A router that chooses evenly draws `limit` of
the groups of experts, each set of groups as often as any other, then top_k of the experts in them. A token misses a
block if all its experts are among those that its groups have elsewhere: of M experts in the groups drawn, s of them in
the block, in C(M - s, top_k) of C(M, top_k) draws. The mean over the groups drawn is exact: they are counted by s.

Real routers draw the groups with the best experts, and best experts are correlated; balanced training comes near to
even (DeepSeek-AI 2024, arXiv:2412.19437, 2.1.2: node-limited routing; forced balance in benchmarks is even by
construction).
"""

from collections import Counter
from collections.abc import Sequence
from math import comb

from clustersim.program.task import TokenRouting


def reached(routing: TokenRouting, first: float, last: float) -> float:
    """Part of the tokens that have an expert among those from `first` up to `last`, parts of all experts (0 to 1).

    >>> from clustersim.program.task import Dispatcher
    >>> reached(Routing(Dispatcher.DEEPEP, experts=4, top_k=2), 0.0, 0.5)  # one of six pairs is elsewhere
    0.8333333333333334
    """
    each = routing.expert_count // routing.expert_group_count
    begin, end = round(first * routing.expert_count), round(last * routing.expert_count)
    blocks = range(0, routing.expert_count, each)
    inside = [max(0, min(end, block + each) - max(begin, block)) for block in blocks]
    drawn = (
        routing.expert_group_count
        if routing.max_groups_per_token is None
        else min(routing.max_groups_per_token, routing.expert_group_count)
    )
    ways, experts = _drawn(inside, drawn), each * drawn
    missed = sum(number * comb(experts - s, routing.top_k) for s, number in ways.items())
    return 1.0 - missed / (comb(routing.expert_group_count, drawn) * comb(experts, routing.top_k))


def _drawn(inside: Sequence[int], drawn: int) -> Counter[int]:
    """How many sets of so many groups have s experts in a block, of which each group has some: by s."""
    ways: list[Counter[int]] = [Counter() for _ in range(drawn + 1)]
    ways[0][0] = 1
    for own in inside:
        for count in range(drawn, 0, -1):
            for s, number in ways[count - 1].items():
                ways[count][s + own] += number
    return ways[drawn]
