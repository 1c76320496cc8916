"""What is a piece of a block that is not one event? Pure data, worked out by `cuts`."""

from collections.abc import Callable
from dataclasses import dataclass

import simpy

from clustersim.common.units import Seconds
from clustersim.cost.segment import OverlapModel
from clustersim.engine.kernel.network.fluid_network import FlowDemand
from clustersim.engine.scalar.fluid_action import ProgressCurves
from clustersim.program.task import CommOp


@dataclass(frozen=True, slots=True, eq=False)
class ContendedTransfer:
    """The exchange of an operation that shares links.

    begin: moves its data; latency: seconds before anything moves; load: what it asks of links then, None: nothing;
    alone: seconds that it takes if nobody shares them; beside: with its kernel, if it has one; exposed: seconds of it
    that the kernel does not hide.
    """

    begin: Callable[[], simpy.Event]
    latency: Seconds
    demand: FlowDemand | None
    uncontended_seconds: Seconds
    overlap: OverlapModel | None
    exposed_seconds: Seconds


@dataclass(frozen=True, slots=True, eq=False)
class SubSegment:
    """Operations of a block that are run at once.

    met: the exchange for which other simulated ranks come before it; transfer: of an exchange that shares links; paces:
    of its operations as one, None where they differ from run to run.
    """

    begin: int
    end: int
    sync_op: CommOp | None
    transfer: ContendedTransfer | None
    curves: ProgressCurves | None
