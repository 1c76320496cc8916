"""Computed routes of Clos fabrics: links, latency and bandwidth. The small clusters are in conftest.py."""

import itertools

import numpy as np
import pytest

from clustersim.hardware.clos_fabric import ClosFabric
from clustersim.hardware.clos_spec import (
    CoreSpec,
    HostBridgeSpec,
    LeafSpec,
    NetworkSpec,
    NicSpec,
    NodeSpec,
    NvlinkSpec,
    Port,
    SpineSpec,
)
from clustersim.hardware.ecmp import HashedEcmp, SpreadEcmp
from clustersim.hardware.topology import LINK_KINDS, LinkKind
from tests.hardware.line_counter import count_lines

US = 1e-6
NVLINK, PCIE, HOST, NIC, LEAF, SPINE, _ = LINK_KINDS


def route(fabric, source, target):
    """The links of one route, and its latency."""
    paths = fabric.find_paths(np.array([source]), np.array([target]))
    return [fabric.link_info(int(link_id)) for link_id in paths.links[0] if link_id >= 0], float(paths.latency[0])


def link_kinds(fabric, source, target):
    return [link.kind for link in route(fabric, source, target)[0]]


def all_pairs(fabric):
    gpus = np.arange(fabric.gpu_count)
    return np.repeat(gpus, fabric.gpu_count), np.tile(gpus, fabric.gpu_count)


def test_every_route_is_a_chain_of_links_from_source_to_target(machine):
    sources, targets = all_pairs(machine)
    paths = machine.find_paths(sources, targets)
    for source, target, link_ids, latency in zip(sources, targets, paths.links, paths.latency, strict=True):
        chain = [machine.link_info(int(link_id)) for link_id in link_ids if link_id >= 0]
        vertices = [f"gpu{source}", *(link.target for link in chain)]
        assert [link.source for link in chain] == vertices[:-1]
        assert vertices[-1] == f"gpu{target}"
        assert latency == pytest.approx(sum(link.latency for link in chain))


def test_routes_are_simple_and_empty_only_for_equal_ends(machine):
    sources, targets = all_pairs(machine)
    for source, target, link_ids in zip(sources, targets, machine.find_paths(sources, targets).links, strict=True):
        chain = [machine.link_info(int(link_id)) for link_id in link_ids if link_id >= 0]
        assert len({link.target for link in chain}) == len(chain)
        assert (not chain) == (source == target)


def test_the_link_table_and_link_descriptions_agree(machine):
    table = machine.links
    for link_id in range(len(table.kind)):
        link = machine.link_info(link_id)
        assert link.kind is LINK_KINDS[table.kind[link_id]]
        assert (link.bandwidth, link.latency) == (table.bandwidth[link_id], table.latency[link_id])
    with pytest.raises(IndexError):
        machine.link_info(len(table.kind))


def test_gpus_of_one_domain_use_their_nvlink_ports(build):
    links, latency = route(build["rails, three pods, last partial"](), 4, 7)
    assert [(link.kind, link.bandwidth) for link in links] == [(NVLINK, 450e9), (NVLINK, 450e9)]
    assert latency == pytest.approx(0.6 * US)


def test_equal_rails_of_one_unit_share_a_leaf(build):
    """PCIe 0.5, adapter 0.7, leaf 0.3 and adapter 0.7, PCIe 0.5: 2.7 us."""
    fabric = build["rails, three pods, last partial"]()
    links, latency = route(fabric, 1, 5)
    assert [link.kind for link in links] == [PCIE, NIC, NIC, PCIE]
    assert links[1].target == links[2].source == "leaf0.1"
    assert latency == pytest.approx(2.7 * US)


def test_different_rails_go_through_the_spine_of_their_pod(build):
    """2.7 us as for equal rails, one more leaf 0.3 and the spine 0.4."""
    links, latency = route(build["rails, three pods, last partial"](), 1, 6)
    assert [link.kind for link in links] == [PCIE, NIC, LEAF, LEAF, NIC, PCIE]
    assert latency == pytest.approx((2.7 + 0.3 + 0.4) * US)


def test_other_units_of_a_pod_are_behind_the_spine_and_other_pods_behind_the_core(build):
    fabric = build["rails, three pods, last partial"]()
    assert link_kinds(fabric, 0, 4 * 2) == [PCIE, NIC, LEAF, LEAF, NIC, PCIE]
    links, latency = route(fabric, 0, 4 * 4)
    assert [link.kind for link in links] == [PCIE, NIC, LEAF, SPINE, SPINE, LEAF, NIC, PCIE]
    assert latency == pytest.approx((2.7 + 0.3 + 0.4 + 0.4 + 0.5) * US)


def test_all_nics_of_a_rack_share_their_top_of_rack_switch(build):
    fabric = build["racks"]()
    assert link_kinds(fabric, 0, 7) == [PCIE, NIC, NIC, PCIE]
    assert link_kinds(fabric, 0, 8) == [PCIE, NIC, LEAF, LEAF, NIC, PCIE]


def test_two_gpus_share_a_nic_where_there_are_half_as_many(build):
    fabric = build["rails, shared nics"]()
    first_link, second_link, third_link = (route(fabric, gpu, gpu + 4)[0][1] for gpu in (0, 1, 2))
    assert first_link == second_link != third_link


def test_gpus_without_nvlink_use_pcie_and_the_host_between_sockets(build):
    """Port of a root complex: 20 GB/s, and 1 us to the other one."""
    fabric = build["one pcie node"]()
    assert link_kinds(fabric, 0, 1) == [PCIE, PCIE]
    links, latency = route(fabric, 0, 2)
    assert [(link.kind, link.bandwidth) for link in links] == [(PCIE, 60e9), (HOST, 20e9), (HOST, 20e9), (PCIE, 60e9)]
    assert latency == pytest.approx((0.5 + 1.0 + 0.5) * US)


def test_a_nic_on_the_other_socket_is_reached_through_the_host():
    node = NodeSpec(4, pcie=Port(60e9, 0.0), host=HostBridgeSpec(2, Port(20e9, 0.0)), nics=NicSpec(1, Port(50e9, 0.0)))
    fabric = ClosFabric(node, NetworkSpec(LeafSpec(4, 1, 0.0), SpreadEcmp()), 8)
    assert link_kinds(fabric, 0, 4) == [PCIE, PCIE, NIC, NIC, PCIE, PCIE]
    assert link_kinds(fabric, 3, 4) == [PCIE, HOST, HOST, PCIE, NIC, NIC, PCIE, PCIE]


def test_bridged_pairs_use_nvlink_and_other_pairs_of_the_node_pcie(build):
    fabric = build["nvlink pairs in pcie nodes"]()
    assert link_kinds(fabric, 0, 1) == [NVLINK, NVLINK]
    assert link_kinds(fabric, 1, 2) == [PCIE, PCIE]


def test_a_domain_may_be_larger_than_a_node(build):
    fabric = build["domains of three nodes"]()
    gpus = np.array([0, 1, 2, 5, 6])
    assert fabric.node_ids(gpus).tolist() == [0, 0, 1, 2, 3]
    assert fabric.domain_ids(gpus).tolist() == [0, 0, 0, 0, 1]
    assert link_kinds(fabric, 0, 5) == [NVLINK, NVLINK]
    assert link_kinds(fabric, 4, 6)[0] is PCIE


def test_uplink_bandwidth_is_nic_bandwidth_over_oversubscription():
    """Units of 4 nodes x 4 NICs x 50 GB/s = 800 GB/s; leaf 1:1 and 4 units a pod: 3.2 TB/s below, 1:7 above."""
    network = NetworkSpec(LeafSpec(4, 1, 0.0), SpreadEcmp(), SpineSpec(4, 0.0, oversubscription=7.0), CoreSpec(2, 0.0))
    node = NodeSpec(4, pcie=Port(60e9, 0.0), nvlink=NvlinkSpec(4, Port(450e9, 0.0)), nics=NicSpec(4, Port(50e9, 0.0)))
    fabric = ClosFabric(node, network, 4 * 32)
    links, _ = route(fabric, 0, 4 * 16)
    assert {link.kind: link.bandwidth for link in links} == pytest.approx(
        {PCIE: 60e9, NIC: 50e9, LEAF: 800e9, SPINE: 3200e9 / 7}
    )


@pytest.mark.parametrize("kind", [NIC, LEAF, SPINE])
def test_hashed_links_sum_to_the_bandwidth_of_the_bundles(build, kind):
    spread, hashed = build["rails, three pods, last partial"](), build["rails, hashed"]()

    def total(fabric):
        return fabric.links.bandwidth[fabric.links.kind == LINK_KINDS.index(kind)].sum()

    assert total(hashed) == pytest.approx(total(spread))


def test_hashing_is_repeatable_depends_on_the_seed_and_is_even():
    """131,072 pairs over 32 uplinks: each expects 4,096 with a deviation of 63, so 6 sigma is 10 %."""
    node = NodeSpec(8, pcie=Port(60e9, 0.0), nvlink=NvlinkSpec(8, Port(450e9, 0.0)), nics=NicSpec(8, Port(50e9, 0.0)))

    def uplinks_used(seed):
        fabric = ClosFabric(node, NetworkSpec(LeafSpec(32, 8, 0.0), HashedEcmp(seed), SpineSpec(4, 0.0)), 512)
        sources, targets = np.repeat(np.arange(256), 512), np.tile(np.arange(512), 256)
        paths = fabric.find_paths(sources, targets)
        leaf_up = fabric.wiring.leaf.up
        used = paths.links[(paths.links >= leaf_up.first_id) & (paths.links < leaf_up.first_id + leaf_up.count)]
        return (used - leaf_up.first_id) % 32

    uplinks, same_seed, other_seed = uplinks_used(1), uplinks_used(1), uplinks_used(2)
    assert (uplinks == same_seed).all()
    assert (uplinks != other_seed).mean() > 0.9
    counts = np.bincount(uplinks, minlength=32)
    assert counts.min() > 0.9 * counts.mean()
    assert counts.max() < 1.1 * counts.mean()


def test_a_hashed_route_crosses_one_plane(build):
    """Spine i of one pod reaches spine i of the others, as in every three-tier Clos."""
    fabric = build["rails, hashed"]()
    for target in range(16, 24):
        links, _ = route(fabric, 0, target)
        up, down = [link.target for link in links if link.target.startswith("spine")]
        assert up.split(".")[1] == down.split(".")[1]


TIER_ORDER = ["gpu", "nvlink", "host", "leaf", "spine", "core"]
TIER_OF = {NVLINK: "nvlink", PCIE: "host", HOST: "host", NIC: "leaf", LEAF: "spine", SPINE: "core"}


def highest_tier(fabric, gpus):
    """By brute force: the highest tier among the routes of all pairs."""
    tiers = [TIER_OF[kind] for pair in itertools.permutations(gpus, 2) for kind in link_kinds(fabric, *pair)]
    return max(tiers, key=TIER_ORDER.index, default="gpu")


def test_tier_is_the_highest_that_any_pair_crosses(machine):
    random = np.random.default_rng(1)
    for size in (1, 2, 2, 2, 3, 3, 4, 6):
        gpus = random.choice(machine.gpu_count, size=min(size, machine.gpu_count), replace=False).tolist()
        assert machine.highest_tier(gpus) == highest_tier(machine, gpus)


def test_tiers_count_the_switches_of_the_dgx_superpod():
    """NVIDIA DGX SuperPOD with H100, network fabrics, table 4, and the larger counts of the B200 edition."""
    node = NodeSpec(8, pcie=Port(63e9, 0.0), nvlink=NvlinkSpec(8, Port(450e9, 0.0)), nics=NicSpec(8, Port(50e9, 0.0)))
    network = NetworkSpec(
        LeafSpec(32, 8, 0.0), SpreadEcmp(), SpineSpec(4, 0.0, port_count=64), CoreSpec(64, 0.0, port_count=64)
    )
    expected = {1: (8, 4), 2: (16, 8), 4: (32, 16), 16: (128, 128, 64), 32: (256, 256, 128), 64: (512, 512, 256)}
    for units, switches in expected.items():
        tiers = ClosFabric(node, network, units * 256).describe_tiers()
        assert tuple(tier.count for tier in tiers if tier.kind in ("leaf", "spine", "core")) == switches


def test_tiers_of_every_machine_start_with_its_gpus(machine):
    first_tier, *_ = machine.describe_tiers()
    assert (first_tier.kind, first_tier.count) == ("gpu", machine.gpu_count)


def test_131072_gpus_are_routed_in_arrays():
    """In arrays: Python runs fewer lines than there are leaf switches, 4,096."""
    node = NodeSpec(8, pcie=Port(63e9, 0.0), nvlink=NvlinkSpec(8, Port(450e9, 0.0)), nics=NicSpec(8, Port(50e9, 0.0)))
    network = NetworkSpec(LeafSpec(32, 8, 0.0), HashedEcmp(0), SpineSpec(4, 0.0), CoreSpec(128, 0.0))

    def route_all():
        sources = np.arange(131_072)
        return ClosFabric(node, network, 131_072).find_paths(sources, (sources * 7919 + 13) % 131_072)

    assert 0 < count_lines(route_all) < 4096
    assert route_all().links.nbytes < 16e6


def test_link_kinds_are_in_the_order_that_this_file_unpacks():
    assert [kind.value for kind in LinkKind] == ["nvlink", "pcie", "host", "nic", "leaf", "spine", "wan"]
