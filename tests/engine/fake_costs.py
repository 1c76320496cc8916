"""Unit costs: a kernel of 3 FLOP takes 3 s, a communication operation of 2 bytes 2 s."""

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from clustersim.common.arrays import FloatArray
from clustersim.cost.device_models import DeviceModel, DeviceModels
from clustersim.cost.segment import SegmentCost
from clustersim.cost.timing import Bottleneck, CommTiming, KernelTiming, Provenance
from clustersim.model.kernels import Kernel
from clustersim.program.program import Program
from clustersim.program.task import CommOp


@dataclass(frozen=True)
class UnitCost:
    """One FLOP and one byte per `seconds_per_unit`; slowdowns: factors per group of a communication group type."""

    program: Program
    slowdowns: Mapping[str, list[float]] = field(default_factory=dict)
    seconds_per_unit: float = 1.0

    def time_kernel(self, kernel: Kernel) -> KernelTiming:
        return KernelTiming(kernel.flops * self.seconds_per_unit, Provenance.MEASURED, Bottleneck.COMPUTE)

    def time_comm_op(self, comm_op: CommOp) -> CommTiming:
        return CommTiming(self.comm_op_seconds(comm_op), Provenance.MEASURED, Bottleneck.BANDWIDTH, "unit", "link")

    def comm_op_seconds(self, comm_op: CommOp) -> FloatArray:
        groups = len(self.program.groups[comm_op.comm_group].members)
        factors = np.array(self.slowdowns.get(comm_op.comm_group, [1.0] * groups))
        return comm_op.payload * self.seconds_per_unit * factors

    @property
    def segment_cost(self) -> SegmentCost:
        return SegmentCost(self.program, DeviceModels.uniform(DeviceModel(self), self.program.world_size), self)
