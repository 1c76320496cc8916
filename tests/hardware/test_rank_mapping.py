"""A machine as a job sees it: the machine's answers, under the job's numbers."""

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
def placed(draw: st.DrawFn) -> RankMappedFabric:
    """Some GPUs of a small machine, in any order."""
    machine = HEALTHY[draw(st.sampled_from(sorted(MACHINES)))]
    order = draw(st.permutations(range(machine.gpu_count)))
    return RankMappedFabric(machine, np.array(order[: draw(st.integers(1, machine.gpu_count))]))


def pairs(ranks: int) -> tuple[np.ndarray, np.ndarray]:
    return np.repeat(np.arange(ranks), ranks), np.tile(np.arange(ranks), ranks)


@given(placed())
@examples(100)
def test_ranks_have_the_routes_of_their_places(fabric: RankMappedFabric) -> None:
    sources, targets = pairs(len(fabric.gpu_ids))
    mine = fabric.find_paths(sources, targets)
    machines = fabric.machine.find_paths(fabric.gpu_ids[sources], fabric.gpu_ids[targets])
    assert (mine.links == machines.links).all()
    assert (mine.latency == machines.latency).all()


@given(placed())
@examples(100)
def test_ranks_share_nodes_and_domains_where_their_places_do(fabric: RankMappedFabric) -> None:
    """Labels are others, but two ranks have one label exactly if their places have; the first label is 0."""
    ranks = np.arange(len(fabric.gpu_ids))
    for mine, machines in ((fabric.domain_ids, fabric.machine.domain_ids), (fabric.node_ids, fabric.machine.node_ids)):
        labels, theirs = mine(ranks), machines(fabric.gpu_ids)
        assert ((labels[:, None] == labels) == (theirs[:, None] == theirs)).all()
        _, first = np.unique(labels, return_index=True)
        assert (np.diff(first) > 0).all(), "numbered as they come"
        assert labels[0] == 0


@given(placed())
@examples(100)
def test_links_end_where_the_machines_do(fabric: RankMappedFabric) -> None:
    """A rank's vertex is its place's, idle GPUs come after all ranks, and nothing else moves."""
    mine, machines = fabric.link_endpoints, fabric.machine.link_endpoints
    assert mine.vertex_count == machines.vertex_count
    place = np.concatenate([fabric.gpu_ids, np.setdiff1d(np.arange(fabric.gpu_count), fabric.gpu_ids)])
    place = np.concatenate([place, np.arange(fabric.gpu_count, mine.vertex_count)])
    assert (place[mine.source] == machines.source).all()
    assert (place[mine.target] == machines.target).all()


@given(placed(), st.data())
@examples(100)
def test_the_rest_is_asked_of_the_machine(fabric: RankMappedFabric, data: st.DataObject) -> None:
    ranks = np.array(data.draw(st.lists(st.integers(0, len(fabric.gpu_ids) - 1), min_size=1, max_size=4)))
    assert fabric.highest_tier(ranks) == fabric.machine.highest_tier(fabric.gpu_ids[ranks])
    assert fabric.nic_links(ranks).tolist() == fabric.machine.nic_links(fabric.gpu_ids[ranks]).tolist()
    left = np.linspace(0.5, 1.0, len(fabric.links.kind))
    assert fabric.with_degraded_links(left) == RankMappedFabric(
        fabric.machine.with_degraded_links(left), fabric.gpu_ids
    )
    assert (
        fabric.with_degraded_links(left).links.bandwidth == fabric.machine.with_degraded_links(left).links.bandwidth
    ).all()


def test_ranks_that_are_the_machines_gpus_see_the_machine(machine: ClosFabric) -> None:
    fabric, everyone = RankMappedFabric(machine, np.arange(machine.gpu_count)), np.arange(machine.gpu_count)
    assert (fabric.domain_ids(everyone) == machine.domain_ids(everyone)).all()
    assert (fabric.node_ids(everyone) == machine.node_ids(everyone)).all()
    assert (fabric.link_endpoints.source == machine.link_endpoints.source).all()
    assert fabric.rotation is machine.rotation
    assert fabric.describe_tiers() == machine.describe_tiers()
    assert {fabric: 1}[RankMappedFabric(machine, everyone)] == 1, "equal ones have one hash"


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
def test_ranks_change_places_where_they_fill_nodes_in_order(order: list[int], *, turns: bool) -> None:
    machine = load_cluster("dgx-h100", 32).fabric
    assert isinstance(machine, ClosFabric)
    assert machine.rotation is not None
    assert RankMappedFabric(machine, np.array(order)).rotation is (machine.rotation if turns else None)
