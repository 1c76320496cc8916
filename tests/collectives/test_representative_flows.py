"""Where the GPUs of a node are interchangeable by rotation, representative flows give the cost of all."""

from dataclasses import replace

import numpy as np
import pytest

from clustersim.collectives.library_files import load_library
from clustersim.collectives.phase import group_topology
from clustersim.collectives.representative_flows import representative_flows
from clustersim.collectives.ring import RingAlgorithm
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


class WithoutRotation:
    """The same fabric without its rotation."""

    def __init__(self, fabric: Fabric) -> None:
        self._fabric = fabric

    def __getattr__(self, name: str) -> object:
        if name == "rotation":
            raise AttributeError(name)
        return getattr(self._fabric, name)


def clos_fabric(name: str, gpus: int = 512) -> ClosFabric:
    fabric = load_cluster(name, gpus).fabric
    assert isinstance(fabric, ClosFabric)
    return fabric


@pytest.mark.parametrize("name", ["dgx-h100", "llama3-roce"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_costs_from_representative_flows_equal_the_full_costs(name: str, layout: Layout) -> None:
    fabric = clos_fabric(name)
    assert fabric.rotation is not None
    for groups in process_groups(layout, looped_placement(layout.pp)).values():
        if groups.members.shape[1] < 2:
            continue
        for kind in (collective_type for collective_type in CollectiveType if not collective_type.is_token_routing):
            if kind is CollectiveType.SEND_RECV and groups.members.shape[1] != 2:
                continue
            reduced_costs, full_costs = (
                Tuner(item, NCCL).evaluate_variants(kind, groups.members) for item in (fabric, WithoutRotation(fabric))
            )
            for payload in PAYLOADS:
                reduced, full = select_variants(reduced_costs, payload), select_variants(full_costs, payload)
                assert reduced.seconds == pytest.approx(full.seconds, rel=1e-12)
                assert reduced.variant_index.tolist() == full.variant_index.tolist()


def test_a_rotation_maps_routes_to_routes_of_the_rotated_endpoints() -> None:
    """Link by link: a route and its image have the same orbits, and a link has as many images as `copies` counts."""
    for name in ("dgx-h100", "llama3-roce"):
        fabric = clos_fabric(name)
        rotation, sources = fabric.rotation, np.random.default_rng(1).integers(0, 512, 400)
        assert rotation is not None
        targets = np.random.default_rng(2).integers(0, 512, 400)
        rotated_paths = [fabric.find_paths(_rotated(sources, n), _rotated(targets, n)) for n in range(rotation.period)]
        links = np.stack([paths.links for paths in rotated_paths])
        assert (rotation.orbit_of_link[links] == rotation.orbit_of_link[links[0]]).all()
        assert all((paths.latency == rotated_paths[0].latency).all() for paths in rotated_paths)
        for flow, hop in zip(*np.nonzero(links[0] >= 0), strict=True):
            image_counts = np.bincount(links[:, flow, hop])
            assert set(image_counts[image_counts > 0].tolist()) == {
                int(rotation.multiplicity[rotation.orbit_of_link[links[0, flow, hop]]])
            }


def _rotated(gpus: np.ndarray, positions: int) -> np.ndarray:
    return gpus // 8 * 8 + (gpus % 8 + positions) % 8


def test_hashed_ecmp_and_partial_nodes_have_no_rotation() -> None:
    fabric = clos_fabric("dgx-h100")
    assert fabric.network is not None
    assert replace(fabric, network=replace(fabric.network, ecmp=HashedEcmp(1))).rotation is None
    assert replace(fabric, gpu_count=508).rotation is None
    assert clos_fabric("dgx-h100", 8).rotation is not None


def test_flows_over_full_nodes_reduce_to_representatives() -> None:
    fabric = clos_fabric("dgx-h100", 64)
    assert fabric.rotation is not None
    (world,) = group_topology(np.arange(64)[None], fabric)
    (phase,) = RingAlgorithm().phases(CollectiveType.ALL_GATHER, world)
    representatives = representative_flows(phase, fabric.rotation)
    assert representatives is not None
    assert len(set((representatives.sources // 8).ravel().tolist())) == 8
    assert representatives.sources.size * 8 == phase.sources.size
    assert all(
        representative_flows(item, fabric.rotation) for item in TreeAlgorithm().phases(CollectiveType.ALL_REDUCE, world)
    )
    (fours,) = group_topology(np.arange(64).reshape(16, 4), fabric)
    (halves,) = RingAlgorithm().phases(CollectiveType.ALL_GATHER, fours)
    assert representative_flows(halves, fabric.rotation) is None


@pytest.mark.parametrize("kind", [CollectiveType.ALL_REDUCE, CollectiveType.ALL_GATHER])
@pytest.mark.parametrize("payload", PAYLOADS)
def test_pruned_variants_are_never_the_fastest(kind: CollectiveType, payload: float) -> None:
    tuner, members = Tuner(clos_fabric("dgx-h100"), NCCL), np.arange(512)[None]
    pruned, complete = tuner.evaluate_variants(kind, members, payload), tuner.evaluate_variants(kind, members)
    assert select_variants(pruned, payload).seconds.tolist() == select_variants(complete, payload).seconds.tolist()
    assert select_variants(pruned, payload).slowest_variant == select_variants(complete, payload).slowest_variant
    assert len(pruned.variants) == len(complete.variants) or select_variants(pruned, payload).is_certain


def test_small_payloads_prune_slow_algorithms() -> None:
    pruned = Tuner(clos_fabric("dgx-h100"), NCCL).evaluate_variants(
        CollectiveType.ALL_REDUCE, np.arange(512)[None], 4.0
    )
    assert {variant.algorithm for variant in pruned.variants} == {"tree"}
