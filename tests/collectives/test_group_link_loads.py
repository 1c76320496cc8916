"""What one group asks of links by itself."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from clustersim.collectives.flow_routes import route_phase
from clustersim.collectives.group_link_loads import GroupLinkLoads, select_by_variant
from clustersim.collectives.library import ALGORITHMS, load_library
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
RING = next(offer for offer in NCCL.variants if (offer.algorithm, offer.protocol) == ("ring", "Simple"))


def loads_of(
    members: np.ndarray, kind: CollectiveType = CollectiveType.ALL_GATHER, fabric: FakeFabric = FABRIC
) -> GroupLinkLoads:
    return Tuner(fabric, NCCL).link_loads(kind, members, RING)


def test_a_ring_across_nodes_keeps_each_nic_busy_for_the_textbook_volume() -> None:
    """Eight GPUs on one rail of six nodes: (n-1)/n of the payload over each NIC, out and in."""
    members = np.arange(0, 48, 8)[None]
    loads = loads_of(members)
    rate = 50e9 * NCCL.network_constants(LinkTechnology.INFINIBAND).efficiency * RING.efficiency
    nics = FABRIC.links.kind[loads.load_matrix.link_index] == LINK_KINDS.index(LinkKind.NIC)
    assert nics.sum() == 12
    assert loads.load_matrix.seconds_per_byte[nics] == pytest.approx(np.full(12, 5 / 6 / rate))
    assert loads.largest_flow.tolist() == pytest.approx([5 / 6 / RING.efficiency])


def test_groups_that_share_a_link_ask_alone_for_what_fits_alone() -> None:
    """Eight rails cross the racks' two links of 100 GB/s: together 8/2 times as long as one alone on its NIC."""
    members = np.arange(48).reshape(6, 8).T
    loads, alone = loads_of(members), loads_of(members[:1])
    assert loads.seconds_per_byte.tolist() == pytest.approx([alone.seconds_per_byte[0]] * 8)
    rings = NcclOverrides(forced={CollectiveType.ALL_GATHER: "ring"}, description="ring").apply_to(NCCL)
    together = select_variants(Tuner(FABRIC, rings).evaluate_variants(CollectiveType.ALL_GATHER, members), 1e12).seconds
    assert together.max() > 3.9 * 1e12 * loads.seconds_per_byte.max()


def test_traffic_inside_a_domain_crosses_both_nvlink_ports_of_each_member() -> None:
    loads = loads_of(np.arange(48).reshape(6, 8))
    assert np.bincount(loads.load_matrix.group_index).tolist() == [16] * 6
    assert (FABRIC.links.kind[loads.load_matrix.link_index] == LINK_KINDS.index(LinkKind.NVLINK)).all()
    assert (loads.seconds_per_byte > 0).all()


@given(PERMUTATIONS, st.sampled_from([2, 3, 4, 6, 8, 12, 24, 48]), st.sampled_from(CollectiveType), st.data())
def test_own_loads_add_up_to_the_links_loads_and_none_is_busier_than_its_group(ranks, size, kind, data) -> None:
    """What all groups ask of a link is what `transfer` says that it carries; each alone has time for its own."""
    members = ranks.reshape(-1, size)
    algorithm = data.draw(st.sampled_from(sorted(ALGORITHMS)))
    for offer in NCCL.variants:
        if offer.algorithm != algorithm:
            continue
        loads = Tuner(FABRIC, NCCL).link_loads(kind, members, offer)
        crossings = loads.load_matrix
        carried, able = np.zeros(len(FABRIC.links.bandwidth)), np.zeros(len(members), dtype=bool)
        for item in group_topology(members, FABRIC):
            reachable = effective_bandwidth(FABRIC.links, NCCL, offer, item.domain_count)
            for phase in ALGORITHMS[algorithm].phases(kind, item):
                carried += route_phase(phase, FABRIC).link_load[:-1] / reachable
                able[item.group_indices] = True
        total = np.bincount(crossings.link_index, crossings.seconds_per_byte, minlength=len(carried))
        assert total == pytest.approx(carried, rel=1e-12)
        assert (crossings.seconds_per_byte <= loads.seconds_per_byte[crossings.group_index]).all()
        assert (crossings.seconds_per_byte > 0).all()
        pairs = set(zip(crossings.group_index.tolist(), crossings.link_index.tolist(), strict=True))
        assert len(pairs) == len(crossings.group_index)
        assert ((loads.largest_flow > 0) == np.isin(np.arange(len(members)), crossings.group_index)).all()
        assert not loads.largest_flow[~able].any()


def test_groups_may_take_different_offers() -> None:
    members = np.arange(48).reshape(6, 8).T
    slow = loads_of(members, CollectiveType.ALL_REDUCE)
    fast = loads_of(members, CollectiveType.ALL_GATHER)
    taken = np.array([0, 1, 0, 1, 1, 1, 0, 0])
    both = select_by_variant({0: slow, 1: fast}, taken)
    assert both.seconds_per_byte.tolist() == np.where(taken == 0, slow.seconds_per_byte, fast.seconds_per_byte).tolist()
    assert both.largest_flow.tolist() == np.where(taken == 0, slow.largest_flow, fast.largest_flow).tolist()
    for group in range(8):
        source = (slow, fast)[taken[group]].load_matrix
        mine, theirs = both.load_matrix.group_index == group, source.group_index == group
        assert both.load_matrix.link_index[mine].tolist() == source.link_index[theirs].tolist()
        assert both.load_matrix.seconds_per_byte[mine].tolist() == source.seconds_per_byte[theirs].tolist()
