"""How long does a rank need to copy to and from its host, and the host to compute for it?

    copy = latency + bytes / min(link, host memory bandwidth / GPUs of the node)
    work = bytes / min(host memory bandwidth / GPUs of the node · fraction that such work reaches,
                       threads · bandwidth of a core)

All GPUs of a node are assumed to use the host at the same time (`hardware.host_memory`), so durations do not
depend on timing.
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
    """A model that times communication ops between ranks and gives their link demands."""


@dataclass(frozen=True, slots=True)
class HostTransferCost:
    """Times host ops of ranks, and by `base` communication ops between ranks.

    A `CommCost` and a `LinkDemandCost`. sharing_gpus: [ranks] GPUs that use the memory of each rank's host at
    the same time; threads: that work for a rank on its host, each on a core; None: as many as its memory keeps busy.
    """

    base: CommModel
    host_memory: HostMemory
    sharing_gpus: IntArray
    threads: int | None = None

    def time_comm_op(self, comm_op: CommOp) -> CommTiming:
        """Timing of one op in each group of its communicator."""
        if not isinstance(comm_op, HostOp):
            return self.base.time_comm_op(comm_op)
        seconds = self._host_seconds(comm_op)
        bound = Bottleneck.HOST_MEMORY if comm_op.kind is HostOpKind.ON_HOST else Bottleneck.HOST_LINK
        return CommTiming(seconds, Provenance.ROOFLINE, bound, "copy", "host")

    def link_demand(self, comm_op: CommOp) -> LinkDemand:
        """Load of one op on the network's links: none for host ops."""
        if not isinstance(comm_op, HostOp):
            return self.base.link_demand(comm_op)
        zeros = np.zeros(len(self.sharing_gpus))
        return LinkDemand(self.time_comm_op(comm_op).seconds, zeros, zeros, zeros, comm_op.payload, NO_LINK_LOADS)

    def _host_seconds(self, comm_op: HostOp) -> FloatArray:
        """[ranks] seconds of a host op."""
        memory_bandwidth = self.host_memory.bandwidth / self.sharing_gpus
        match comm_op.kind:
            case HostOpKind.D2H:
                return self.host_memory.latency + comm_op.payload / np.minimum(
                    self.host_memory.device_to_host, memory_bandwidth
                )
            case HostOpKind.H2D:
                return self.host_memory.latency + comm_op.payload / np.minimum(
                    self.host_memory.host_to_device, memory_bandwidth
                )
        work_bandwidth = memory_bandwidth * self.host_memory.optimizer_fraction
        if self.threads is not None and self.host_memory.core_bandwidth is not None:
            work_bandwidth = np.minimum(work_bandwidth, self.threads * self.host_memory.core_bandwidth)
        return comm_op.payload / work_bandwidth
