"""How many distinct ranks and nodes does a token's top-k choice of experts reach?

Experts lie on ranks in order, so a rank or a node holds a contiguous range of them. A router that chooses
uniformly draws `max_groups_per_token` of the expert groups, each set of groups equally often, then top_k of
the experts in them. A token misses a range if all its experts lie outside it: with M experts in the groups
drawn, s of them in the range, that is C(M - s, top_k) of C(M, top_k) draws. The mean over the groups drawn is
exact: draws are counted by s.

Real routers draw the groups with the best experts, and best experts are correlated; balanced training comes
close to uniform (DeepSeek-AI 2024, arXiv:2412.19437, 2.1.2: node-limited routing; forced balance in
benchmarks is uniform by construction).
"""

from collections import Counter
from collections.abc import Sequence
from math import comb

from clustersim.program.task import TokenRouting


def reached_token_fraction(routing: TokenRouting, first: float, last: float) -> float:
    """Expected fraction of tokens with an expert in the range `first` to `last`.

    The range is given in fractions of all experts (0 to 1).

    >>> from clustersim.program.task import TokenDispatcher
    >>> reached_token_fraction(TokenRouting(TokenDispatcher.DEEPEP, expert_count=4, top_k=2), 0.0, 0.5)  # 5 of 6
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
    """Number of draws of `drawn_groups` groups that have s experts in a range, by s.

    group_overlaps: experts of each group.
    """
    draws: list[Counter[int]] = [Counter() for _ in range(drawn_groups + 1)]
    draws[0][0] = 1
    for group_overlap in group_overlaps:
        for count in range(drawn_groups, 0, -1):
            for overlap, draw_count in draws[count - 1].items():
                draws[count][overlap + group_overlap] += draw_count
    return draws[drawn_groups]
