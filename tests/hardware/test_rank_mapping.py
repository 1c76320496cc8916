"""A machine as a job sees it: the machine's answers, under the job's numbers."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from clustersim.hardware.clos_fabric import ClosFabric
from clustersim.hardware.cluster import load_cluster
from clustersim.hardware.rank_mapping import Placed
from tests.conftest import examples
from tests.hardware.conftest import MACHINES
from tests.hardware.degraded import HEALTHY


@st.composite
def placed(draw: st.DrawFn) -> Placed:
    """Some GPUs of a small machine, in any order."""
    machine = HEALTHY[draw(st.sampled_from(sorted(MACHINES)))]
    order = draw(st.permutations(range(machine.gpus)))
    return Placed(machine, np.array(order[: draw(st.integers(1, machine.gpus))]))


def pairs(ranks: int) -> tuple[np.ndarray, np.ndarray]:
    return np.repeat(np.arange(ranks), ranks), np.tile(np.arange(ranks), ranks)


@given(placed())
@examples(100)
def test_ranks_have_the_routes_of_their_places(fabric: Placed) -> None:
    sources, targets = pairs(len(fabric.places))
    mine = fabric.paths(sources, targets)
    machines = fabric.machine.paths(fabric.places[sources], fabric.places[targets])
    assert (mine.links == machines.links).all()
    assert (mine.latency == machines.latency).all()


@given(placed())
@examples(100)
def test_ranks_share_nodes_and_domains_where_their_places_do(fabric: Placed) -> None:
    """Labels are others, but two ranks have one label exactly if their places have; the first label is 0."""
    ranks = np.arange(len(fabric.places))
    for mine, machines in ((fabric.domains, fabric.machine.domains), (fabric.nodes, fabric.machine.nodes)):
        labels, theirs = mine(ranks), machines(fabric.places)
        assert ((labels[:, None] == labels) == (theirs[:, None] == theirs)).all()
        _, first = np.unique(labels, return_index=True)
        assert (np.diff(first) > 0).all(), "numbered as they come"
        assert labels[0] == 0


@given(placed())
@examples(100)
def test_links_end_where_the_machines_do(fabric: Placed) -> None:
    """A rank's vertex is its place's, idle GPUs come after all ranks, and nothing else moves."""
    mine, machines = fabric.ends, fabric.machine.ends
    assert mine.vertices == machines.vertices
    place = np.concatenate([fabric.places, np.setdiff1d(np.arange(fabric.gpus), fabric.places)])
    place = np.concatenate([place, np.arange(fabric.gpus, mine.vertices)])
    assert (place[mine.source] == machines.source).all()
    assert (place[mine.target] == machines.target).all()


@given(placed(), st.data())
@examples(100)
def test_the_rest_is_asked_of_the_machine(fabric: Placed, data: st.DataObject) -> None:
    ranks = np.array(data.draw(st.lists(st.integers(0, len(fabric.places) - 1), min_size=1, max_size=4)))
    assert fabric.tier(ranks) == fabric.machine.tier(fabric.places[ranks])
    assert fabric.nics(ranks).tolist() == fabric.machine.nics(fabric.places[ranks]).tolist()
    left = np.linspace(0.5, 1.0, len(fabric.links.kind))
    assert fabric.changed(left) == Placed(fabric.machine.changed(left), fabric.places)
    assert (fabric.changed(left).links.bandwidth == fabric.machine.changed(left).links.bandwidth).all()


def test_ranks_that_are_the_machines_gpus_see_the_machine(machine: ClosFabric) -> None:
    fabric, everyone = Placed(machine, np.arange(machine.gpus)), np.arange(machine.gpus)
    assert (fabric.domains(everyone) == machine.domains(everyone)).all()
    assert (fabric.nodes(everyone) == machine.nodes(everyone)).all()
    assert (fabric.ends.source == machine.ends.source).all()
    assert fabric.turn is machine.turn
    assert fabric.tiers() == machine.tiers()
    assert {fabric: 1}[Placed(machine, everyone)] == 1, "equal ones have one hash"


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
    assert machine.turn is not None
    assert Placed(machine, np.array(order)).turn is (machine.turn if turns else None)
