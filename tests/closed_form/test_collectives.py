"""Collectives on an idle fabric take exactly their textbook time.

The library here is ideal: no launch overhead, no chunk synchronization, links at their nominal rate, and a
step costs the route's latency alone. Then with n ranks, payload S, per-port bandwidth B and route latency a:
ring all-reduce         2 (n-1) a + 2 (n-1)/n S / B         (Thakur, Rabenseifner and Gropp 2005, sec. 4)
ring all-gather           (n-1) a +   (n-1)/n S / B     send/recv                       a +           S / B
shift                   (n-1) a +   (n-1)/n S / B         of the slowest hop     all-to-all
a +   (n-1)/n S / B         all at once through one port     double binary tree      2 ceil(log2 n) a + 2 S /
B          for more than two ranks     two levels, d domains of k: 2 (k-1) a + 2 (k-1)/k S / B inside, 2 (d-1)
a' + 2 (d-1)/d S/k / B' between
"""

import math

import numpy as np
import pytest

from clustersim.collectives.library import (
    ALGORITHMS,
    AlgorithmVariant,
    Library,
    Medium,
    NetworkConstants,
    NvlinkConstants,
    NvlsConstants,
    PipelineChunking,
)
from clustersim.collectives.nccl_overrides import NcclOverrides
from clustersim.collectives.tuner import Tuner, select_variants
from clustersim.hardware.clos_fabric import ClosFabric
from clustersim.hardware.clos_spec import LeafSpec, NetworkSpec, NicSpec, NodeSpec, NvlinkSpec, Port, SpineSpec
from clustersim.hardware.ecmp import SpreadEcmp
from clustersim.program.task import CollectiveType

PAYLOAD = 3e8
NVLINK, NIC = 200e9, 20e9


def ideal_library(chunk: float = 0.0) -> Library:
    zero_latencies = dict.fromkeys(Medium, 0.0)
    variants = tuple(
        AlgorithmVariant(
            name,
            "ideal",
            frozenset(CollectiveType),
            0.0,
            zero_latencies,
            0.0,
            0.0,
            1.0,
            is_chunked=True,
            is_ll_limited=False,
            is_default=True,
            adds_launch=False,
        )
        for name in ALGORITHMS
    )
    generations, networks = (
        {None: NvlinkConstants(1.0, NvlsConstants(1.0, (1, 1), 0.0), None)},
        {None: NetworkConstants(1.0, 0.0, frozenset())},
    )
    return Library(
        "ideal",
        generations,
        networks,
        1.0,
        zero_latencies,
        0.0,
        PipelineChunking(1.0, 1.0, chunk),
        variants,
        published=False,
    )


def cluster(gpus: int, per_node: int, *, nodes_per_leaf: int = 1 << 20, oversubscription: float = 1.0) -> ClosFabric:
    """One NIC per GPU; PCIe is never the bottleneck."""
    node = NodeSpec(
        per_node,
        pcie=Port(1e15, 0.0),
        nvlink=NvlinkSpec(per_node, Port(NVLINK, 0.5e-6)),
        nics=NicSpec(per_node, Port(NIC, 0.0)),
    )
    leaf = LeafSpec(nodes_per_leaf, 1, 0.0, oversubscription)
    return ClosFabric(node, NetworkSpec(leaf, SpreadEcmp(), SpineSpec(1 << 10, 0.0)), gpus)


def collective_seconds(
    collective: CollectiveType, members: np.ndarray, fabric: ClosFabric, algorithm: str, library: Library | None = None
):
    overrides = NcclOverrides(forced={collective: algorithm}, description=algorithm).apply_to(
        library or ideal_library()
    )
    return select_variants(Tuner(fabric, overrides).evaluate_variants(collective, members), PAYLOAD).seconds


def route_latency(fabric: ClosFabric, source: int, target: int) -> float:
    return float(fabric.find_paths(np.array([source]), np.array([target])).latency[0])


@pytest.mark.parametrize("n", [2, 3, 4, 8, 64])
@pytest.mark.parametrize(
    ("kind", "passes"),
    [(CollectiveType.ALL_REDUCE, 2), (CollectiveType.ALL_GATHER, 1), (CollectiveType.REDUCE_SCATTER, 1)],
)
def test_ring_inside_a_domain(n, kind, passes):
    fabric = cluster(n, n)
    a = route_latency(fabric, 0, 1)
    expected = passes * (n - 1) * a + passes * (n - 1) / n * PAYLOAD / NVLINK
    assert collective_seconds(kind, np.arange(n)[None], fabric, "ring") == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("n", [2, 3, 16])
def test_ring_between_single_ranks(n):
    """One member per domain: every hop is the network's."""
    fabric = cluster(4 * n, 4)
    a = route_latency(fabric, 0, 4)
    expected = 2 * (n - 1) * a + 2 * (n - 1) / n * PAYLOAD / NIC
    assert collective_seconds(CollectiveType.ALL_REDUCE, 4 * np.arange(n)[None], fabric, "ring") == pytest.approx(
        expected, rel=1e-12
    )


@pytest.mark.parametrize(("senders", "receivers"), [(1, 1), (1, 4), (4, 1), (3, 2)])
def test_several_senders_and_receivers_share_their_nics(senders, receivers):
    """Each sender sends its part of S to each receiver: the NICs of the fewer ones are the bottleneck."""
    fabric = cluster(8, 4)
    members = np.array([[*range(senders), *range(4, 4 + receivers)]])
    for group, first in ((members, senders), (np.roll(members, receivers, axis=1), receivers)):
        variants = Tuner(fabric, ideal_library(), senders=first).evaluate_variants(CollectiveType.SEND_RECV, group)
        expected = route_latency(fabric, 0, 4) + PAYLOAD / min(senders, receivers) / NIC
        assert select_variants(variants, PAYLOAD).seconds == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("domains", [2, 4])
def test_rings_over_several_domains_use_every_nic(domains):
    """N = 4 d ranks, four rings: each NIC carries a quarter of 2 (n-1)/n S; of 2 (n-1) steps 2 (d-1) cross."""
    fabric = cluster(4 * domains, 4)
    n = 4 * domains
    rounds = 2 * (domains - 1) * route_latency(fabric, 0, 4) + (2 * (n - 1) - 2 * (domains - 1)) * route_latency(
        fabric, 0, 1
    )
    expected = rounds + 2 * (n - 1) / n * PAYLOAD / (4 * NIC)
    assert collective_seconds(CollectiveType.ALL_REDUCE, np.arange(n)[None], fabric, "ring") == pytest.approx(
        expected, rel=1e-12
    )


@pytest.mark.parametrize("n", [4, 5, 16, 33])
def test_double_binary_trees(n):
    fabric = cluster(4 * n, 4)
    expected = 2 * math.ceil(math.log2(n)) * route_latency(fabric, 0, 4) + 2 * PAYLOAD / NIC
    assert collective_seconds(CollectiveType.ALL_REDUCE, 4 * np.arange(n)[None], fabric, "tree") == pytest.approx(
        expected, rel=1e-12
    )


def test_two_ranks_exchange_halves_in_a_double_tree():
    """Each rank is the other's child in one tree: half up and half down in each direction make S."""
    fabric = cluster(8, 4)
    expected = 2 * route_latency(fabric, 0, 4) + PAYLOAD / NIC
    assert collective_seconds(CollectiveType.ALL_REDUCE, np.array([[0, 4]]), fabric, "tree") == pytest.approx(
        expected, rel=1e-12
    )


@pytest.mark.parametrize(("d", "k"), [(2, 2), (4, 4), (3, 8)])
def test_hierarchical_all_reduce(d, k):
    fabric = cluster(d * k, k)
    intra_node = 2 * (k - 1) * route_latency(fabric, 0, 1) + 2 * (k - 1) / k * PAYLOAD / NVLINK
    between = 2 * (d - 1) * route_latency(fabric, 0, k) + 2 * (d - 1) / d * PAYLOAD / k / NIC
    measured = collective_seconds(CollectiveType.ALL_REDUCE, np.arange(d * k)[None], fabric, "hierarchical")
    assert measured == pytest.approx(intra_node + between, rel=1e-12)


def test_send_and_receive():
    fabric = cluster(8, 4)
    local, remote = collective_seconds(CollectiveType.SEND_RECV, np.array([[0, 1], [2, 6]]), fabric, "pairwise")
    assert local == pytest.approx(route_latency(fabric, 0, 1) + PAYLOAD / NVLINK, rel=1e-12)
    assert remote == pytest.approx(route_latency(fabric, 2, 6) + PAYLOAD / NIC, rel=1e-12)


def test_two_flows_through_one_nic_take_twice_as_long():
    """GPUs 0 and 4 send to GPU 8 at once: its NIC receives both."""
    fabric = cluster(12, 4)
    one_flow = collective_seconds(CollectiveType.SEND_RECV, np.array([[0, 8]]), fabric, "pairwise")
    two_flows = collective_seconds(CollectiveType.SEND_RECV, np.array([[0, 8], [4, 8]]), fabric, "pairwise")
    a = route_latency(fabric, 0, 8)
    assert two_flows - a == pytest.approx(2 * (one_flow - a).repeat(2), rel=1e-12)


def test_a_shift_is_bound_by_its_slowest_hop():
    """8 ranks on 2 nodes of 4: 7 steps of an eighth each, through one NIC of each node however many it has."""
    fabric = cluster(8, 4)
    expected = 7 * (route_latency(fabric, 3, 4) + PAYLOAD / 8 / NIC)
    assert collective_seconds(CollectiveType.SHIFT, np.arange(8)[None], fabric, "pairwise") == pytest.approx(
        expected, rel=1e-12
    )


@pytest.mark.parametrize("n", [2, 5, 8])
def test_all_to_all_through_one_port(n):
    fabric = cluster(n, n)
    expected = route_latency(fabric, 0, 1) + (n - 1) / n * PAYLOAD / NVLINK
    assert collective_seconds(CollectiveType.ALL_TO_ALL, np.arange(n)[None], fabric, "pairwise") == pytest.approx(
        expected, rel=1e-12
    )


def test_a_pipelined_chain_needs_n_minus_2_more_chunks():
    """Broadcast along a chain: S / B, and the last rank starts n-2 chunk times after the second."""
    n, chunk = 6, 1e6
    fabric = cluster(n, n)
    expected = (n - 1) * route_latency(fabric, 0, 1) + (PAYLOAD + (n - 2) * chunk) / NVLINK
    measured = collective_seconds(CollectiveType.BROADCAST, np.arange(n)[None], fabric, "ring", ideal_library(chunk))
    assert measured == pytest.approx(expected, rel=1e-12)


def test_a_linear_broadcast_root_sends_n_minus_1_payloads():
    n = 6
    fabric = cluster(n, n)
    expected = route_latency(fabric, 0, 1) + (n - 1) * PAYLOAD / NVLINK
    assert collective_seconds(CollectiveType.BROADCAST, np.arange(n)[None], fabric, "linear") == pytest.approx(
        expected, rel=1e-12
    )


@pytest.mark.parametrize("factor", [1.0, 2.0, 7.0])
def test_an_oversubscribed_spine_slows_crossing_flows_by_its_factor(factor):
    """Two leaves of two nodes of 4; all GPUs of leaf 0 send to leaf 1: 8 NICs share 1/f of their rate."""
    fabric = cluster(16, 4, nodes_per_leaf=2, oversubscription=factor)
    pairs = np.stack([np.arange(8), np.arange(8) + 8], axis=1)
    expected = route_latency(fabric, 0, 8) + factor * PAYLOAD / NIC
    assert collective_seconds(CollectiveType.SEND_RECV, pairs, fabric, "pairwise") == pytest.approx(
        np.full(8, expected), rel=1e-12
    )


def test_twice_the_rates_and_half_the_latencies_halve_the_time():
    node = NodeSpec(4, Port(1e15, 1e-7), NvlinkSpec(4, Port(NVLINK, 1e-6)), None, NicSpec(4, Port(NIC, 2e-6)))
    fast_node = NodeSpec(
        4, Port(2e15, 5e-8), NvlinkSpec(4, Port(2 * NVLINK, 5e-7)), None, NicSpec(4, Port(2 * NIC, 1e-6))
    )
    members = np.arange(16)[None]
    for name in ("ring", "tree", "nvls", "hierarchical"):
        slow_time = collective_seconds(
            CollectiveType.ALL_REDUCE,
            members,
            ClosFabric(node, NetworkSpec(LeafSpec(8, 4, 0.0), SpreadEcmp()), 16),
            name,
        )
        fast_time = collective_seconds(
            CollectiveType.ALL_REDUCE,
            members,
            ClosFabric(fast_node, NetworkSpec(LeafSpec(8, 4, 0.0), SpreadEcmp()), 16),
            name,
        )
        assert 2 * fast_time == pytest.approx(slow_time, rel=1e-12)
