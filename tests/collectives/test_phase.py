"""Members of groups are sorted by domain, so that algorithms can use the NIC of every member."""

import numpy as np
import pytest

from clustersim.collectives.phase import group_topology
from clustersim.collectives.ring import RingAlgorithm
from clustersim.program.task import CollectiveType
from tests.collectives.fake_fabric import FakeFabric


def test_regular_groups_keep_their_members_by_domain():
    fabric = FakeFabric(16, 4)
    (topology,) = group_topology(np.array([[0, 8, 1, 9], [2, 10, 3, 11]]), fabric)
    assert topology.members.tolist() == [[0, 1, 8, 9], [2, 3, 10, 11]]
    assert topology.heads.tolist() == [[[0, 1], [8, 9]], [[2, 3], [10, 11]]]
    assert topology.domain_count == 2


def test_the_root_comes_first_even_in_a_higher_domain():
    (topology,) = group_topology(np.array([[9, 1, 8, 0]]), FakeFabric(16, 4))
    assert topology.members.tolist() == [[9, 8, 1, 0]]


def test_uneven_domains_have_as_many_rails_as_the_smallest_has_members():
    (topology,) = group_topology(np.array([[0, 1, 2, 4, 5, 8, 9, 10]]), FakeFabric(12, 4))
    assert (topology.domain_sizes, topology.rails, topology.domain_count) == ((3, 2, 3), 2, 3)
    assert topology.heads.tolist() == [[[0, 1], [4, 5], [8, 9]]]
    assert [array.tolist() for array in topology.domains_by_size] == [[[[0, 1, 2], [8, 9, 10]]], [[[4, 5]]]]


def test_a_ring_through_uneven_domains_crosses_each_border_once_per_pass():
    (topology,) = group_topology(np.array([[0, 1, 4]]), FakeFabric(8, 4))
    (phase,) = RingAlgorithm().phases(CollectiveType.ALL_REDUCE, topology)
    assert (phase.latency_steps.network, phase.latency_steps.local) == (
        2,
        2,
    )  # one crossing and back per pass of two latency steps
    crosses_domains = phase.sources // 4 != phase.targets // 4
    assert sorted(
        zip(phase.sources[crosses_domains].tolist(), phase.targets[crosses_domains].tolist(), strict=True)
    ) == [
        (0, 4),
        (4, 0),
    ]


def test_groups_of_different_shapes_have_separate_topologies():
    groups = np.array([[0, 1, 2, 4], [8, 12, 13, 14], [16, 17, 18, 20]])
    first, second = sorted(
        group_topology(groups, FakeFabric(24, 4)), key=lambda topology: topology.domain_sizes, reverse=True
    )
    assert (first.domain_sizes, first.group_indices.tolist()) == ((3, 1), [0, 2])
    assert (second.domain_sizes, second.group_indices.tolist()) == ((1, 3), [1])


def test_nodes_replace_domains_where_they_contain_several():
    class PcieFabric(FakeFabric):
        def domain_ids(self, gpus):
            return gpus

        def node_ids(self, gpus):
            return gpus // 4

    (topology,) = group_topology(np.arange(8)[None], PcieFabric(8, 4))
    assert topology.domain_sizes == (4, 4)
    assert not topology.is_switched


@pytest.mark.parametrize("domains", [2, 4, 6])
def test_rings_between_domains_stay_on_their_rail_and_use_all_of_them(domains):
    domain_size = 4
    fabric = FakeFabric(domains * domain_size, domain_size)
    (topology,) = group_topology(np.arange(domains * domain_size)[None], fabric)
    (phase,) = RingAlgorithm().phases(CollectiveType.ALL_GATHER, topology)
    crosses_domains = phase.sources // domain_size != phase.targets // domain_size
    assert (phase.sources[crosses_domains] % domain_size == phase.targets[crosses_domains] % domain_size).all()
    assert len(np.unique(phase.sources[crosses_domains])) == domains * domain_size
