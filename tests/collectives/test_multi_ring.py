"""Collectives over links of pairs: rings over all of them, messages over their own, no byte more or less."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from clustersim.collectives.library import ALGORITHMS, load_library
from clustersim.collectives.multi_ring import spread_over_rings
from clustersim.collectives.nccl_overrides import NcclOverrides
from clustersim.collectives.phase import group_topology
from clustersim.collectives.tuner import Tuner, select_variants
from clustersim.hardware.clos_fabric import ClosFabric
from clustersim.hardware.cluster import load_cluster
from clustersim.hardware.rank_mapping import RankMappedFabric
from clustersim.program.task import CollectiveType
from tests.conftest import examples

LARGE = 4 * 2**30
MESH, CUBE = load_cluster("mi300x", 64).fabric, load_cluster("dgx-v100", 64).fabric
NCCL, RCCL = load_library("nccl"), load_library("rccl")


def seconds(fabric, library, kind, members, algorithm=None, payload=LARGE):
    told = NcclOverrides(forced={kind: algorithm} if algorithm else {}, description=f"{algorithm}")
    return select_variants(
        Tuner(fabric, told.apply_to(library)).evaluate_variants(kind, np.array(members)), payload
    ).seconds


def switched(fabric, part=1.0):
    """The same machine with a switch, whose ports have a part of the bandwidth."""
    nvlink = fabric.node.nvlink
    port = replace(nvlink.port, bandwidth=nvlink.port.bandwidth * part)
    return ClosFabric(
        replace(fabric.node, nvlink=replace(nvlink, port=port, pairs=None)), fabric.network, fabric.gpu_count
    )


@pytest.mark.parametrize("kind", [CollectiveType.ALL_REDUCE, CollectiveType.ALL_GATHER, CollectiveType.REDUCE_SCATTER])
@pytest.mark.parametrize("size", range(2, 9))
def test_some_gpus_of_a_full_mesh_are_a_switch_with_that_part_of_the_port(kind, size):
    """Of a GPU's 7 links k GPUs have k - 1; rings use all of them, each a (k-1)-th of what the GPU sends."""
    part = switched(MESH, (size - 1) / 7)
    alone, expected = (seconds(fabric, RCCL, kind, [range(size)], "ring") for fabric in (MESH, part))
    assert alone == pytest.approx(expected, rel=1e-9)


def test_all_to_all_on_a_full_mesh_uses_all_links():
    alone, expected = (
        seconds(fabric, RCCL, CollectiveType.ALL_TO_ALL, [range(8)]) for fabric in (MESH, switched(MESH))
    )
    assert alone == pytest.approx(expected, rel=1e-9)


def test_a_message_has_the_link_of_its_pair_alone():
    """A seventh of an MI300X's port; one or two of a V100's six links, and where there are none, two hops of one."""
    for fabric, library, target, part in ((MESH, RCCL, 5, 1 / 7), (CUBE, NCCL, 1, 1 / 6), (CUBE, NCCL, 3, 1 / 3)):
        alone, expected = (
            seconds(item, library, CollectiveType.SEND_RECV, [[0, target]]) for item in (fabric, switched(fabric, part))
        )
        assert alone == pytest.approx(expected, rel=1e-9)
    near, far = (seconds(CUBE, NCCL, CollectiveType.SEND_RECV, [[0, target]]) for target in (1, 5))
    assert far == pytest.approx(near, rel=1e-3)


def test_a_whole_dgx1_is_as_fast_as_a_switch_and_a_quarter_of_it_is_not():
    """Six rings of 25 GB/s; among GPUs 0 to 3 there are four, two of six links of each lead elsewhere."""
    for members, part in ((range(8), 1.0), (range(4), 4 / 6), ([0, 1], 1 / 6), ([0, 3], 2 / 6)):
        alone, expected = (
            seconds(item, NCCL, CollectiveType.ALL_REDUCE, [members], "ring") for item in (CUBE, switched(CUBE, part))
        )
        assert alone == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize(("gpus", "busbw"), [(2, 47.671), (8, 312.912)])
def test_an_mi300x_reduces_as_fast_as_was_measured(gpus, busbw):
    """4 GiB, all_reduce_bench.py, stas00/ml-engineering, network README; a switch would give both the larger rate."""
    took = seconds(MESH, RCCL, CollectiveType.ALL_REDUCE, [range(gpus)])[0]
    assert LARGE / took * 2 * (gpus - 1) / gpus == pytest.approx(busbw * 1e9, rel=0.05)


def test_a_v100s_all_reduce_is_what_nvidia_shows():
    """122 GB/s of bus bandwidth on 8 V100 (GTC slides on NCCL)."""
    took = seconds(CUBE, NCCL, CollectiveType.ALL_REDUCE, [range(8)])[0]
    assert LARGE / took * 2 * 7 / 8 == pytest.approx(122e9, rel=0.1)


def test_pairs_in_different_halves_are_as_fast_as_their_links():
    """Data parallel beside tp 4 on a DGX-1: GPUs 0 and 4 have two links, 2 and 6 one; groups are told apart."""
    took = seconds(CUBE, NCCL, CollectiveType.ALL_REDUCE, [[0, 4], [1, 5], [2, 6], [3, 7]], "ring")
    assert took[0] == took[1]
    assert took[2] == took[3]
    assert took[2] == pytest.approx(2 * took[0], rel=1e-3)


GROUPS = st.sets(st.integers(0, 31), min_size=2, max_size=16).map(sorted)


@examples(60)
@given(members=GROUPS, name=st.sampled_from(["ring", "tree"]), fabric=st.sampled_from([MESH, CUBE]))
def test_weaving_moves_no_byte_more_or_less(members, name, fabric):
    """Every member sends as much inside and outside its domain as the algorithm says; what leaves it stays as it is."""
    for item in group_topology(np.array([members]), fabric):
        for phase in ALGORITHMS[name].phases(CollectiveType.ALL_REDUCE, item):
            for part in phase.flows:
                threads = spread_over_rings(part, fabric)
                for inside in (True, False):
                    assert sent([part], fabric, inside) == pytest.approx(sent(threads, fabric, inside))


def sent(parts, fabric, inside):
    total = np.zeros(fabric.gpu_count)
    for part in parts:
        sources, targets = part.sources.reshape(-1), part.targets.reshape(-1)
        counts = (sources != targets) & ((fabric.domain_ids(sources) == fabric.domain_ids(targets)) == inside)
        total += part.share * np.bincount(sources[counts], minlength=fabric.gpu_count)
    return total


def test_with_a_switch_flows_stay_as_they_are():
    fabric = load_cluster("dgx-h100", 16).fabric
    (each,) = group_topology(np.arange(16)[None], fabric)
    (phase,) = ALGORITHMS["ring"].phases(CollectiveType.ALL_REDUCE, each)
    assert all(spread_over_rings(part, fabric) == (part,) for part in phase.flows)


def test_ranks_in_another_order_have_the_same_rings():
    """Rank r on GPU 7 - r of its node: the same GPUs reduce as fast, and half of each node as its links allow."""
    places = np.arange(16).reshape(2, 8)[:, ::-1].reshape(-1)
    for fabric, library in ((MESH, RCCL), (CUBE, NCCL)):
        for members in (range(8), range(4)):
            there, here = (
                seconds(item, library, CollectiveType.ALL_REDUCE, [members], "ring")
                for item in (RankMappedFabric(fabric, places), fabric)
            )
            assert there == pytest.approx(here, rel=1e-12)
