"""The tuner selects the fastest algorithm variant."""

import numpy as np
import pytest

from clustersim.collectives.library_files import load_library
from clustersim.collectives.nccl_overrides import NcclOverrides
from clustersim.collectives.tuner import Tuner, select_variants
from clustersim.common.errors import InputError
from clustersim.hardware.cluster import load_cluster
from clustersim.hardware.link_technology import LinkTechnology
from clustersim.program.task import CollectiveType
from tests.collectives.fake_fabric import FakeFabric

H100 = FakeFabric(64, 8, nvlink=450e9, nic=50e9)
A100 = FakeFabric(64, 8, nvlink=300e9, nic=25e9, nvlink_technology=LinkTechnology.NVLINK3)
COLLECTIVES = [kind for kind in CollectiveType if not kind.is_token_routing]


def select(kind, members, payload, fabric=H100, algorithm=None):
    overrides = NcclOverrides(forced={kind: algorithm} if algorithm else {}, description=f"{algorithm}")
    return select_variants(
        Tuner(fabric, overrides.apply_to(load_library("nccl"))).evaluate_variants(kind, members), payload
    )


def test_small_payloads_use_ll_and_large_ones_the_simple_protocol():
    members = np.arange(8)[None]
    assert select(CollectiveType.ALL_GATHER, members, 1e3).slowest_variant.name == "ring LL"
    assert select(CollectiveType.ALL_GATHER, members, 1e9).slowest_variant.name == "ring Simple"


def test_nvls_is_selected_for_large_all_reduces_where_available():
    members = np.arange(8)[None]
    assert select(CollectiveType.ALL_REDUCE, members, 1e9).slowest_variant.algorithm == "nvls"
    assert select(CollectiveType.ALL_REDUCE, members, 1e9, A100).slowest_variant.algorithm == "ring"


def test_trees_are_selected_for_small_all_reduces_over_many_domains():
    assert select(CollectiveType.ALL_REDUCE, np.arange(64)[None], 1e4).slowest_variant.algorithm == "tree"


def test_the_selection_is_never_slower_than_a_forced_algorithm():
    members = np.arange(64).reshape(4, 16)
    for payload in (1e3, 1e5, 1e7, 1e9):
        selected_seconds = select(CollectiveType.ALL_REDUCE, members, payload).seconds
        for name in ("ring", "tree", "nvls"):
            assert (
                selected_seconds <= select(CollectiveType.ALL_REDUCE, members, payload, algorithm=name).seconds + 1e-15
            ).all()


def test_an_unsupported_forced_algorithm_is_refused():
    with pytest.raises(
        InputError,
        match="nccl with pat cannot do all_gather by pat in groups of 8",
    ):
        select(CollectiveType.ALL_GATHER, np.arange(8)[None], 1e6, algorithm="pat")


@pytest.mark.parametrize("kind", COLLECTIVES)
def test_permuting_groups_of_a_symmetric_cluster_permutes_the_seconds(kind):
    size = 2 if kind is CollectiveType.SEND_RECV else 16
    members = np.arange(64).reshape(-1, size)
    order = np.random.default_rng(0).permutation(len(members))
    assert select(kind, members[order], 1e7).seconds == pytest.approx(select(kind, members, 1e7).seconds[order])


@pytest.mark.parametrize("kind", COLLECTIVES)
def test_time_grows_with_the_payload(kind):
    members = np.arange(64).reshape(-1, 2 if kind is CollectiveType.SEND_RECV else 16)
    variant_costs = Tuner(H100, load_library("nccl")).evaluate_variants(kind, members)
    seconds = [select_variants(variant_costs, payload).seconds.max() for payload in np.geomspace(1, 1e10, 60)]
    assert (np.diff(seconds) > 0).all()


def test_sharp_halves_the_all_reduce_time_on_infiniband():
    """SHARP sends each rail's share out and in once, rings and trees twice; only InfiniBand has it."""
    members, payload = np.arange(1024)[None], 4.0 * 2**30
    sharp = NcclOverrides(collnet_enabled=True).apply_to(load_library("nccl"))
    fabric = load_cluster("dgx-a100", 1024).fabric
    without, with_sharp = (
        float(
            select_variants(
                Tuner(fabric, library).evaluate_variants(CollectiveType.ALL_REDUCE, members), payload
            ).seconds[0]
        )
        for library in (load_library("nccl"), sharp)
    )
    assert 0.5 <= with_sharp / without <= 0.65  # intra-node chains and pipeline fill take the remainder
    roce = load_cluster("llama3-roce", 1024).fabric
    (variant,) = {
        select_variants(
            Tuner(roce, sharp).evaluate_variants(CollectiveType.ALL_REDUCE, members), payload
        ).slowest_variant.algorithm
    }
    assert not variant.startswith("collnet")
