"""Sub-segments: what a segment that is not a single event is split into. Pure data, computed by `split_segment`."""

from collections.abc import Callable
from dataclasses import dataclass

import simpy

from clustersim.common.units import Seconds
from clustersim.cost.segment import OverlapModel
from clustersim.engine.kernel.network.fluid_network import FlowDemand
from clustersim.engine.scalar.segment_action import ProgressCurves
from clustersim.program.task import CommOp


@dataclass(frozen=True, slots=True, eq=False)
class ContendedTransfer:
    """The transfer of an operation whose comm op shares links.

    begin: starts it; latency: seconds before data move; demand: on links from then on, None: nothing moves;
    uncontended_seconds: its duration on uncontended links; overlap: model of its overlap with a kernel, if it has
    one; exposed_seconds: what the kernel does not hide of it.
    """

    begin: Callable[[], simpy.Event]
    latency: Seconds
    demand: FlowDemand | None
    uncontended_seconds: Seconds
    overlap: OverlapModel | None
    exposed_seconds: Seconds


@dataclass(frozen=True, slots=True, eq=False)
class SubSegment:
    """Operations `begin` to before `end` of a segment, which run as one event.

    sync_op: comm op for which other simulated ranks must arrive first; transfer: of a comm op that shares links;
    curves: progress curves of its operations, None where they differ from run to run.
    """

    begin: int
    end: int
    sync_op: CommOp | None
    transfer: ContendedTransfer | None
    curves: ProgressCurves | None
