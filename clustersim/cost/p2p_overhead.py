"""What host overhead does a message between pipeline stages have?

Megatron-LM sends and receives in one batch (`batch_isend_irecv`) and then waits for the device
(`torch.cuda.synchronize`), so that a message takes its transfer time plus, whatever its size, the time that
both hosts need to launch it and to notice that it has arrived. `Framework.p2p_seconds` is that time.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np

from clustersim.common.arrays import FloatArray
from clustersim.common.units import Seconds
from clustersim.cost.host_transfers import CommModel
from clustersim.cost.timing import CommTiming, LinkDemand
from clustersim.parallel.mesh import FROM_ENCODER_GROUP, TO_ENCODER_GROUP
from clustersim.parallel.process_groups import P2P_DIRECTIONS
from clustersim.program.program import ProcessGroups
from clustersim.program.task import CommOp

_PIPELINE_GROUPS = frozenset(group.name for group in (*P2P_DIRECTIONS, FROM_ENCODER_GROUP, TO_ENCODER_GROUP))


@dataclass(frozen=True, slots=True)
class P2pLaunchOverhead:
    """Times communication ops by `base`, and adds `overhead_seconds` to messages between pipeline stages.

    A `CommCost` and a `LinkDemandCost`. groups: process groups by communicator.
    """

    base: CommModel
    overhead_seconds: Seconds
    groups: Mapping[str, ProcessGroups]

    def time_comm_op(self, comm_op: CommOp) -> CommTiming:
        """Timing of one communication op in each group of its communicator."""
        timing = self.base.time_comm_op(comm_op)
        return replace(timing, seconds=self._add_overhead(comm_op, timing.seconds))

    def link_demand(self, comm_op: CommOp) -> LinkDemand:
        """Load of one communication op on shared links; the host's overhead counts as latency."""
        demand = self.base.link_demand(comm_op)
        return replace(demand, latency=self._add_overhead(comm_op, demand.latency))

    def _add_overhead(self, comm_op: CommOp, seconds: FloatArray) -> FloatArray:
        if comm_op.comm_group not in _PIPELINE_GROUPS or self.groups[comm_op.comm_group].members.shape[1] < 2:
            return seconds
        return np.asarray(seconds + self.overhead_seconds)
