"""Hierarchical dispatch of evenly routed tokens: closed forms against the enumeration of all expert choices."""

from collections import Counter
from itertools import combinations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from clustersim.collectives.dispatch_fanout import reached_token_fraction
from clustersim.collectives.hierarchical_dispatch import HierarchicalDispatch
from clustersim.collectives.library import SmCopyCost
from clustersim.collectives.library_files import load_dispatcher
from clustersim.collectives.phase import GroupTopology, Phase, group_topology
from clustersim.collectives.tuner import Tuner, select_variants
from clustersim.program.task import CollectiveType, TokenDispatcher, TokenRouting
from tests.collectives.fake_fabric import FakeFabric
from tests.conftest import examples

DOMAIN_SIZE = 4


@st.composite
def token_routings(draw: st.DrawFn) -> TokenRouting:
    """Few experts, with or without groups."""
    groups, experts_per_group = draw(st.integers(1, 4)), draw(st.integers(1, 3))
    limit = draw(st.none() | st.integers(1, groups))
    top_k = draw(st.integers(1, min(4, experts_per_group * (limit or groups))))
    return TokenRouting(TokenDispatcher.DEEPEP, groups * experts_per_group, top_k, groups, limit, token_bytes=1.0)


def expert_choices(routing: TokenRouting) -> Counter[tuple[int, ...]]:
    """Every choice of experts, with its count."""
    experts_per_group = routing.expert_count // routing.expert_group_count
    counts: Counter[tuple[int, ...]] = Counter()
    for chosen_groups in combinations(
        range(routing.expert_group_count),
        min(routing.max_groups_per_token or routing.expert_group_count, routing.expert_group_count),
    ):
        experts = [group * experts_per_group + index for group in chosen_groups for index in range(experts_per_group)]
        counts.update(combinations(experts, routing.top_k))
    return counts


@given(token_routings(), st.data())
@examples(100)
def test_the_reached_token_fraction_matches_enumeration(routing: TokenRouting, data: st.DataObject) -> None:
    first = data.draw(st.integers(0, routing.expert_count - 1))
    last = data.draw(st.integers(first + 1, routing.expert_count))
    all_choices = expert_choices(routing)
    reaching_count = sum(
        count for chosen, count in all_choices.items() if any(first <= expert < last for expert in chosen)
    )
    assert reached_token_fraction(routing, first / routing.expert_count, last / routing.expert_count) == pytest.approx(
        reaching_count / all_choices.total()
    )


def single_group_topology(per_domain: list[int], routing: TokenRouting) -> GroupTopology:
    """Topology of one group with these member counts in the domains."""
    members = [DOMAIN_SIZE * domain + index for domain, count in enumerate(per_domain) for index in range(count)]
    (topology,) = group_topology(np.array([members]), FakeFabric(DOMAIN_SIZE * len(per_domain), DOMAIN_SIZE))
    return GroupTopology(topology.members, topology.domain_sizes, topology.is_switched, topology.group_indices, routing)


def enumerated_flows(topology: GroupTopology, routing: TokenRouting) -> Counter[tuple[int, int]]:
    """Token flows between GPUs, as shares of the payload: every rank sends one token per choice of experts."""
    all_choices, gpus = expert_choices(routing), topology.members[0].tolist()
    experts_per_rank = routing.expert_count // (len(gpus) // routing.expert_shard_size)
    flow_counts: Counter[tuple[int, int]] = Counter()
    for source in gpus:
        for chosen, count in all_choices.items():
            targets = [
                gpu
                for index, gpu in enumerate(gpus)
                if any(x // experts_per_rank == index // routing.expert_shard_size for x in chosen)
            ]
            for domain in {gpu // DOMAIN_SIZE for gpu in targets}:
                domain_gpus = [gpu for gpu in gpus if gpu // DOMAIN_SIZE == domain]
                forwarder = domain_gpus[
                    sum(gpu // DOMAIN_SIZE == source // DOMAIN_SIZE and gpu < source for gpu in gpus) % len(domain_gpus)
                ]
                hops = [(source, forwarder), *((forwarder, gpu) for gpu in targets if gpu // DOMAIN_SIZE == domain)]
                flow_counts.update({hop: count for hop in hops if hop[0] != hop[1]})  # each flow occurs once
    return Counter({hop: count / all_choices.total() / routing.top_k for hop, count in flow_counts.items()})


def phase_flows(phases: tuple[Phase, ...]) -> Counter[tuple[int, int]]:
    shares: Counter[tuple[int, int]] = Counter()
    for phase in phases:
        for source, target, share in zip(phase.sources[0], phase.targets[0], phase.share[0], strict=True):
            shares[int(source), int(target)] += float(share)
    return shares


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
def test_flows_match_the_enumeration_of_tokens(per_domain: list[int], routing: TokenRouting) -> None:
    """Once over the network to each domain with one of its experts, then once to each rank that has one."""
    topology = single_group_topology(per_domain, routing)
    expected = enumerated_flows(topology, routing)
    dispatched = phase_flows(HierarchicalDispatch().phases(CollectiveType.DISPATCH, topology))
    assert {hop: share for hop, share in dispatched.items() if share} == pytest.approx(expected)
    combined = phase_flows(HierarchicalDispatch().phases(CollectiveType.COMBINE, topology))
    assert {(target, source): share for (source, target), share in combined.items()} == pytest.approx(dispatched)


def test_two_nodes_of_two_by_hand() -> None:
    """Four experts on four ranks, top-2: of six pairs five have an expert in the other domain, three one rank's.

    So a rank sends 5/6 of a token to the other node, and 1/2 to each rank for which it is the forwarder there,
    and within its node. A token counts twice in the payload, so the ports carry 5/12 of the payload, and 2 x
    1/4.
    """
    (phase,) = HierarchicalDispatch().phases(
        CollectiveType.DISPATCH, single_group_topology([2, 2], TokenRouting(TokenDispatcher.DEEPEP, 4, 2))
    )
    crosses_domains = (phase.sources // DOMAIN_SIZE != phase.targets // DOMAIN_SIZE)[0]
    assert phase.share[0][crosses_domains].tolist() == pytest.approx([5 / 12] * 4)
    assert phase.share[0][~crosses_domains].tolist() == pytest.approx([2 * 1 / 4] * 4)


def test_tokens_without_a_routing_are_not_sent() -> None:
    (topology,) = group_topology(np.arange(4)[None], FakeFabric(4, 4))
    assert HierarchicalDispatch().phases(CollectiveType.DISPATCH, topology) == ()


@pytest.mark.parametrize("dispatcher", [dispatcher for dispatcher in TokenDispatcher if dispatcher.has_custom_kernels])
def test_a_smaller_node_limit_sends_less(dispatcher: TokenDispatcher) -> None:
    """Where the network is the bottleneck."""
    fabric, members = FakeFabric(64, 8), np.arange(64)[None]

    def seconds(limit: int | None) -> float:
        routing = TokenRouting(dispatcher, 64, 8, 8, limit, token_bytes=14336.0)
        library = load_dispatcher(dispatcher).with_token_bytes(routing.token_bytes, 64)
        variant_costs = Tuner(fabric, library, routing).evaluate_variants(CollectiveType.DISPATCH, members)
        return float(select_variants(variant_costs, 4096 * 8 * 14336.0).seconds[0])

    times = [seconds(limit) for limit in (1, 2, 4, None)]
    assert times == sorted(times)
    assert len(set(times)) == len(times)


def test_smaller_token_chunks_lower_the_sm_copy_rate() -> None:
    """By hand: 1 us per token, 1 us for its bytes, 4 us per chunk: 3 us with four tokens per chunk, 6 us with one."""
    sm_copy_cost = SmCopyCost(token_seconds=1e-6, rate=1e9, chunk_seconds=4e-6, chunk_tokens=((16, 4), (32, 1)))
    assert sm_copy_cost.sm_rate(1000.0, 16) == pytest.approx(1000 / 3e-6)
    assert sm_copy_cost.sm_rate(1000.0, 17) == sm_copy_cost.sm_rate(1000.0, 64) == pytest.approx(1000 / 6e-6)
    assert SmCopyCost(token_seconds=1e-6, rate=1e9).sm_rate(1000.0, 64) == pytest.approx(1000 / 2e-6)
