"""How long does the host need for launches that are tasks of its own (`LaunchOp`)?

A segment of an interleaved pass begins when the host is so far ahead that it is not waited for inside (`LaunchLead`),
so its launches are two tasks: up to there, and the rest, which the host does while the segment runs. Collectives inside
count as long as they take in their fastest group, kernels as long as with balanced experts.
"""

from dataclasses import dataclass

import numpy as np

from clustersim.common.arrays import FloatArray
from clustersim.common.cached_method import cached_method
from clustersim.common.units import Seconds
from clustersim.cost.device_models import DeviceModel, DeviceModels
from clustersim.cost.host_launch import LaunchLead
from clustersim.cost.host_transfers import CommModel
from clustersim.cost.timing import Bottleneck, CommTiming, LinkDemand, Provenance
from clustersim.program.task import CommOp, LaunchOp, Operation, Segment
from clustersim.symmetry.link_load_matrix import NO_LINK_LOADS


@dataclass(frozen=True)
class LaunchCost:
    """Times launches by the host of each rank's device, and by `base` everything else (a `CommModel`)."""

    base: CommModel
    devices: DeviceModels

    def time_comm_op(self, comm_op: CommOp) -> CommTiming:
        """Timing of one op in each group of its communicator."""
        return self._launch_timing(comm_op) if isinstance(comm_op, LaunchOp) else self.base.time_comm_op(comm_op)

    def link_demand(self, comm_op: CommOp) -> LinkDemand:
        """Load of one op on the network's links: none for launches."""
        if not isinstance(comm_op, LaunchOp):
            return self.base.link_demand(comm_op)
        seconds = self._launch_timing(comm_op).seconds
        zeros = np.zeros(len(seconds))
        return LinkDemand(seconds, zeros, zeros, zeros, comm_op.payload, NO_LINK_LOADS)

    @cached_method
    def _launch_timing(self, launch_op: LaunchOp) -> CommTiming:
        """[ranks] seconds of launches."""
        seconds = [self._launch_seconds(launch_op, index) for index in range(len(self.devices.models))]
        rank_seconds: FloatArray = np.array(seconds)[self.devices.index_of_rank]
        return CommTiming(rank_seconds, Provenance.PUBLISHED, Bottleneck.LAUNCH, "launches", "host")

    def _launch_seconds(self, launch_op: LaunchOp, model_index: int) -> Seconds:
        """Seconds of launches for one kind of device."""
        continued, begun = launch_op.continued, launch_op.begun
        rest = 0.0
        if continued is not None:
            lead = self._lead(continued, model_index)
            rest = lead.total - lead.needed
        return rest + (0.0 if begun is None else self._lead(begun, model_index).needed)

    @cached_method
    def _lead(self, segment: Segment, model_index: int) -> LaunchLead:
        """How far the host has to be ahead at a segment's begin."""
        model = self.devices.models[model_index]
        by_operation = {operation: self._device_seconds(operation, model) for operation in segment.distinct_operations}
        seconds = np.array([by_operation[operation] for operation in segment.operations])
        return model.host.launch_lead(segment, seconds)

    def _device_seconds(self, operation: Operation, model: DeviceModel) -> Seconds:
        """Seconds of an operation on the device; the longer of kernel and collective where both overlap."""
        kernel, comm_op = operation.kernel, operation.comm_op
        return max(
            0.0 if kernel is None else model.kernels.time_kernel(kernel).seconds,
            0.0 if comm_op is None else float(self.base.time_comm_op(comm_op).seconds.min()),
        )
