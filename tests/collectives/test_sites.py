"""Collectives over sites: latency counted once for each crossing, bandwidth-delay limits, the law of equal links."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from clustersim.collectives.double_binary_tree import tree_depth, tree_site_crossings
from clustersim.collectives.library_files import load_library
from clustersim.collectives.tuner import Tuner, select_variants
from clustersim.common.arrays import IntArray
from clustersim.hardware.clos_fabric import ClosFabric
from clustersim.hardware.clos_spec import (
    CoreSpec,
    LeafSpec,
    NetworkSpec,
    NicSpec,
    NodeSpec,
    NvlinkSpec,
    Port,
    SpineSpec,
)
from clustersim.hardware.ecmp import SpreadEcmp
from clustersim.hardware.site_links import SiteLink, Transport
from clustersim.hardware.sites import Site, SitesFabric
from clustersim.hardware.topology import Fabric
from clustersim.program.task import CollectiveType
from tests.conftest import examples

NCCL = load_library("nccl")
US, GB = 1e-6, 1e9
NODE = NodeSpec(
    8,
    pcie=Port(60 * GB, 0.5 * US),
    nvlink=NvlinkSpec(8, Port(450 * GB, 0.6 * US)),
    nics=NicSpec(8, Port(50 * GB, 0.7 * US)),
)
PODS_OF_TWO_NODES = NetworkSpec(
    LeafSpec(2, 8, 0.3 * US), SpreadEcmp(), SpineSpec(1, 0.0), CoreSpec(4, 0.0)
)  # its core adds no latency, so that a link between sites can be as short
POD_BANDWIDTH = 16 * 50 * GB
REDUCTIONS = [CollectiveType.ALL_REDUCE, CollectiveType.ALL_GATHER, CollectiveType.REDUCE_SCATTER]
KINDS = st.sampled_from([*REDUCTIONS, CollectiveType.ALL_TO_ALL, CollectiveType.BROADCAST])


def sites(count: int = 2, bandwidth: float = POD_BANDWIDTH, latency: float = 0.0, **keys: object) -> SitesFabric:
    """Sites of two nodes, every pair linked."""
    links = tuple(
        SiteLink(source, target, bandwidth, latency, **keys)  # type: ignore[arg-type]
        for source in range(count)
        for target in range(count)
        if source != target
    )
    return SitesFabric(tuple(Site(f"s{n}", ClosFabric(NODE, PODS_OF_TWO_NODES, 16)) for n in range(count)), links)


def seconds(fabric: Fabric, collective: CollectiveType, members: IntArray, payload: float) -> np.ndarray:
    return select_variants(Tuner(fabric, NCCL).evaluate_variants(collective, members), payload).seconds


@given(KINDS, st.integers(0, 9), st.sampled_from([1, 2, 8, 16]))
@examples(60)
def test_sites_joined_as_pods_are_equal_one_cluster(collective: CollectiveType, power: int, stride: int) -> None:
    cluster = ClosFabric(NODE, PODS_OF_TWO_NODES, 32)
    members = np.arange(32).reshape(-1, stride).T
    assert np.array_equal(
        seconds(sites(), collective, members, 10.0**power), seconds(cluster, collective, members, 10.0**power)
    )


@given(KINDS, st.integers(0, 10), st.floats(0.05, 1.0), st.floats(0.1, 1.0))
@examples(60)
def test_more_bandwidth_or_a_shorter_way_is_never_slower(
    collective: CollectiveType, power: int, bandwidth: float, latency: float
) -> None:
    members = np.arange(32).reshape(1, -1)
    slow = sites(bandwidth=100 * GB * bandwidth, latency=30e-3)
    wide, near = (
        sites(bandwidth=100 * GB, latency=30e-3),
        sites(bandwidth=100 * GB * bandwidth, latency=30e-3 * latency),
    )
    for faster in (wide, near):
        assert (
            seconds(faster, collective, members, 10.0**power) <= seconds(slow, collective, members, 10.0**power)
        ).all()


@pytest.mark.parametrize(("collective", "passes"), [(CollectiveType.ALL_REDUCE, 2), (CollectiveType.ALL_GATHER, 1)])
def test_a_small_collective_waits_for_each_crossing_of_its_chain(collective: CollectiveType, passes: int) -> None:
    """Ranks in order: a chain round all ranks crosses once for each pair of neighbouring sites and pass."""
    members = np.arange(32).reshape(1, -1)
    near, far = (seconds(sites(latency=latency), collective, members, 1e3)[0] for latency in (0.0, 20e-3))
    assert 20e-3 * passes <= far - near <= 20e-3 * passes * 2 + 1e-4


def test_pairs_across_sites_wait_for_reduction_and_gather() -> None:
    """One rank in each site: half of the payload goes there and back, twice the latency."""
    members = np.stack([np.arange(16), np.arange(16, 32)], axis=1)
    payload, latency, bandwidth = 1e9, 10e-3, 100 * GB
    near, far = (
        seconds(sites(bandwidth=bandwidth, latency=wait), CollectiveType.ALL_REDUCE, members, payload)
        for wait in (0.0, latency)
    )
    assert far - near == pytest.approx(np.full(16, 2 * latency), rel=1e-3)
    assert near.min() >= 16 * payload / bandwidth  # each pair sends its payload once in each direction


def test_a_window_limits_each_gpu() -> None:
    members, payload = np.stack([np.arange(16), np.arange(16, 32)], axis=1), 1e9
    open_link, window = sites(latency=10e-3), sites(latency=10e-3, transport=Transport(window=20e6))
    limited = seconds(window, CollectiveType.ALL_REDUCE, members, payload)
    assert (limited > seconds(open_link, CollectiveType.ALL_REDUCE, members, payload)).all()
    assert (limited >= payload / (20e6 / 20e-3)).all()  # 20 MB in flight for 20 ms: 1 GB/s


@pytest.mark.parametrize("collective", [*REDUCTIONS, CollectiveType.ALL_TO_ALL])
@pytest.mark.parametrize("stride", [1, 8, 16])
def test_rotation_changes_nothing(collective: CollectiveType, stride: int) -> None:
    fabric = sites(3, latency=7e-3, transport=Transport(window=20e6))
    assert fabric.rotation is not None
    members = np.arange(48).reshape(-1, stride).T
    unrotated = replace(fabric)
    unrotated.__dict__["rotation"] = None
    assert seconds(fabric, collective, members, 1e8) == pytest.approx(seconds(unrotated, collective, members, 1e8))


@given(st.lists(st.integers(0, 2), min_size=2, max_size=40))
@examples(100)
def test_crossings_of_trees(domain_sites: list[int]) -> None:
    ordered = np.sort(np.array([domain_sites]))
    crossings = tree_site_crossings(ordered)
    assert isinstance(crossings, np.ndarray)
    assert int(len(np.unique(ordered)) > 1) <= crossings[0] <= tree_depth(len(domain_sites)) + 1
