"""How long does a rank need to copy to and from its host, and the host to compute for it?

    copy = latency + bytes / min(link, bandwidth of the host's memory / GPUs of the node)
    work = bytes / (bandwidth of the host's memory / GPUs of the node · share that such work reaches)

All GPUs of a node do the same at the same time (`hardware.host_memory`), so nothing depends on when they do it.
"""

from dataclasses import dataclass
from typing import Protocol

import numpy as np

from clustersim.common.arrays import FloatArray, IntArray
from clustersim.cost.timing import Bottleneck, CommCost, CommTiming, LinkDemand, LinkDemandCost, Provenance
from clustersim.hardware.host_memory import HostMemory
from clustersim.program.task import CommOp, HostOp, HostOpKind
from clustersim.symmetry.link_load_matrix import NO_LINK_LOADS


class CommModel(CommCost, LinkDemandCost, Protocol):
    """What times the exchanges between ranks."""


@dataclass(frozen=True, slots=True)
class HostTransferCost:
    """Times what ranks do with their hosts, and by `others` what they do with each other.

    An `CommCost` and a `LinkDemandCost`. sharers: [ranks] GPUs that use the memory of each rank's host at
    the same time.
    """

    base: CommModel
    host_memory: HostMemory
    sharing_gpus: IntArray

    def time_comm_op(self, comm_op: CommOp) -> CommTiming:
        """Seconds of one exchange in each group of its role."""
        if not isinstance(comm_op, HostOp):
            return self.base.time_comm_op(comm_op)
        seconds = self._host_seconds(comm_op)
        bound = Bottleneck.HOST_MEMORY if comm_op.kind is HostOpKind.ON_HOST else Bottleneck.HOST_LINK
        return CommTiming(seconds, Provenance.ROOFLINE, bound, "copy", "host")

    def link_demand(self, comm_op: CommOp) -> LinkDemand:
        """What one exchange asks of the network's links: of the host's, nothing that is shared."""
        if not isinstance(comm_op, HostOp):
            return self.base.link_demand(comm_op)
        zeros = np.zeros(len(self.sharing_gpus))
        return LinkDemand(self.time_comm_op(comm_op).seconds, zeros, zeros, zeros, comm_op.payload, NO_LINK_LOADS)

    def _host_seconds(self, comm_op: HostOp) -> FloatArray:
        """Of each rank."""
        memory_bandwidth = self.host_memory.bandwidth / self.sharing_gpus
        match comm_op.kind:
            case HostOpKind.D2H:
                return self.host_memory.latency + comm_op.payload / np.minimum(
                    self.host_memory.to_host, memory_bandwidth
                )
            case HostOpKind.H2D:
                return self.host_memory.latency + comm_op.payload / np.minimum(
                    self.host_memory.from_host, memory_bandwidth
                )
        return comm_op.payload / (memory_bandwidth * self.host_memory.optimizer_fraction)
