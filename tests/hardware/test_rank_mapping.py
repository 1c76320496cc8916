"""A fabric under a job's rank mapping: the cluster's answers under the job's rank ids."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from clustersim.hardware.clos_fabric import ClosFabric
from clustersim.hardware.cluster import load_cluster
from clustersim.hardware.rank_mapping import RankMappedFabric
from tests.conftest import examples
from tests.hardware.conftest import MACHINES
from tests.hardware.degraded import HEALTHY


@st.composite
def rank_mapped_fabrics(draw: st.DrawFn) -> RankMappedFabric:
    """Some GPUs of a small machine, in any order."""
    machine = HEALTHY[draw(st.sampled_from(sorted(MACHINES)))]
    order = draw(st.permutations(range(machine.gpu_count)))
    return RankMappedFabric(machine, np.array(order[: draw(st.integers(1, machine.gpu_count))]))


def all_pairs(ranks: int) -> tuple[np.ndarray, np.ndarray]:
    return np.repeat(np.arange(ranks), ranks), np.tile(np.arange(ranks), ranks)


@given(rank_mapped_fabrics())
@examples(100)
def test_ranks_have_the_routes_of_their_gpus(fabric: RankMappedFabric) -> None:
    sources, targets = all_pairs(len(fabric.gpu_ids))
    rank_paths = fabric.find_paths(sources, targets)
    gpu_paths = fabric.machine.find_paths(fabric.gpu_ids[sources], fabric.gpu_ids[targets])
    assert (rank_paths.links == gpu_paths.links).all()
    assert (rank_paths.latency == gpu_paths.latency).all()


@given(rank_mapped_fabrics())
@examples(100)
def test_ranks_share_nodes_and_domains_as_their_gpus_do(fabric: RankMappedFabric) -> None:
    """Labels are others, but two ranks have one label exactly if their places have; the first label is 0."""
    ranks = np.arange(len(fabric.gpu_ids))
    for rank_labels, gpu_labels in (
        (fabric.domain_ids, fabric.machine.domain_ids),
        (fabric.node_ids, fabric.machine.node_ids),
    ):
        labels, expected = rank_labels(ranks), gpu_labels(fabric.gpu_ids)
        assert ((labels[:, None] == labels) == (expected[:, None] == expected)).all()
        _, first_rank = np.unique(labels, return_index=True)
        assert (np.diff(first_rank) > 0).all(), "numbered as they come"
        assert labels[0] == 0


@given(rank_mapped_fabrics())
@examples(100)
def test_link_ends_are_mapped_to_ranks(fabric: RankMappedFabric) -> None:
    """A rank's vertex is its place's, idle GPUs come after all ranks, and nothing else moves."""
    rank_ends, cluster_ends = fabric.link_endpoints, fabric.machine.link_endpoints
    assert rank_ends.vertex_count == cluster_ends.vertex_count
    vertex_map = np.concatenate([fabric.gpu_ids, np.setdiff1d(np.arange(fabric.gpu_count), fabric.gpu_ids)])
    vertex_map = np.concatenate([vertex_map, np.arange(fabric.gpu_count, rank_ends.vertex_count)])
    assert (vertex_map[rank_ends.source] == cluster_ends.source).all()
    assert (vertex_map[rank_ends.target] == cluster_ends.target).all()


@given(rank_mapped_fabrics(), st.data())
@examples(100)
def test_other_queries_are_delegated_to_the_cluster(fabric: RankMappedFabric, data: st.DataObject) -> None:
    ranks = np.array(data.draw(st.lists(st.integers(0, len(fabric.gpu_ids) - 1), min_size=1, max_size=4)))
    assert fabric.highest_tier(ranks) == fabric.machine.highest_tier(fabric.gpu_ids[ranks])
    assert fabric.nic_links(ranks).tolist() == fabric.machine.nic_links(fabric.gpu_ids[ranks]).tolist()
    fractions = np.linspace(0.5, 1.0, len(fabric.links.kind))
    assert fabric.with_degraded_links(fractions) == RankMappedFabric(
        fabric.machine.with_degraded_links(fractions), fabric.gpu_ids
    )
    assert (
        fabric.with_degraded_links(fractions).links.bandwidth
        == fabric.machine.with_degraded_links(fractions).links.bandwidth
    ).all()


def test_the_identity_mapping_equals_the_cluster(machine: ClosFabric) -> None:
    fabric, all_gpus = RankMappedFabric(machine, np.arange(machine.gpu_count)), np.arange(machine.gpu_count)
    assert (fabric.domain_ids(all_gpus) == machine.domain_ids(all_gpus)).all()
    assert (fabric.node_ids(all_gpus) == machine.node_ids(all_gpus)).all()
    assert (fabric.link_endpoints.source == machine.link_endpoints.source).all()
    assert fabric.rotation is machine.rotation
    assert fabric.describe_tiers() == machine.describe_tiers()
    assert {fabric: 1}[RankMappedFabric(machine, all_gpus)] == 1, "equal ones have one hash"


@pytest.mark.parametrize(
    ("order", "turns"),
    [
        (range(32), True),
        ([*range(16, 24), *range(8)], True),  # whole nodes, in another order
        ([*range(8), *range(15, 7, -1)], False),  # the GPUs of a node the other way round
        ([0, 8, 16, 24, 1, 9, 17, 25], False),  # round the nodes
        (range(12), False),  # half of a node
        (range(1, 9), False),  # parts of two nodes
    ],
)
def test_rotation_requires_full_nodes_in_order(order: list[int], *, turns: bool) -> None:
    machine = load_cluster("dgx-h100", 32).fabric
    assert isinstance(machine, ClosFabric)
    assert machine.rotation is not None
    assert RankMappedFabric(machine, np.array(order)).rotation is (machine.rotation if turns else None)
