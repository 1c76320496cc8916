"""Each algorithm moves its textbook volume, on any shape of group."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from clustersim.collectives.collnet import CollNetChainAlgorithm, CollNetDirectAlgorithm, CollNetNvlsAlgorithm
from clustersim.collectives.double_binary_tree import binary_tree, tree_depth
from clustersim.collectives.hierarchical import HierarchicalAlgorithm
from clustersim.collectives.linear import LinearAlgorithm
from clustersim.collectives.nvls import NvlsAlgorithm
from clustersim.collectives.pairwise import PairwiseAlgorithm
from clustersim.collectives.pat import PatAlgorithm
from clustersim.collectives.phase import CollectiveAlgorithm, GroupTopology, group_topology
from clustersim.collectives.ring import RingAlgorithm
from clustersim.collectives.tree import TreeAlgorithm
from clustersim.program.task import CollectiveType
from tests.collectives.fake_fabric import FakeFabric

ALGORITHMS = [
    PatAlgorithm(),
    CollNetChainAlgorithm(),
    CollNetDirectAlgorithm(),
    HierarchicalAlgorithm(),
    NvlsAlgorithm(),
    CollNetNvlsAlgorithm(),
    PairwiseAlgorithm(),
    RingAlgorithm(),
    LinearAlgorithm(),
    TreeAlgorithm(),
]
SIDES = st.tuples(st.integers(1, 3), st.integers(1, 9), st.integers(1, 8))
SHAPES = SIDES.filter(lambda shape: shape[1] * shape[2] > 1)
UNEVEN = st.lists(st.integers(1, 6), min_size=1, max_size=6).filter(lambda per_domain: sum(per_domain) > 1)
WIDEST = 6
PASSES = [(CollectiveType.ALL_REDUCE, 2), (CollectiveType.ALL_GATHER, 1), (CollectiveType.REDUCE_SCATTER, 1)]


def arranged(groups: int, domains: int, per_domain: int) -> GroupTopology:
    """Groups that take whole domains in a fabric of exactly that size."""
    gpus = groups * domains * per_domain
    (arrangement,) = group_topology(np.arange(gpus).reshape(groups, -1), FakeFabric(gpus, per_domain))
    return arrangement


def filled(per_domain: list[int]) -> GroupTopology:
    """One group with so many members in each of the domains."""
    members = [WIDEST * domain + place for domain, count in enumerate(per_domain) for place in range(count)]
    (arrangement,) = group_topology(np.array([members]), FakeFabric(WIDEST * len(per_domain), WIDEST))
    return arrangement


def volumes(
    algorithm: CollectiveAlgorithm, kind: CollectiveType, arrangement: GroupTopology
) -> tuple[np.ndarray, np.ndarray]:
    """Payloads that each GPU sends and receives, summed over the phases."""
    sent, received = np.zeros((2, int(arrangement.members.max()) + 1))
    for phase in algorithm.phases(kind, arrangement):
        np.add.at(sent, phase.sources, phase.share)
        np.add.at(received, phase.targets, phase.share)
    return sent, received


@given(SHAPES, st.sampled_from(ALGORITHMS), st.sampled_from(CollectiveType))
def test_what_is_sent_is_received_and_stays_in_the_group(shape, algorithm, kind):
    arrangement = arranged(*shape)
    sent, received = volumes(algorithm, kind, arrangement)
    assert sent.sum() == pytest.approx(received.sum())
    size = arrangement.size
    for phase in algorithm.phases(kind, arrangement):
        assert (phase.sources // size == phase.targets // size).all()
        assert (phase.sources // size == np.arange(shape[0])[:, None]).all()
        assert (phase.share >= 0).all()


@given(SHAPES, st.sampled_from(PASSES))
def test_every_rank_of_a_ring_sends_and_receives_n_minus_1_nths_per_pass(shape, collective):
    """A rank passes on all n parts of the payload but one, once for all-gather, twice for all-reduce."""
    kind, passes = collective
    arrangement = arranged(*shape)
    n = arrangement.size
    sent, received = volumes(RingAlgorithm(), kind, arrangement)
    assert sent == pytest.approx(np.full_like(sent, passes * (n - 1) / n))
    assert received == pytest.approx(sent)


@given(UNEVEN, st.sampled_from(PASSES))
def test_rings_and_trees_move_their_textbook_volume_through_uneven_domains(per_domain, collective):
    """Rings: n-1 n-ths of the payload from each of n ranks per pass; trees: n-1 edges, each passed up and down."""
    kind, passes = collective
    arrangement = filled(per_domain)
    n = arrangement.size
    sent, received = volumes(RingAlgorithm(), kind, arrangement)
    assert sent.sum() == pytest.approx(received.sum()) == pytest.approx(passes * (n - 1))
    (phase,) = RingAlgorithm().phases(kind, arrangement)
    out = np.zeros(len(per_domain))
    crosses = phase.sources // WIDEST != phase.targets // WIDEST
    np.add.at(out, phase.sources[crosses] // WIDEST, phase.share[crosses])
    assert out == pytest.approx(np.full(len(out), passes * (n - 1) / n * (len(out) > 1)))
    sent, _ = volumes(TreeAlgorithm(), CollectiveType.ALL_REDUCE, arrangement)
    assert sent.sum() == pytest.approx(2 * (n - 1))


@given(st.lists(st.integers(2, 6), min_size=2, max_size=6))
def test_adding_switches_load_heads_by_what_they_add_and_all_by_the_payload(per_domain):
    """Each member's payload is read and the sum stored to it; each of k heads loads and stores a k-th beside that."""
    arrangement = filled(per_domain)
    (phase,) = NvlsAlgorithm().phases(CollectiveType.ALL_REDUCE, arrangement)
    inside = phase.sources // WIDEST == phase.targets // WIDEST
    out = np.zeros(int(arrangement.members.max()) + 1)
    np.add.at(out, phase.sources[inside], phase.share[inside])
    heads = np.isin(arrangement.members[0], arrangement.heads)
    assert out[arrangement.members[0]] == pytest.approx(1 + heads / min(per_domain))


@given(
    st.lists(st.integers(1, 6), min_size=2, max_size=6),
    st.sampled_from([CollNetChainAlgorithm(), CollNetDirectAlgorithm(), CollNetNvlsAlgorithm()]),
)
def test_adding_network_switches_take_and_give_each_domain_the_payload_once(per_domain, algorithm):
    """A ring or tree moves it out and in twice; heads share it evenly."""
    arrangement = filled(per_domain)
    phases = algorithm.phases(CollectiveType.ALL_REDUCE, arrangement)
    least = {CollNetChainAlgorithm: 1, CollNetDirectAlgorithm: 1 + (max(per_domain) == 1), CollNetNvlsAlgorithm: 2}[
        type(algorithm)
    ]
    if min(per_domain) < least:
        assert phases == ()
        return
    (phase,) = phases
    crosses = phase.sources // WIDEST != phase.targets // WIDEST
    for ends in (phase.sources, phase.targets):
        moved = np.zeros(int(arrangement.members.max()) + 1)
        np.add.at(moved, ends[crosses], phase.share[crosses])
        assert moved[arrangement.heads] == pytest.approx(1 / min(per_domain))
        assert moved.sum() == pytest.approx(len(per_domain))


@given(SHAPES, st.sampled_from([CollectiveType.BROADCAST, CollectiveType.REDUCE]))
def test_rooted_collectives_move_the_payload_n_minus_1_times(shape, kind):
    """Each rank but the root must receive (or contribute) the whole payload exactly once."""
    arrangement = arranged(*shape)
    for algorithm in (RingAlgorithm(), LinearAlgorithm(), TreeAlgorithm()):
        sent, received = volumes(algorithm, kind, arrangement)
        each = received if kind is CollectiveType.BROADCAST else sent
        total = each.reshape(shape[0], -1).sum(axis=1)
        assert total == pytest.approx(arrangement.size - 1)
        if not isinstance(algorithm, TreeAlgorithm):  # two trees and k chains have several roots
            root = arrangement.members[:, 0]
            assert each[root] == pytest.approx(0)


@given(UNEVEN, st.sampled_from([CollectiveType.BROADCAST, CollectiveType.REDUCE]))
def test_rings_of_rooted_collectives_cross_each_border_on_all_rails(per_domain, kind):
    """Every domain but the root's takes in (or gives away) the payload once, a k-th of it through each of k heads."""
    arrangement = filled(per_domain)
    (phase,) = RingAlgorithm().phases(kind, arrangement)
    into, out_of = (
        (phase.targets, phase.sources) if kind is CollectiveType.BROADCAST else (phase.sources, phase.targets)
    )
    crosses = into // WIDEST != out_of // WIDEST
    moved = np.zeros((len(per_domain), WIDEST))
    np.add.at(moved, (into[crosses] // WIDEST, into[crosses] % WIDEST), phase.share[crosses])
    assert moved.sum(axis=1) == pytest.approx([0.0] + [1.0] * (len(per_domain) - 1))
    assert moved.max() <= 1 / min(per_domain) + 1e-9
    total = np.zeros(int(arrangement.members.max()) + 1)
    np.add.at(total, into, phase.share)
    assert total.sum() == pytest.approx(arrangement.size - 1)


@given(SHAPES)
def test_scatter_and_gather_move_an_nth_for_each_other_rank(shape):
    arrangement = arranged(*shape)
    n = arrangement.size
    sent, _ = volumes(LinearAlgorithm(), CollectiveType.SCATTER, arrangement)
    _, received = volumes(LinearAlgorithm(), CollectiveType.GATHER, arrangement)
    assert sent[arrangement.members[:, 0]] == pytest.approx((n - 1) / n)
    assert received == pytest.approx(sent)


@given(st.integers(2, 70))
def test_aggregated_trees_deliver_every_block_once(n):
    arrangement = arranged(1, n, 1)
    for kind in (CollectiveType.ALL_GATHER, CollectiveType.REDUCE_SCATTER):
        sent, received = volumes(PatAlgorithm(), kind, arrangement)
        assert sent == pytest.approx(np.full(n, (n - 1) / n))
        assert received == pytest.approx(sent)


def test_aggregated_trees_serve_only_one_member_per_domain():
    assert PatAlgorithm().phases(CollectiveType.ALL_GATHER, arranged(1, 4, 2)) == ()


@given(st.integers(2, 8), st.integers(2, 8))
def test_hierarchy_saves_network_volume_by_the_domain_size(domains, local):
    """Between domains a rank carries only its rail's 1/k of the payload, twice round d domains: 2 (d-1)/d / k."""
    arrangement = arranged(1, domains, local)
    inside, between, outside = HierarchicalAlgorithm().phases(CollectiveType.ALL_REDUCE, arrangement)
    assert between.share == pytest.approx(2 * (domains - 1) / domains / local)
    assert inside.share == pytest.approx((local - 1) / local)
    assert outside.share == pytest.approx((local - 1) / local)
    assert (between.sources % local == between.targets % local).all()


@given(SHAPES)
def test_all_to_all_sends_every_rank_an_nth(shape):
    arrangement = arranged(*shape)
    n = arrangement.size
    sent, received = volumes(PairwiseAlgorithm(), CollectiveType.ALL_TO_ALL, arrangement)
    assert sent == pytest.approx(np.full_like(sent, (n - 1) / n))
    assert received == pytest.approx(sent)


@given(SHAPES)
def test_a_shift_sends_every_rank_all_parts_but_one_to_its_neighbour(shape):
    arrangement = arranged(*shape)
    n = arrangement.size
    (phase,) = PairwiseAlgorithm().phases(CollectiveType.SHIFT, arrangement)
    assert (phase.targets == np.roll(arrangement.members, -1, axis=1)).all()
    sent, received = volumes(PairwiseAlgorithm(), CollectiveType.SHIFT, arrangement)
    assert sent == pytest.approx(np.full_like(sent, (n - 1) / n))
    assert received == pytest.approx(sent)


def test_a_sample_of_distances_keeps_the_volume_and_the_local_part():
    """2,048 ranks in domains of 8: 7 of 2,047 peers are local; a sample may miss that by little."""
    arrangement = arranged(1, 256, 8)
    (phase,) = PairwiseAlgorithm().phases(CollectiveType.ALL_TO_ALL, arrangement)
    assert phase.sources.shape[1] < 2048 * 2047
    sent, _ = volumes(PairwiseAlgorithm(), CollectiveType.ALL_TO_ALL, arrangement)
    assert sent == pytest.approx(np.full(2048, 2047 / 2048))
    local = phase.share[phase.sources // 8 == phase.targets // 8].sum() / 2048
    assert local < 0.01


@given(st.integers(2, 8))
def test_adding_switches_carry_n_plus_1_nths_per_port(n):
    """Out: the whole payload to be added and the own n-th of the sum; in: the n-th and the whole sum."""
    sent, received = volumes(NvlsAlgorithm(), CollectiveType.ALL_REDUCE, arranged(1, 1, n))
    assert sent == pytest.approx(np.full(n, (n + 1) / n))
    assert received == pytest.approx(sent)


@given(st.integers(2, 200))
def test_the_binary_tree_spans_all_nodes_with_at_most_two_children_each(nodes):
    child, parent = binary_tree(nodes)
    assert sorted(child) == list(range(1, nodes))
    assert np.bincount(parent).max() <= 2
    levels = np.zeros(nodes, int)
    for start in range(1, nodes):
        node = start
        while node:
            node = int(parent[child == node][0])
            levels[start] += 1
    assert levels.max() <= tree_depth(nodes) + 1


@given(st.integers(3, 40), st.integers(1, 8))
def test_a_domain_sends_at_most_two_payloads_in_double_trees(domains, local):
    """Inside one tree: half up, halves to two children; leaf of the other: half up. 2 S in all, S / k more nowhere."""
    arrangement = arranged(1, domains, local)
    (phase,) = TreeAlgorithm().phases(CollectiveType.ALL_REDUCE, arrangement)
    crosses = phase.sources // local != phase.targets // local
    out = np.zeros(domains)
    np.add.at(out, phase.sources[crosses] // local, phase.share[crosses])
    assert out.max() <= 2 + 1e-9
    assert out.sum() == pytest.approx(2 * (domains - 1))
