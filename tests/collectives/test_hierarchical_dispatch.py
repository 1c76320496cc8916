"""Tokens that are routed evenly: closed forms against every choice of experts, one by one."""

from collections import Counter
from itertools import combinations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from clustersim.collectives.dispatch_fanout import reached_token_fraction
from clustersim.collectives.hierarchical_dispatch import HierarchicalDispatch
from clustersim.collectives.library import SmCopyCost, load_dispatcher
from clustersim.collectives.phase import GroupTopology, Phase, group_topology
from clustersim.collectives.tuner import Tuner, select_variants
from clustersim.program.task import CollectiveType, TokenDispatcher, TokenRouting
from tests.collectives.fake_fabric import FakeFabric
from tests.conftest import examples

WIDEST = 4


@st.composite
def routings(draw: st.DrawFn) -> TokenRouting:
    """Few experts, in groups or not."""
    groups, each = draw(st.integers(1, 4)), draw(st.integers(1, 3))
    limit = draw(st.none() | st.integers(1, groups))
    top_k = draw(st.integers(1, min(4, each * (limit or groups))))
    return TokenRouting(TokenDispatcher.DEEPEP, groups * each, top_k, groups, limit, token_bytes=1.0)


def choices(routing: TokenRouting) -> Counter[tuple[int, ...]]:
    """Every choice of experts, as often as it comes up."""
    each = routing.expert_count // routing.expert_group_count
    found: Counter[tuple[int, ...]] = Counter()
    for drawn in combinations(
        range(routing.expert_group_count),
        min(routing.max_groups_per_token or routing.expert_group_count, routing.expert_group_count),
    ):
        experts = [group * each + place for group in drawn for place in range(each)]
        found.update(combinations(experts, routing.top_k))
    return found


@given(routings(), st.data())
@examples(100)
def test_tokens_that_reach_a_block_of_experts_are_those_of_all_choices(
    routing: TokenRouting, data: st.DataObject
) -> None:
    first = data.draw(st.integers(0, routing.expert_count - 1))
    last = data.draw(st.integers(first + 1, routing.expert_count))
    every = choices(routing)
    some = sum(number for chosen, number in every.items() if any(first <= expert < last for expert in chosen))
    assert reached_token_fraction(routing, first / routing.expert_count, last / routing.expert_count) == pytest.approx(
        some / every.total()
    )


def arranged(per_domain: list[int], routing: TokenRouting) -> GroupTopology:
    """One group with so many members in each of the domains."""
    members = [WIDEST * domain + place for domain, count in enumerate(per_domain) for place in range(count)]
    (found,) = group_topology(np.array([members]), FakeFabric(WIDEST * len(per_domain), WIDEST))
    return GroupTopology(found.members, found.domain_sizes, found.is_switched, found.group_indices, routing)


def walked(arrangement: GroupTopology, routing: TokenRouting) -> Counter[tuple[int, int]]:
    """Tokens that go from GPU to GPU, in parts of one token's rows: every rank sends one of every choice."""
    every, gpus = choices(routing), arrangement.members[0].tolist()
    held = routing.expert_count // (len(gpus) // routing.expert_shard_size)
    moved: Counter[tuple[int, int]] = Counter()
    for source in gpus:
        for chosen, number in every.items():
            targets = [
                gpu
                for place, gpu in enumerate(gpus)
                if any(x // held == place // routing.expert_shard_size for x in chosen)
            ]
            for domain in {gpu // WIDEST for gpu in targets}:
                own = [gpu for gpu in gpus if gpu // WIDEST == domain]
                at = own[sum(gpu // WIDEST == source // WIDEST and gpu < source for gpu in gpus) % len(own)]
                hops = [(source, at), *((at, gpu) for gpu in targets if gpu // WIDEST == domain)]
                moved.update({hop: number for hop in hops if hop[0] != hop[1]})  # each way occurs once
    return Counter({hop: number / every.total() / routing.top_k for hop, number in moved.items()})


def flows(phases: tuple[Phase, ...]) -> Counter[tuple[int, int]]:
    found: Counter[tuple[int, int]] = Counter()
    for phase in phases:
        for source, target, share in zip(phase.sources[0], phase.targets[0], phase.share[0], strict=True):
            found[int(source), int(target)] += float(share)
    return found


@pytest.mark.parametrize(
    ("per_domain", "routing"),
    [
        ([4], TokenRouting(TokenDispatcher.DEEPEP, 8, 3)),
        ([2, 2], TokenRouting(TokenDispatcher.DEEPEP, 8, 2)),
        ([4, 4], TokenRouting(TokenDispatcher.HYBRIDEP, 8, 4, 4, 2)),
        ([2, 2, 2], TokenRouting(TokenDispatcher.DEEPEP, 6, 3, 3, 2)),
        ([1, 1, 1, 1], TokenRouting(TokenDispatcher.DEEPEP, 8, 2)),
        ([3, 1], TokenRouting(TokenDispatcher.DEEPEP, 4, 2)),
        ([1, 3, 2], TokenRouting(TokenDispatcher.DEEPEP, 6, 2)),
        ([4, 4], TokenRouting(TokenDispatcher.DEEPEP, 4, 2, expert_shard_size=2)),
    ],
)
def test_flows_are_what_tokens_do_one_by_one(per_domain: list[int], routing: TokenRouting) -> None:
    """Once over the network to each domain with one of its experts, then once to each rank that has one."""
    arrangement = arranged(per_domain, routing)
    expected = walked(arrangement, routing)
    there = flows(HierarchicalDispatch().phases(CollectiveType.DISPATCH, arrangement))
    assert {hop: share for hop, share in there.items() if share} == pytest.approx(expected)
    back = flows(HierarchicalDispatch().phases(CollectiveType.COMBINE, arrangement))
    assert {(target, source): share for (source, target), share in back.items()} == pytest.approx(there)


def test_two_nodes_of_two_by_hand() -> None:
    """Four experts on four ranks, top-2: of six pairs five have an expert in the other domain, three one rank's.

    So a rank sends 5/6 of a token to the other node, and 1/2 to each rank of which it is the head there, and its own.
    A token's rows are two, so the ports carry 5/12 of the payload, and 2 x 1/4.
    """
    (phase,) = HierarchicalDispatch().phases(
        CollectiveType.DISPATCH, arranged([2, 2], TokenRouting(TokenDispatcher.DEEPEP, 4, 2))
    )
    crosses = (phase.sources // WIDEST != phase.targets // WIDEST)[0]
    assert phase.share[0][crosses].tolist() == pytest.approx([5 / 12] * 4)
    assert phase.share[0][~crosses].tolist() == pytest.approx([2 * 1 / 4] * 4)


def test_tokens_without_a_routing_are_not_sent() -> None:
    (found,) = group_topology(np.arange(4)[None], FakeFabric(4, 4))
    assert HierarchicalDispatch().phases(CollectiveType.DISPATCH, found) == ()


@pytest.mark.parametrize("dispatcher", [TokenDispatcher.DEEPEP, TokenDispatcher.DEEPEP_V2, TokenDispatcher.HYBRIDEP])
def test_a_smaller_limit_of_nodes_sends_less(dispatcher: TokenDispatcher) -> None:
    """Where the network is what limits; more multiprocessors are never slower."""
    fabric, members = FakeFabric(64, 8), np.arange(64)[None]

    def seconds(limit: int | None) -> float:
        routing = TokenRouting(dispatcher, 64, 8, 8, limit, token_bytes=14336.0)
        library = load_dispatcher(dispatcher).with_token_bytes(routing.token_bytes, 64)
        choices = Tuner(fabric, library, routing).evaluate_variants(CollectiveType.DISPATCH, members)
        return float(select_variants(choices, 4096 * 8 * 14336.0).seconds[0])

    times = [seconds(limit) for limit in (1, 2, 4, None)]
    assert times == sorted(times)
    assert len(set(times)) == len(times)


def test_smaller_chunks_of_rows_pass_fewer_bytes() -> None:
    """By hand: 1 us for a row, 1 us for its bytes and 4 us for a chunk are 3 us with four rows in it, 6 us with one."""
    handling = SmCopyCost(token_seconds=1e-6, rate=1e9, chunk_seconds=4e-6, chunk_tokens=((16, 4), (32, 1)))
    assert handling.sm_rate(1000.0, 16) == pytest.approx(1000 / 3e-6)
    assert handling.sm_rate(1000.0, 17) == handling.sm_rate(1000.0, 64) == pytest.approx(1000 / 6e-6)
    assert SmCopyCost(token_seconds=1e-6, rate=1e9).sm_rate(1000.0, 64) == pytest.approx(1000 / 2e-6)
