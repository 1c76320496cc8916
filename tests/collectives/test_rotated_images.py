"""Where GPUs of a node can change places, a part of the flows tells what all of them do."""

from dataclasses import replace

import numpy as np
import pytest

from clustersim.collectives.library import load_library
from clustersim.collectives.phase import arrange
from clustersim.collectives.ring import Ring
from clustersim.collectives.rotated_images import images, one_of_each
from clustersim.collectives.tree import Tree
from clustersim.collectives.tuner import Surveyor, choose
from clustersim.hardware.clos_fabric import ClosFabric
from clustersim.hardware.cluster import load_cluster
from clustersim.hardware.ecmp import Hashed
from clustersim.hardware.topology import Fabric
from clustersim.parallel.layout import Layout
from clustersim.parallel.process_groups import process_groups
from clustersim.program.placement import looped_placement
from clustersim.program.task import CollectiveType

NCCL = load_library("nccl")
PAYLOADS = (4.0, 1e5, 1e9)
LAYOUTS = [
    Layout(tp=8, pp=4, dp=16),
    Layout(tp=4, cp=2, pp=4, dp=16),
    Layout(tp=2, pp=4, dp=64),
    Layout(tp=8, pp=8, dp=8, order=("tp", "pp", "cp", "dp")),
]


class Still:
    """The same fabric, but without a word of how GPUs can change places."""

    def __init__(self, fabric: Fabric) -> None:
        self._fabric = fabric

    def __getattr__(self, name: str) -> object:
        if name == "turn":
            raise AttributeError(name)
        return getattr(self._fabric, name)


def fabric_of(name: str, gpus: int = 512) -> ClosFabric:
    fabric = load_cluster(name, gpus).fabric
    assert isinstance(fabric, ClosFabric)
    return fabric


@pytest.mark.parametrize("name", ["dgx-h100", "llama3-roce"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_what_stands_for_its_images_costs_what_all_cost(name: str, layout: Layout) -> None:
    fabric = fabric_of(name)
    assert fabric.turn is not None
    for groups in process_groups(layout, looped_placement(layout.pp)).values():
        if groups.members.shape[1] < 2:
            continue
        for kind in (collective_type for collective_type in CollectiveType if not collective_type.is_token_routing):
            if kind is CollectiveType.SEND_RECV and groups.members.shape[1] != 2:
                continue
            turned, plain = (Surveyor(item, NCCL).survey(kind, groups.members) for item in (fabric, Still(fabric)))
            for payload in PAYLOADS:
                mine, theirs = choose(turned, payload), choose(plain, payload)
                assert mine.seconds == pytest.approx(theirs.seconds, rel=1e-12)
                assert mine.taken.tolist() == theirs.taken.tolist()


def test_a_turn_leads_every_route_to_the_route_of_the_turned_ends() -> None:
    """Link by link: orbits of a route are those of its image, and images of a link are as many as copies say."""
    for name in ("dgx-h100", "llama3-roce"):
        fabric = fabric_of(name)
        turn, sources = fabric.turn, np.random.default_rng(1).integers(0, 512, 400)
        assert turn is not None
        targets = np.random.default_rng(2).integers(0, 512, 400)
        once = [fabric.paths(_turned(sources, n), _turned(targets, n)) for n in range(turn.places)]
        links = np.stack([paths.links for paths in once])
        assert (turn.orbit[links] == turn.orbit[links[0]]).all()
        assert all((paths.latency == once[0].latency).all() for paths in once)
        for row, hop in zip(*np.nonzero(links[0] >= 0), strict=True):
            met = np.bincount(links[:, row, hop])
            assert set(met[met > 0].tolist()) == {int(turn.copies[turn.orbit[links[0, row, hop]]])}


def _turned(gpus: np.ndarray, places: int) -> np.ndarray:
    return gpus // 8 * 8 + (gpus % 8 + places) % 8


def test_hashed_routes_and_nodes_in_part_do_not_turn() -> None:
    whole = fabric_of("dgx-h100")
    assert whole.network is not None
    assert replace(whole, network=replace(whole.network, ecmp=Hashed(1))).turn is None
    assert replace(whole, gpus=508).turn is None
    assert fabric_of("dgx-h100", 8).turn is not None


def test_only_groups_whose_images_are_groups_stand_for_them() -> None:
    fabric = fabric_of("dgx-h100", 64)
    assert fabric.turn is not None
    rails = np.arange(64).reshape(8, 8).T
    found = images(rails, fabric.turn)
    assert found is not None
    assert (found.kept.tolist(), found.of.tolist()) == ([0], [0] * 8)
    crossed = rails.copy()
    crossed[[0, 1], 3] = crossed[[1, 0], 3]
    assert images(crossed, fabric.turn) is None
    assert images(rails[:7], fabric.turn) is None


def test_flows_over_whole_nodes_come_in_sets_of_images() -> None:
    fabric = fabric_of("dgx-h100", 64)
    assert fabric.turn is not None
    (world,) = arrange(np.arange(64)[None], fabric)
    (phase,) = Ring().phases(CollectiveType.ALL_GATHER, world)
    found = one_of_each(phase, fabric.turn)
    assert found is not None
    assert len(set((found.sources // 8).ravel().tolist())) == 8
    assert found.sources.size * 8 == phase.sources.size
    assert all(one_of_each(item, fabric.turn) for item in Tree().phases(CollectiveType.ALL_REDUCE, world))
    (fours,) = arrange(np.arange(64).reshape(16, 4), fabric)
    (halves,) = Ring().phases(CollectiveType.ALL_GATHER, fours)
    assert one_of_each(halves, fabric.turn) is None


@pytest.mark.parametrize("kind", [CollectiveType.ALL_REDUCE, CollectiveType.ALL_GATHER])
@pytest.mark.parametrize("payload", PAYLOADS)
def test_an_algorithm_left_out_could_not_have_been_the_fastest(kind: CollectiveType, payload: float) -> None:
    surveyor, members = Surveyor(fabric_of("dgx-h100"), NCCL), np.arange(512)[None]
    some, every = surveyor.survey(kind, members, payload), surveyor.survey(kind, members)
    assert choose(some, payload).seconds.tolist() == choose(every, payload).seconds.tolist()
    assert choose(some, payload).offer == choose(every, payload).offer
    assert len(some.offers) == len(every.offers) or choose(some, payload).certain


def test_small_payloads_leave_slow_algorithms_out() -> None:
    some = Surveyor(fabric_of("dgx-h100"), NCCL).survey(CollectiveType.ALL_REDUCE, np.arange(512)[None], 4.0)
    assert {offer.algorithm for offer in some.offers} == {"tree"}
