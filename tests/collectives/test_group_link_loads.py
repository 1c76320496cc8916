"""Link loads of one group without contention."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from clustersim.collectives.flow_routes import route_phase
from clustersim.collectives.group_link_loads import GroupLinkLoads, select_by_variant
from clustersim.collectives.library import ALGORITHMS
from clustersim.collectives.library_files import load_library
from clustersim.collectives.nccl_overrides import NcclOverrides
from clustersim.collectives.phase import group_topology
from clustersim.collectives.phase_cost import effective_bandwidth
from clustersim.collectives.tuner import Tuner, select_variants
from clustersim.hardware.link_technology import LinkTechnology
from clustersim.hardware.topology import LINK_KINDS, LinkKind
from clustersim.program.task import CollectiveType
from tests.collectives.fake_fabric import FakeFabric

NCCL = load_library("nccl")
FABRIC = FakeFabric(48, 8, nvlink=450e9, nic=50e9, spine=100e9, rack=16)
PERMUTATIONS = st.permutations(range(48)).map(np.array)
RING_SIMPLE = next(variant for variant in NCCL.variants if (variant.algorithm, variant.protocol) == ("ring", "Simple"))


def group_link_loads(
    members: np.ndarray, kind: CollectiveType = CollectiveType.ALL_GATHER, fabric: FakeFabric = FABRIC
) -> GroupLinkLoads:
    return Tuner(fabric, NCCL).link_loads(kind, members, RING_SIMPLE)


def test_a_ring_across_nodes_keeps_each_nic_busy_for_the_textbook_volume() -> None:
    """Eight GPUs on one rail of six nodes: (n-1)/n of the payload over each NIC, out and in."""
    members = np.arange(0, 48, 8)[None]
    loads = group_link_loads(members)
    rate = 50e9 * NCCL.network_constants(LinkTechnology.INFINIBAND).efficiency * RING_SIMPLE.efficiency
    nics = FABRIC.links.kind[loads.load_matrix.link_index] == LINK_KINDS.index(LinkKind.NIC)
    assert nics.sum() == 12
    assert loads.load_matrix.seconds_per_byte[nics] == pytest.approx(np.full(12, 5 / 6 / rate))
    assert loads.largest_flow.tolist() == pytest.approx([5 / 6 / RING_SIMPLE.efficiency])


def test_group_link_loads_exclude_other_groups() -> None:
    """Eight rails cross the racks' two links of 100 GB/s: 8/2 times as long as a single one on its NIC."""
    members = np.arange(48).reshape(6, 8).T
    loads, single = group_link_loads(members), group_link_loads(members[:1])
    assert loads.seconds_per_byte.tolist() == pytest.approx([single.seconds_per_byte[0]] * 8)
    rings = NcclOverrides(forced={CollectiveType.ALL_GATHER: "ring"}, description="ring").apply_to(NCCL)
    contended = select_variants(
        Tuner(FABRIC, rings).evaluate_variants(CollectiveType.ALL_GATHER, members), 1e12
    ).seconds
    assert contended.max() > 3.9 * 1e12 * loads.seconds_per_byte.max()


def test_traffic_within_a_domain_crosses_both_nvlink_ports_of_a_member() -> None:
    loads = group_link_loads(np.arange(48).reshape(6, 8))
    assert np.bincount(loads.load_matrix.group_index).tolist() == [16] * 6
    assert (FABRIC.links.kind[loads.load_matrix.link_index] == LINK_KINDS.index(LinkKind.NVLINK)).all()
    assert (loads.seconds_per_byte > 0).all()


@given(PERMUTATIONS, st.sampled_from([2, 3, 4, 6, 8, 12, 24, 48]), st.sampled_from(CollectiveType), st.data())
def test_group_link_loads_add_up_to_the_link_loads(ranks, size, kind, data) -> None:
    """Loads of all groups on a link sum to those of `route_phase`; a group's seconds per byte bound its link loads."""
    members = ranks.reshape(-1, size)
    algorithm = data.draw(st.sampled_from(sorted(ALGORITHMS)))
    for variant in NCCL.variants:
        if variant.algorithm != algorithm:
            continue
        loads = Tuner(FABRIC, NCCL).link_loads(kind, members, variant)
        link_loads = loads.load_matrix
        carried, is_supported = np.zeros(len(FABRIC.links.bandwidth)), np.zeros(len(members), dtype=bool)
        for topology in group_topology(members, FABRIC):
            bandwidth = effective_bandwidth(FABRIC.links, NCCL, variant, topology.domain_count)
            for phase in ALGORITHMS[algorithm].phases(kind, topology):
                carried += route_phase(phase, FABRIC).link_load[:-1] / bandwidth
                is_supported[topology.group_indices] = True
        total = np.bincount(link_loads.link_index, link_loads.seconds_per_byte, minlength=len(carried))
        assert total == pytest.approx(carried, rel=1e-12)
        assert (link_loads.seconds_per_byte <= loads.seconds_per_byte[link_loads.group_index]).all()
        assert (link_loads.seconds_per_byte > 0).all()
        pairs = set(zip(link_loads.group_index.tolist(), link_loads.link_index.tolist(), strict=True))
        assert len(pairs) == len(link_loads.group_index)
        assert ((loads.largest_flow > 0) == np.isin(np.arange(len(members)), link_loads.group_index)).all()
        assert not loads.largest_flow[~is_supported].any()


def test_groups_may_use_different_variants() -> None:
    members = np.arange(48).reshape(6, 8).T
    slow = group_link_loads(members, CollectiveType.ALL_REDUCE)
    fast = group_link_loads(members, CollectiveType.ALL_GATHER)
    variant_index = np.array([0, 1, 0, 1, 1, 1, 0, 0])
    selected = select_by_variant({0: slow, 1: fast}, variant_index)
    assert (
        selected.seconds_per_byte.tolist()
        == np.where(variant_index == 0, slow.seconds_per_byte, fast.seconds_per_byte).tolist()
    )
    assert selected.largest_flow.tolist() == np.where(variant_index == 0, slow.largest_flow, fast.largest_flow).tolist()
    for group in range(8):
        source = (slow, fast)[variant_index[group]].load_matrix
        in_selected, in_source = selected.load_matrix.group_index == group, source.group_index == group
        assert selected.load_matrix.link_index[in_selected].tolist() == source.link_index[in_source].tolist()
        assert (
            selected.load_matrix.seconds_per_byte[in_selected].tolist() == source.seconds_per_byte[in_source].tolist()
        )
