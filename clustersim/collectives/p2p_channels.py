"""How fast are p2p messages that use few channels?

NCCL sends a message on a number of its channels (thread blocks), each of which copies at its own rate over
NVLink. In a communicator of many ranks every peer gets few of them, so that a message of tens of megabytes is
slower than its link; larger ones get more channels. Between domains the network is slower than the channels,
which then do not count.

Reference: NVIDIA/nccl@5067397c, src/enqueue.cc, scheduleP2pTasksToPlan and addP2pToPlan.
"""

from dataclasses import dataclass

import numpy as np

from clustersim.collectives.library import Library, LinkTechnologies
from clustersim.common.arrays import IntArray
from clustersim.common.units import Bytes, Seconds
from clustersim.hardware.topology import Fabric
from clustersim.program.task import CollectiveType


@dataclass(frozen=True, slots=True)
class P2pChannels:
    """P2p messages of each rank.

    message_share: fraction of the payload in one message; concurrent_messages: sent at once; sequential_messages:
    sent one after the other; ranks: size of the communicator.
    """

    message_share: float
    concurrent_messages: int
    sequential_messages: int
    ranks: int

    def channel_seconds(self, payload: Bytes, library: Library, technologies: LinkTechnologies) -> Seconds:
        """Seconds that the channels need on a machine with these technologies; 0 where they do not limit messages."""
        if library.p2p_channels is None:
            return 0.0
        size = self.message_share * payload
        channels = min(
            library.p2p_channels.max_channels,
            self.concurrent_messages * library.p2p_channels.channel_count(size, self.ranks),
        )
        return (
            self.sequential_messages
            * self.concurrent_messages
            * size
            / (channels * library.channel_rate_on(technologies))
        )


def p2p_channels(collective: CollectiveType, members: IntArray, fabric: Fabric, senders: int = 1) -> P2pChannels | None:
    """P2p messages of groups [groups, size]. senders: of send/recv, the first members.

    None for collectives without messages, and where messages leave a domain.

    Pairs (the neighbours in a pipeline) belong to one communicator with all ranks that they are connected with.
    """
    size = members.shape[1]
    if collective not in (CollectiveType.SEND_RECV, CollectiveType.SHIFT, CollectiveType.ALL_TO_ALL):
        return None
    domains = fabric.domain_ids(members)
    if (domains != domains[:, :1]).any():
        return None
    if collective is CollectiveType.ALL_TO_ALL:
        return P2pChannels(1.0 / size, concurrent_messages=size - 1, sequential_messages=1, ranks=size)
    if collective is CollectiveType.SHIFT:
        return P2pChannels(1.0 / size, concurrent_messages=1, sequential_messages=size - 1, ranks=size)
    receivers = size - senders
    return P2pChannels(
        1.0 / (senders * receivers),
        concurrent_messages=max(senders, receivers),
        sequential_messages=1,
        ranks=largest_component_size(members),
    )


def largest_component_size(members: IntArray) -> int:
    """Number of ranks in the largest connected component of groups [groups, size]."""
    _, rank_index = np.unique(members, return_inverse=True)
    member_index = rank_index.reshape(members.shape)
    label = np.arange(int(member_index.max(initial=0)) + 1)
    while True:
        min_label = label[member_index].min(axis=1, keepdims=True)
        lowered = label.copy()
        np.minimum.at(lowered, member_index, np.broadcast_to(min_label, member_index.shape))
        if np.array_equal(lowered, label):
            return int(np.bincount(label).max(initial=0))
        label = lowered[lowered]
