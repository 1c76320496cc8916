"""Where GPUs of a node can change places, a part of the flows tells what all of them do."""

from dataclasses import replace

import numpy as np
import pytest

from clustersim.collectives.library import load_library
from clustersim.collectives.phase import group_topology
from clustersim.collectives.ring import RingAlgorithm
from clustersim.collectives.rotated_images import representative_flows, rotated_images
from clustersim.collectives.tree import TreeAlgorithm
from clustersim.collectives.tuner import Tuner, select_variants
from clustersim.hardware.clos_fabric import ClosFabric
from clustersim.hardware.cluster import load_cluster
from clustersim.hardware.ecmp import HashedEcmp
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
    assert fabric.rotation is not None
    for groups in process_groups(layout, looped_placement(layout.pp)).values():
        if groups.members.shape[1] < 2:
            continue
        for kind in (collective_type for collective_type in CollectiveType if not collective_type.is_token_routing):
            if kind is CollectiveType.SEND_RECV and groups.members.shape[1] != 2:
                continue
            turned, plain = (
                Tuner(item, NCCL).evaluate_variants(kind, groups.members) for item in (fabric, Still(fabric))
            )
            for payload in PAYLOADS:
                mine, theirs = select_variants(turned, payload), select_variants(plain, payload)
                assert mine.seconds == pytest.approx(theirs.seconds, rel=1e-12)
                assert mine.variant_index.tolist() == theirs.variant_index.tolist()


def test_a_turn_leads_every_route_to_the_route_of_the_turned_ends() -> None:
    """Link by link: orbits of a route are those of its image, and images of a link are as many as copies say."""
    for name in ("dgx-h100", "llama3-roce"):
        fabric = fabric_of(name)
        turn, sources = fabric.rotation, np.random.default_rng(1).integers(0, 512, 400)
        assert turn is not None
        targets = np.random.default_rng(2).integers(0, 512, 400)
        once = [fabric.find_paths(_turned(sources, n), _turned(targets, n)) for n in range(turn.period)]
        links = np.stack([paths.links for paths in once])
        assert (turn.orbit_of_link[links] == turn.orbit_of_link[links[0]]).all()
        assert all((paths.latency == once[0].latency).all() for paths in once)
        for row, hop in zip(*np.nonzero(links[0] >= 0), strict=True):
            met = np.bincount(links[:, row, hop])
            assert set(met[met > 0].tolist()) == {int(turn.multiplicity[turn.orbit_of_link[links[0, row, hop]]])}


def _turned(gpus: np.ndarray, places: int) -> np.ndarray:
    return gpus // 8 * 8 + (gpus % 8 + places) % 8


def test_hashed_routes_and_nodes_in_part_do_not_turn() -> None:
    whole = fabric_of("dgx-h100")
    assert whole.network is not None
    assert replace(whole, network=replace(whole.network, ecmp=HashedEcmp(1))).rotation is None
    assert replace(whole, gpu_count=508).rotation is None
    assert fabric_of("dgx-h100", 8).rotation is not None


def test_only_groups_whose_images_are_groups_stand_for_them() -> None:
    fabric = fabric_of("dgx-h100", 64)
    assert fabric.rotation is not None
    rails = np.arange(64).reshape(8, 8).T
    found = rotated_images(rails, fabric.rotation)
    assert found is not None
    assert (found.representatives.tolist(), found.representative_index.tolist()) == ([0], [0] * 8)
    crossed = rails.copy()
    crossed[[0, 1], 3] = crossed[[1, 0], 3]
    assert rotated_images(crossed, fabric.rotation) is None
    assert rotated_images(rails[:7], fabric.rotation) is None


def test_flows_over_whole_nodes_come_in_sets_of_images() -> None:
    fabric = fabric_of("dgx-h100", 64)
    assert fabric.rotation is not None
    (world,) = group_topology(np.arange(64)[None], fabric)
    (phase,) = RingAlgorithm().phases(CollectiveType.ALL_GATHER, world)
    found = representative_flows(phase, fabric.rotation)
    assert found is not None
    assert len(set((found.sources // 8).ravel().tolist())) == 8
    assert found.sources.size * 8 == phase.sources.size
    assert all(
        representative_flows(item, fabric.rotation) for item in TreeAlgorithm().phases(CollectiveType.ALL_REDUCE, world)
    )
    (fours,) = group_topology(np.arange(64).reshape(16, 4), fabric)
    (halves,) = RingAlgorithm().phases(CollectiveType.ALL_GATHER, fours)
    assert representative_flows(halves, fabric.rotation) is None


@pytest.mark.parametrize("kind", [CollectiveType.ALL_REDUCE, CollectiveType.ALL_GATHER])
@pytest.mark.parametrize("payload", PAYLOADS)
def test_an_algorithm_left_out_could_not_have_been_the_fastest(kind: CollectiveType, payload: float) -> None:
    surveyor, members = Tuner(fabric_of("dgx-h100"), NCCL), np.arange(512)[None]
    some, every = surveyor.evaluate_variants(kind, members, payload), surveyor.evaluate_variants(kind, members)
    assert select_variants(some, payload).seconds.tolist() == select_variants(every, payload).seconds.tolist()
    assert select_variants(some, payload).slowest_variant == select_variants(every, payload).slowest_variant
    assert len(some.variants) == len(every.variants) or select_variants(some, payload).is_certain


def test_small_payloads_leave_slow_algorithms_out() -> None:
    some = Tuner(fabric_of("dgx-h100"), NCCL).evaluate_variants(CollectiveType.ALL_REDUCE, np.arange(512)[None], 4.0)
    assert {offer.algorithm for offer in some.variants} == {"tree"}
