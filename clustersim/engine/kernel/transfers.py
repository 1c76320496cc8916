"""How long does a collective or message take from when it can start?

Uncontended, as long as it takes alone. On a shared network, its latency and then as long as the links let it. Kernels
beside it slow what moves data, not the latency on a shared network.
"""

from collections.abc import Callable
from functools import partial
from typing import Final, Protocol

import simpy

from clustersim.common.units import Seconds
from clustersim.cost.segment import SegmentCost
from clustersim.engine.kernel.environment import SimEnvironment
from clustersim.engine.kernel.in_flight_collective import InFlightCollective, PrivateCollective
from clustersim.engine.kernel.network.flow_demands import FlowDemands
from clustersim.engine.kernel.network.fluid_network import FlowDemand, FluidNetwork
from clustersim.program.task import CommOp


class Transfers(Protocol):
    """The seam between ranks and what carries their data."""

    @property
    def network(self) -> FluidNetwork | None:
        """The links that exchanges share; None where each has its own."""

    def begin_transfer(self, rank: int, comm_op: CommOp) -> simpy.Event:
        """Move the data of an exchange of the rank's group; the event happens when it is done."""

    def prepare(self, rank: int, comm_op: CommOp) -> Callable[[], simpy.Event]:
        """What begins an exchange that the rank's group runs again and again."""

    def latency_and_demand(self, rank: int, comm_op: CommOp) -> tuple[Seconds, FlowDemand | None]:
        """Seconds before anything moves, and what it asks of links that others share, in the rank's group."""

    def begin_collective(self, rank: int, comm_op: CommOp) -> InFlightCollective:
        """The same, where kernels of members may slow it."""


class UncontendedTransfers:
    """Every exchange takes its own time."""

    network: Final = None

    def __init__(self, environment: SimEnvironment, cost: SegmentCost) -> None:
        self._environment, self._cost = environment, cost
        self._seconds_cache: dict[tuple[CommOp, int], Seconds] = {}

    def begin_transfer(self, rank: int, comm_op: CommOp) -> simpy.Event:
        """Wait for the duration of an exchange in the rank's group."""
        return self._environment.event_after(self._comm_seconds(rank, comm_op))

    def prepare(self, rank: int, comm_op: CommOp) -> Callable[[], simpy.Event]:
        """What waits for so long, each time."""
        return partial(self._environment.event_after, self._comm_seconds(rank, comm_op))

    def latency_and_demand(self, rank: int, comm_op: CommOp) -> tuple[Seconds, FlowDemand | None]:
        """Its duration, and nothing of links."""
        return self._comm_seconds(rank, comm_op), None

    def begin_collective(self, rank: int, comm_op: CommOp) -> InFlightCollective:
        """The same, at a pace that may change."""
        collective = PrivateCollective(self._environment, self._comm_seconds(rank, comm_op))
        return InFlightCollective(collective.done, collective.set_rate_bound)

    def _comm_seconds(self, rank: int, comm_op: CommOp) -> Seconds:
        seconds = self._seconds_cache.get((comm_op, rank))
        if seconds is None:
            seconds = self._seconds_cache[comm_op, rank] = self._cost.comm_timing(rank, comm_op).seconds
        return seconds


class ContendedTransfers:
    """Exchanges share the links of a network."""

    def __init__(self, environment: SimEnvironment, demands: FlowDemands, network: FluidNetwork) -> None:
        self._environment, self._demands, self.network = environment, demands, network

    def begin_transfer(self, rank: int, comm_op: CommOp) -> simpy.Event:
        """Wait for the latency of an exchange, then load the network with its bytes."""
        return self._begin_flow(*self._demands.latency_and_demand(rank, comm_op))

    def prepare(self, rank: int, comm_op: CommOp) -> Callable[[], simpy.Event]:
        """What does so, each time."""
        return partial(self._begin_flow, *self._demands.latency_and_demand(rank, comm_op))

    def _begin_flow(self, latency: Seconds, demand: FlowDemand | None) -> simpy.Event:
        latency_end = self._environment.event_after(latency)
        if demand is None:
            return latency_end
        flow = self.network.create_flow(demand)
        latency_end.callbacks.append(lambda _: self.network.begin_flow(flow))
        return flow.done

    def latency_and_demand(self, rank: int, comm_op: CommOp) -> tuple[Seconds, FlowDemand | None]:
        """Its latency, and its load if it moves anything."""
        return self._demands.latency_and_demand(rank, comm_op)

    def begin_collective(self, rank: int, comm_op: CommOp) -> InFlightCollective:
        """The same, at a speed that is limited from time to time; what is all latency is not."""
        latency, demand = self._demands.latency_and_demand(rank, comm_op)
        latency_end = self._environment.event_after(latency)
        if demand is None:
            return InFlightCollective(latency_end, lambda _: None)
        flow = self.network.create_flow(demand)
        latency_end.callbacks.append(lambda _: self.network.begin_flow(flow))
        return InFlightCollective(flow.done, lambda rate: self.network.set_rate_bound(flow, rate))
