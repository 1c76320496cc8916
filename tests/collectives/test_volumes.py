"""Each algorithm moves its textbook volume, on groups of any shape."""

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
SIDE_LENGTHS = st.tuples(st.integers(1, 3), st.integers(1, 9), st.integers(1, 8))
SHAPES = SIDE_LENGTHS.filter(lambda shape: shape[1] * shape[2] > 1)
UNEVEN = st.lists(st.integers(1, 6), min_size=1, max_size=6).filter(lambda per_domain: sum(per_domain) > 1)
DOMAIN_SIZE = 6
PASSES = [(CollectiveType.ALL_REDUCE, 2), (CollectiveType.ALL_GATHER, 1), (CollectiveType.REDUCE_SCATTER, 1)]


def even_topology(groups: int, domains: int, per_domain: int) -> GroupTopology:
    """Topology of groups that fill the domains of a fabric of exactly that size."""
    gpus = groups * domains * per_domain
    (topology,) = group_topology(np.arange(gpus).reshape(groups, -1), FakeFabric(gpus, per_domain))
    return topology


def uneven_topology(per_domain: list[int]) -> GroupTopology:
    """Topology of one group with these member counts in the domains."""
    members = [DOMAIN_SIZE * domain + index for domain, count in enumerate(per_domain) for index in range(count)]
    (topology,) = group_topology(np.array([members]), FakeFabric(DOMAIN_SIZE * len(per_domain), DOMAIN_SIZE))
    return topology


def gpu_volumes(
    algorithm: CollectiveAlgorithm, kind: CollectiveType, topology: GroupTopology
) -> tuple[np.ndarray, np.ndarray]:
    """Payloads that each GPU sends and receives, summed over the phases."""
    sent, received = np.zeros((2, int(topology.members.max()) + 1))
    for phase in algorithm.phases(kind, topology):
        np.add.at(sent, phase.sources, phase.share)
        np.add.at(received, phase.targets, phase.share)
    return sent, received


@given(SHAPES, st.sampled_from(ALGORITHMS), st.sampled_from(CollectiveType))
def test_sent_bytes_are_received_within_the_group(shape, algorithm, kind):
    topology = even_topology(*shape)
    sent, received = gpu_volumes(algorithm, kind, topology)
    assert sent.sum() == pytest.approx(received.sum())
    size = topology.size
    for phase in algorithm.phases(kind, topology):
        assert (phase.sources // size == phase.targets // size).all()
        assert (phase.sources // size == np.arange(shape[0])[:, None]).all()
        assert (phase.share >= 0).all()


@given(SHAPES, st.sampled_from(PASSES))
def test_every_rank_of_a_ring_sends_and_receives_n_minus_1_nths_per_pass(shape, collective):
    """A rank forwards all n shards of the payload but one, once for all-gather, twice for all-reduce."""
    kind, passes = collective
    topology = even_topology(*shape)
    n = topology.size
    sent, received = gpu_volumes(RingAlgorithm(), kind, topology)
    assert sent == pytest.approx(np.full_like(sent, passes * (n - 1) / n))
    assert received == pytest.approx(sent)


@given(UNEVEN, st.sampled_from(PASSES))
def test_rings_and_trees_move_their_textbook_volume_through_uneven_domains(per_domain, collective):
    """Rings: n-1 n-ths of the payload from each of n ranks per pass; trees: n-1 edges, each passed up and down."""
    kind, passes = collective
    topology = uneven_topology(per_domain)
    n = topology.size
    sent, received = gpu_volumes(RingAlgorithm(), kind, topology)
    assert sent.sum() == pytest.approx(received.sum()) == pytest.approx(passes * (n - 1))
    (phase,) = RingAlgorithm().phases(kind, topology)
    domain_sent = np.zeros(len(per_domain))
    crosses_domains = phase.sources // DOMAIN_SIZE != phase.targets // DOMAIN_SIZE
    np.add.at(domain_sent, phase.sources[crosses_domains] // DOMAIN_SIZE, phase.share[crosses_domains])
    assert domain_sent == pytest.approx(np.full(len(domain_sent), passes * (n - 1) / n * (len(domain_sent) > 1)))
    sent, _ = gpu_volumes(TreeAlgorithm(), CollectiveType.ALL_REDUCE, topology)
    assert sent.sum() == pytest.approx(2 * (n - 1))


@given(st.lists(st.integers(2, 6), min_size=2, max_size=6))
def test_nvls_loads_heads_by_their_share_and_all_ranks_by_the_payload(per_domain):
    """Each member's payload is read and the sum stored to it; each of k heads also loads and stores a k-th."""
    topology = uneven_topology(per_domain)
    (phase,) = NvlsAlgorithm().phases(CollectiveType.ALL_REDUCE, topology)
    within_domain = phase.sources // DOMAIN_SIZE == phase.targets // DOMAIN_SIZE
    sent = np.zeros(int(topology.members.max()) + 1)
    np.add.at(sent, phase.sources[within_domain], phase.share[within_domain])
    is_head = np.isin(topology.members[0], topology.heads)
    assert sent[topology.members[0]] == pytest.approx(1 + is_head / min(per_domain))


@given(
    st.lists(st.integers(1, 6), min_size=2, max_size=6),
    st.sampled_from([CollNetChainAlgorithm(), CollNetDirectAlgorithm(), CollNetNvlsAlgorithm()]),
)
def test_collnet_sends_and_receives_the_payload_once_per_domain(per_domain, algorithm):
    """Rings and trees move it out and in twice; heads share it evenly."""
    topology = uneven_topology(per_domain)
    phases = algorithm.phases(CollectiveType.ALL_REDUCE, topology)
    min_members = {
        CollNetChainAlgorithm: 1,
        CollNetDirectAlgorithm: 1 + (max(per_domain) == 1),
        CollNetNvlsAlgorithm: 2,
    }[type(algorithm)]
    if min(per_domain) < min_members:
        assert phases == ()
        return
    (phase,) = phases
    crosses_domains = phase.sources // DOMAIN_SIZE != phase.targets // DOMAIN_SIZE
    for ends in (phase.sources, phase.targets):
        moved = np.zeros(int(topology.members.max()) + 1)
        np.add.at(moved, ends[crosses_domains], phase.share[crosses_domains])
        assert moved[topology.heads] == pytest.approx(1 / min(per_domain))
        assert moved.sum() == pytest.approx(len(per_domain))


@given(SHAPES, st.sampled_from([CollectiveType.BROADCAST, CollectiveType.REDUCE]))
def test_rooted_collectives_move_the_payload_n_minus_1_times(shape, kind):
    """Each rank but the root must receive (or contribute) the full payload exactly once."""
    topology = even_topology(*shape)
    for algorithm in (RingAlgorithm(), LinearAlgorithm(), TreeAlgorithm()):
        sent, received = gpu_volumes(algorithm, kind, topology)
        volume = received if kind is CollectiveType.BROADCAST else sent
        total = volume.reshape(shape[0], -1).sum(axis=1)
        assert total == pytest.approx(topology.size - 1)
        if not isinstance(algorithm, TreeAlgorithm):  # two trees and k chains have several roots
            root = topology.members[:, 0]
            assert volume[root] == pytest.approx(0)


@given(UNEVEN, st.sampled_from([CollectiveType.BROADCAST, CollectiveType.REDUCE]))
def test_rings_of_rooted_collectives_cross_each_border_on_all_rails(per_domain, kind):
    """Every domain but the root's receives (or sends) the payload once, a k-th of it through each of k heads."""
    topology = uneven_topology(per_domain)
    (phase,) = RingAlgorithm().phases(kind, topology)
    to_gpus, from_gpus = (
        (phase.targets, phase.sources) if kind is CollectiveType.BROADCAST else (phase.sources, phase.targets)
    )
    crosses_domains = to_gpus // DOMAIN_SIZE != from_gpus // DOMAIN_SIZE
    moved = np.zeros((len(per_domain), DOMAIN_SIZE))
    np.add.at(
        moved,
        (to_gpus[crosses_domains] // DOMAIN_SIZE, to_gpus[crosses_domains] % DOMAIN_SIZE),
        phase.share[crosses_domains],
    )
    assert moved.sum(axis=1) == pytest.approx([0.0] + [1.0] * (len(per_domain) - 1))
    assert moved.max() <= 1 / min(per_domain) + 1e-9
    total = np.zeros(int(topology.members.max()) + 1)
    np.add.at(total, to_gpus, phase.share)
    assert total.sum() == pytest.approx(topology.size - 1)


@given(SHAPES)
def test_scatter_and_gather_move_an_nth_per_other_rank(shape):
    topology = even_topology(*shape)
    n = topology.size
    sent, _ = gpu_volumes(LinearAlgorithm(), CollectiveType.SCATTER, topology)
    _, received = gpu_volumes(LinearAlgorithm(), CollectiveType.GATHER, topology)
    assert sent[topology.members[:, 0]] == pytest.approx((n - 1) / n)
    assert received == pytest.approx(sent)


@given(st.integers(2, 70))
def test_pat_delivers_every_shard_once(n):
    topology = even_topology(1, n, 1)
    for kind in (CollectiveType.ALL_GATHER, CollectiveType.REDUCE_SCATTER):
        sent, received = gpu_volumes(PatAlgorithm(), kind, topology)
        assert sent == pytest.approx(np.full(n, (n - 1) / n))
        assert received == pytest.approx(sent)


def test_pat_supports_only_one_member_per_domain():
    assert PatAlgorithm().phases(CollectiveType.ALL_GATHER, even_topology(1, 4, 2)) == ()


@given(st.integers(2, 8), st.integers(2, 8))
def test_hierarchical_divides_the_network_volume_by_the_domain_size(domains, local):
    """Between domains a rank carries only its rail's 1/k of the payload, twice around d domains: 2 (d-1)/d / k."""
    topology = even_topology(1, domains, local)
    reduce_scatter, all_reduce, all_gather = HierarchicalAlgorithm().phases(CollectiveType.ALL_REDUCE, topology)
    assert all_reduce.share == pytest.approx(2 * (domains - 1) / domains / local)
    assert reduce_scatter.share == pytest.approx((local - 1) / local)
    assert all_gather.share == pytest.approx((local - 1) / local)
    assert (all_reduce.sources % local == all_reduce.targets % local).all()


@given(SHAPES)
def test_all_to_all_sends_every_rank_an_nth(shape):
    topology = even_topology(*shape)
    n = topology.size
    sent, received = gpu_volumes(PairwiseAlgorithm(), CollectiveType.ALL_TO_ALL, topology)
    assert sent == pytest.approx(np.full_like(sent, (n - 1) / n))
    assert received == pytest.approx(sent)


@given(SHAPES)
def test_a_shift_sends_all_shards_but_one_to_the_next_rank(shape):
    topology = even_topology(*shape)
    n = topology.size
    (phase,) = PairwiseAlgorithm().phases(CollectiveType.SHIFT, topology)
    assert (phase.targets == np.roll(topology.members, -1, axis=1)).all()
    sent, received = gpu_volumes(PairwiseAlgorithm(), CollectiveType.SHIFT, topology)
    assert sent == pytest.approx(np.full_like(sent, (n - 1) / n))
    assert received == pytest.approx(sent)


def test_sampled_all_to_all_distances_keep_volume_and_local_share():
    """2,048 ranks in domains of 8: 7 of 2,047 peers are local; a sample may miss that by little."""
    topology = even_topology(1, 256, 8)
    (phase,) = PairwiseAlgorithm().phases(CollectiveType.ALL_TO_ALL, topology)
    assert phase.sources.shape[1] < 2048 * 2047
    sent, _ = gpu_volumes(PairwiseAlgorithm(), CollectiveType.ALL_TO_ALL, topology)
    assert sent == pytest.approx(np.full(2048, 2047 / 2048))
    local_share = phase.share[phase.sources // 8 == phase.targets // 8].sum() / 2048
    assert local_share < 0.01


@given(st.integers(2, 8))
def test_nvls_carries_n_plus_1_nths_per_port(n):
    """Out: the full payload to be added and the rank's n-th of the sum; in: the n-th and the full sum."""
    sent, received = gpu_volumes(NvlsAlgorithm(), CollectiveType.ALL_REDUCE, even_topology(1, 1, n))
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
def test_a_domain_sends_at_most_two_payloads_in_double_binary_trees(domains, local):
    """Inner node of one tree: half up, halves to two children; leaf of the other: half up. 2 S in total at most."""
    topology = even_topology(1, domains, local)
    (phase,) = TreeAlgorithm().phases(CollectiveType.ALL_REDUCE, topology)
    crosses_domains = phase.sources // local != phase.targets // local
    domain_sent = np.zeros(domains)
    np.add.at(domain_sent, phase.sources[crosses_domains] // local, phase.share[crosses_domains])
    assert domain_sent.max() <= 2 + 1e-9
    assert domain_sent.sum() == pytest.approx(2 * (domains - 1))
