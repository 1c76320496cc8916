"""How fast are messages that travel on few channels?

NCCL sends a message on a number of its channels (thread blocks), each of which copies at its own rate over NVLink. In
a communicator of many ranks every peer has few of them, so that a message of tens of megabytes is slower than its
link; larger ones get more channels. Between domains the network is slower than the channels, and they do not count.

Reference: NVIDIA/nccl@5067397c, src/enqueue.cc, scheduleP2pTasksToPlan and addP2pToPlan.
"""

from dataclasses import dataclass

import numpy as np

from clustersim.collectives.library import Library, Makes
from clustersim.common.arrays import IntArray
from clustersim.common.units import Bytes, Seconds
from clustersim.hardware.topology import Fabric
from clustersim.program.task import CollectiveType


@dataclass(frozen=True, slots=True)
class Lanes:
    """Messages of each rank. message: part of the payload that one is; beside: at once; rounds: one after the other;

    ranks: of the communicator.
    """

    message: float
    beside: int
    rounds: int
    ranks: int

    def seconds(self, payload: Bytes, library: Library, makes: Makes) -> Seconds:
        """What the channels take on such a machine; 0 where they do not limit messages."""
        if library.channels is None:
            return 0.0
        size = self.message * payload
        channels = min(library.channels.all, self.beside * library.channels.of(size, self.ranks))
        return self.rounds * self.beside * size / (channels * library.channel_on(makes))


def lanes(kind: CollectiveType, members: IntArray, fabric: Fabric) -> Lanes | None:
    """Of groups [groups, size]; None for collectives without messages, and where messages leave a domain.

    Pairs of a role (the neighbours in a pipeline) are of one communicator with all whom they are connected with.
    """
    size = members.shape[1]
    if kind not in (CollectiveType.SEND_RECV, CollectiveType.SHIFT, CollectiveType.ALL_TO_ALL):
        return None
    domains = fabric.domains(members)
    if (domains != domains[:, :1]).any():
        return None
    if kind is CollectiveType.ALL_TO_ALL:
        return Lanes(1.0 / size, beside=size - 1, rounds=1, ranks=size)
    if kind is CollectiveType.SHIFT:
        return Lanes(1.0 / size, beside=1, rounds=size - 1, ranks=size)
    return Lanes(1.0, beside=1, rounds=1, ranks=connected(members))


def connected(members: IntArray) -> int:
    """How many are the most that groups [groups, size] connect, directly or by way of others."""
    _, place = np.unique(members, return_inverse=True)
    groups = place.reshape(members.shape)
    label = np.arange(int(groups.max(initial=0)) + 1)
    while True:
        least = label[groups].min(axis=1, keepdims=True)
        lower = label.copy()
        np.minimum.at(lower, groups, np.broadcast_to(least, groups.shape))
        if np.array_equal(lower, label):
            return int(np.bincount(label).max(initial=0))
        label = lower[lower]
