"""Point-to-point messages are limited by the channels that NCCL assigns to them."""

from dataclasses import replace

import numpy as np
import pytest

from clustersim.collectives.library import P2pChannelConstants
from clustersim.collectives.library_files import load_library
from clustersim.collectives.p2p_channels import largest_component_size, p2p_channels
from clustersim.collectives.tuner import Tuner, select_variants
from clustersim.cost.collective_cost import CollectiveCost
from clustersim.hardware.cluster import load_cluster
from clustersim.program.program import ProcessGroups
from clustersim.program.task import CollectiveType, CommOp

CHANNELS = P2pChannelConstants(max_channels=32, bytes_per_channel=65536.0, max_bytes_per_channel=2.0**24)
KIB, MIB = 2**10, 2**20


@pytest.mark.parametrize(
    ("message", "expected"),
    [(8, 1), (64 * KIB, 1), (128 * KIB, 2), (MIB, 4), (64 * MIB, 4), (65 * MIB, 8), (256 * MIB, 16), (2**40, 32)],
)
def test_a_p2p_message_among_eight_ranks_has_four_channels_and_more_if_large(message, expected):
    """NCCL's scheduleP2pTasksToPlan halves 32 until 8 ranks have 4 each; addP2pToPlan doubles above 16 MiB."""
    assert CHANNELS.channel_count(message, ranks=8) == expected


def test_two_ranks_share_all_channels_and_many_have_one_each():
    assert CHANNELS.channel_count(64 * MIB, ranks=2) == 16
    assert CHANNELS.channel_count(MIB, ranks=100) == 1


def test_the_communicator_size_is_the_largest_connected_component():
    ring = np.array([[0, 1], [1, 2], [2, 3], [3, 0], [8, 9]])
    assert largest_component_size(ring) == 4
    assert largest_component_size(np.array([[9, 8], [7, 8], [6, 7], [5, 6], [4, 5]])) == 6


def test_p2p_channels_limit_only_messages_within_a_domain():
    fabric = load_cluster("hgx-b200", 16).fabric
    assert p2p_channels(CollectiveType.SEND_RECV, np.array([[0, 8]]), fabric) is None
    assert p2p_channels(CollectiveType.ALL_REDUCE, np.array([[0, 1]]), fabric) is None
    assert p2p_channels(CollectiveType.ALL_TO_ALL, np.arange(8)[None], fabric) is not None


def test_message_time_is_bytes_over_channel_bandwidth():
    """64 MiB among eight use 4 channels of 21 GB/s; twice as much over twice as many takes as long."""
    fabric, library = load_cluster("hgx-b200", 8).fabric, load_library("nccl")
    ring = np.stack([np.arange(8), np.roll(np.arange(8), -1)], axis=1)
    variant_costs = Tuner(fabric, library).evaluate_variants(CollectiveType.SEND_RECV, ring)
    small, large, double = (select_variants(variant_costs, size) for size in (8.0, 64.0 * MIB, 128.0 * MIB))
    latency = select_variants(
        variant_costs, 32.0 * KIB
    ).latency.max()  # of the Simple protocol, which is selected for large messages
    assert large.seconds.max() == pytest.approx(latency + 64 * MIB / (4 * 21e9), rel=0.01)
    assert double.seconds.max() == pytest.approx(large.seconds.max(), rel=0.01)
    unlimited = replace(library, p2p_channels=None)
    assert select_variants(replace(variant_costs, library=unlimited), 8.0).seconds.max() == small.seconds.max()
    assert (
        select_variants(replace(variant_costs, library=unlimited), 64.0 * MIB).seconds.max() < large.seconds.max() / 2
    )


def test_an_uncontended_message_on_a_shared_network_takes_its_channel_time():
    """Latency, transfer over links and the additional channel time sum to its duration."""
    fabric, library = load_cluster("hgx-b200", 8).fabric, load_library("nccl")
    groups = {"pp": ProcessGroups("pp", np.stack([np.arange(7), np.arange(1, 8)], axis=1))}
    cost = CollectiveCost(fabric, library, groups)
    comm_op = CommOp("send", CollectiveType.SEND_RECV, "pp", 64.0 * MIB)
    demand = cost.link_demand(comm_op)
    assert demand.latency + demand.transfer == pytest.approx(cost.time_comm_op(comm_op).seconds)
