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


def reached_token_fraction(routing: TokenRouting, first: float, last: float) -> float:
    """Part of the tokens that have an expert among those from `first` up to `last`, parts of all experts (0 to 1).

    >>> from clustersim.program.task import Dispatcher
    >>> reached(Routing(Dispatcher.DEEPEP, experts=4, top_k=2), 0.0, 0.5)  # one of six pairs is elsewhere
    0.8333333333333334
    """
    group_size = routing.expert_count // routing.expert_group_count
    begin, end = round(first * routing.expert_count), round(last * routing.expert_count)
    group_starts = range(0, routing.expert_count, group_size)
    group_overlaps = [max(0, min(end, start + group_size) - max(begin, start)) for start in group_starts]
    drawn_groups = (
        routing.expert_group_count
        if routing.max_groups_per_token is None
        else min(routing.max_groups_per_token, routing.expert_group_count)
    )
    draws_by_overlap, experts = _count_group_draws(group_overlaps, drawn_groups), group_size * drawn_groups
    missed = sum(draws * comb(experts - overlap, routing.top_k) for overlap, draws in draws_by_overlap.items())
    return 1.0 - missed / (comb(routing.expert_group_count, drawn_groups) * comb(experts, routing.top_k))


def _count_group_draws(group_overlaps: Sequence[int], drawn_groups: int) -> Counter[int]:
    """How many sets of so many groups have s experts in a block, of which each group has some: by s."""
    draws: list[Counter[int]] = [Counter() for _ in range(drawn_groups + 1)]
    draws[0][0] = 1
    for group_overlap in group_overlaps:
        for count in range(drawn_groups, 0, -1):
            for overlap, draw_count in draws[count - 1].items():
                draws[count][overlap + group_overlap] += draw_count
    return draws[drawn_groups]
