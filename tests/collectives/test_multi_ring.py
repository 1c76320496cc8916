"""Collectives over direct links between GPU pairs: rings over all links, messages over the pair's links."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from clustersim.collectives.library import ALGORITHMS
from clustersim.collectives.library_files import load_library
from clustersim.collectives.multi_ring import spread_over_rings
from clustersim.collectives.nccl_overrides import NcclOverrides
from clustersim.collectives.phase import group_topology
from clustersim.collectives.tuner import Tuner, select_variants
from clustersim.hardware.clos_fabric import ClosFabric
from clustersim.hardware.cluster import load_cluster
from clustersim.hardware.rank_mapping import RankMappedFabric
from clustersim.program.task import CollectiveType
from tests.conftest import examples

LARGE_PAYLOAD = 4 * 2**30
MESH, CUBE = load_cluster("mi300x", 64).fabric, load_cluster("dgx-v100", 64).fabric
NCCL, RCCL = load_library("nccl"), load_library("rccl")


def selected_seconds(fabric, library, kind, members, algorithm=None, payload=LARGE_PAYLOAD):
    overrides = NcclOverrides(forced={kind: algorithm} if algorithm else {}, description=f"{algorithm}")
    return select_variants(
        Tuner(fabric, overrides.apply_to(library)).evaluate_variants(kind, np.array(members)), payload
    ).seconds


def switched_fabric(fabric, bandwidth_fraction=1.0):
    """The same machine with a switch, whose ports have a fraction of the bandwidth."""
    nvlink = fabric.node.nvlink
    port = replace(nvlink.port, bandwidth=nvlink.port.bandwidth * bandwidth_fraction)
    return ClosFabric(
        replace(fabric.node, nvlink=replace(nvlink, port=port, direct_links=None)), fabric.network, fabric.gpu_count
    )


@pytest.mark.parametrize("kind", [CollectiveType.ALL_REDUCE, CollectiveType.ALL_GATHER, CollectiveType.REDUCE_SCATTER])
@pytest.mark.parametrize("size", range(2, 9))
def test_gpus_of_a_full_mesh_equal_a_switch_with_a_fraction_of_the_port(kind, size):
    """Of a GPU's 7 links k GPUs have k - 1; rings use all of them, each for a (k-1)-th of what the GPU sends."""
    equivalent = switched_fabric(MESH, (size - 1) / 7)
    mesh_seconds, expected = (
        selected_seconds(fabric, RCCL, kind, [range(size)], "ring") for fabric in (MESH, equivalent)
    )
    assert mesh_seconds == pytest.approx(expected, rel=1e-9)


def test_all_to_all_on_a_full_mesh_uses_all_links():
    mesh_seconds, expected = (
        selected_seconds(fabric, RCCL, CollectiveType.ALL_TO_ALL, [range(8)])
        for fabric in (MESH, switched_fabric(MESH))
    )
    assert mesh_seconds == pytest.approx(expected, rel=1e-9)


def test_a_message_uses_only_the_links_of_its_pair():
    """A seventh of an MI300X's port; one or two of a V100's six links, and without a direct link two hops over one."""
    for fabric, library, target, bandwidth_fraction in (
        (MESH, RCCL, 5, 1 / 7),
        (CUBE, NCCL, 1, 1 / 6),
        (CUBE, NCCL, 3, 1 / 3),
    ):
        direct_seconds, expected = (
            selected_seconds(item, library, CollectiveType.SEND_RECV, [[0, target]])
            for item in (fabric, switched_fabric(fabric, bandwidth_fraction))
        )
        assert direct_seconds == pytest.approx(expected, rel=1e-9)
    near, far = (selected_seconds(CUBE, NCCL, CollectiveType.SEND_RECV, [[0, target]]) for target in (1, 5))
    assert far == pytest.approx(near, rel=1e-3)


def test_a_full_dgx1_is_as_fast_as_a_switch_and_a_part_of_it_is_not():
    """Six rings of 25 GB/s; among GPUs 0 to 3 there are four, as two of six links of each lead to other GPUs."""
    for members, bandwidth_fraction in ((range(8), 1.0), (range(4), 4 / 6), ([0, 1], 1 / 6), ([0, 3], 2 / 6)):
        direct_seconds, expected = (
            selected_seconds(item, NCCL, CollectiveType.ALL_REDUCE, [members], "ring")
            for item in (CUBE, switched_fabric(CUBE, bandwidth_fraction))
        )
        assert direct_seconds == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize(("gpus", "busbw"), [(2, 47.671), (8, 312.912)])
def test_mi300x_all_reduce_matches_the_measured_bus_bandwidth(gpus, busbw):
    """4 GiB, all_reduce_bench.py, stas00/ml-engineering, network README; a switch would give both the larger rate."""
    duration = selected_seconds(MESH, RCCL, CollectiveType.ALL_REDUCE, [range(gpus)])[0]
    assert LARGE_PAYLOAD / duration * 2 * (gpus - 1) / gpus == pytest.approx(busbw * 1e9, rel=0.05)


def test_dgx1_all_reduce_matches_nvidias_figure():
    """122 GB/s of bus bandwidth on 8 V100 (GTC slides on NCCL)."""
    duration = selected_seconds(CUBE, NCCL, CollectiveType.ALL_REDUCE, [range(8)])[0]
    assert LARGE_PAYLOAD / duration * 2 * 7 / 8 == pytest.approx(122e9, rel=0.1)


def test_pairs_in_different_halves_are_as_fast_as_their_links():
    """Data parallel with tp 4 on a DGX-1: GPUs 0 and 4 have two links, 2 and 6 one; groups are distinguished."""
    durations = selected_seconds(CUBE, NCCL, CollectiveType.ALL_REDUCE, [[0, 4], [1, 5], [2, 6], [3, 7]], "ring")
    assert durations[0] == durations[1]
    assert durations[2] == durations[3]
    assert durations[2] == pytest.approx(2 * durations[0], rel=1e-3)


GROUPS = st.sets(st.integers(0, 31), min_size=2, max_size=16).map(sorted)


@examples(60)
@given(members=GROUPS, name=st.sampled_from(["ring", "tree"]), fabric=st.sampled_from([MESH, CUBE]))
def test_spreading_over_rings_keeps_the_volume(members, name, fabric):
    """Every member sends the algorithm's volume within and outside its domain; inter-domain flows are unchanged."""
    for item in group_topology(np.array([members]), fabric):
        for phase in ALGORITHMS[name].phases(CollectiveType.ALL_REDUCE, item):
            for flows in phase.flows:
                ring_flows = spread_over_rings(flows, fabric)
                for within_domain in (True, False):
                    assert sent_shares([flows], fabric, within_domain) == pytest.approx(
                        sent_shares(ring_flows, fabric, within_domain)
                    )


def sent_shares(flow_sets, fabric, within_domain):
    total = np.zeros(fabric.gpu_count)
    for flows in flow_sets:
        sources, targets = flows.sources.reshape(-1), flows.targets.reshape(-1)
        is_counted = (sources != targets) & (
            (fabric.domain_ids(sources) == fabric.domain_ids(targets)) == within_domain
        )
        total += flows.share * np.bincount(sources[is_counted], minlength=fabric.gpu_count)
    return total


def test_with_a_switch_flows_are_unchanged():
    fabric = load_cluster("dgx-h100", 16).fabric
    (topology,) = group_topology(np.arange(16)[None], fabric)
    (phase,) = ALGORITHMS["ring"].phases(CollectiveType.ALL_REDUCE, topology)
    assert all(spread_over_rings(flows, fabric) == (flows,) for flows in phase.flows)


def test_the_rank_order_does_not_change_the_rings():
    """Rank r on GPU 7 - r of its node: the same GPUs reduce as fast, and half of each node as its links allow."""
    gpu_order = np.arange(16).reshape(2, 8)[:, ::-1].reshape(-1)
    for fabric, library in ((MESH, RCCL), (CUBE, NCCL)):
        for members in (range(8), range(4)):
            mapped_seconds, direct_seconds = (
                selected_seconds(item, library, CollectiveType.ALL_REDUCE, [members], "ring")
                for item in (RankMappedFabric(fabric, gpu_order), fabric)
            )
            assert mapped_seconds == pytest.approx(direct_seconds, rel=1e-12)
