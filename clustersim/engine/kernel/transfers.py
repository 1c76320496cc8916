"""Data transfers of collectives and messages: how long does one take from when it can start?

Uncontended, its modeled duration. On shared links, its latency and then a flow of the fluid network.
Concurrent kernels may slow the data transfer, but not the latency on shared links.
"""

from collections.abc import Callable
from functools import partial
from typing import Final, Protocol

import simpy

from clustersim.common.units import Seconds
from clustersim.cost.segment import SegmentCost
from clustersim.engine.kernel.environment import SimEnvironment
from clustersim.engine.kernel.fluid_action import FluidAction
from clustersim.engine.kernel.in_flight_collective import InFlightCollective
from clustersim.engine.kernel.network.flow_demands import FlowDemands
from clustersim.engine.kernel.network.fluid_network import Flow, FlowDemand, FluidNetwork
from clustersim.program.task import CommOp


class Transfers(Protocol):
    """Interface between ranks and the transport of their data."""

    @property
    def network(self) -> FluidNetwork | None:
        """The network of links that comm ops share; None where all are uncontended."""

    def begin_transfer(self, rank: int, comm_op: CommOp) -> simpy.Event:
        """Begin a comm op of the rank's group; the returned event is its completion."""

    def prepare(self, rank: int, comm_op: CommOp) -> Callable[[], simpy.Event]:
        """A function that begins a comm op of the rank's group, for repeated use."""

    def latency_and_demand(self, rank: int, comm_op: CommOp) -> tuple[Seconds, FlowDemand | None]:
        """Seconds before data move, and the demand on shared links (None: none), in the rank's group."""

    def begin_collective(self, rank: int, comm_op: CommOp) -> InFlightCollective:
        """`begin`, for a collective that kernels of its members may slow."""


class UncontendedTransfers:
    """Every comm op takes its modeled duration."""

    network: Final = None

    def __init__(self, environment: SimEnvironment, cost: SegmentCost) -> None:
        self._environment, self._cost = environment, cost
        self._seconds_cache: dict[tuple[CommOp, int], Seconds] = {}

    def begin_transfer(self, rank: int, comm_op: CommOp) -> simpy.Event:
        """Wait for the duration of a comm op in the rank's group."""
        return simpy.Timeout(self._environment, self._comm_seconds(rank, comm_op))

    def prepare(self, rank: int, comm_op: CommOp) -> Callable[[], simpy.Event]:
        """A function that waits for that duration."""
        return partial(simpy.Timeout, self._environment, self._comm_seconds(rank, comm_op))

    def latency_and_demand(self, rank: int, comm_op: CommOp) -> tuple[Seconds, FlowDemand | None]:
        """The duration, and no demand on links."""
        return self._comm_seconds(rank, comm_op), None

    def begin_collective(self, rank: int, comm_op: CommOp) -> InFlightCollective:
        """A collective whose rate may change."""
        action = FluidAction(self._environment, self._comm_seconds(rank, comm_op))
        action.set_rate(1.0)
        return InFlightCollective(action)

    def _comm_seconds(self, rank: int, comm_op: CommOp) -> Seconds:
        seconds = self._seconds_cache.get((comm_op, rank))
        if seconds is None:
            seconds = self._seconds_cache[comm_op, rank] = self._cost.comm_timing(rank, comm_op).seconds
        return seconds


class ContendedTransfers:
    """Comm ops share the links of a fluid network."""

    def __init__(self, environment: SimEnvironment, demands: FlowDemands, network: FluidNetwork) -> None:
        self._environment, self._demands, self.network = environment, demands, network

    def begin_transfer(self, rank: int, comm_op: CommOp) -> simpy.Event:
        """Wait for the latency of a comm op, then start its flow."""
        return self._begin_action(*self._demands.latency_and_demand(rank, comm_op)).done

    def prepare(self, rank: int, comm_op: CommOp) -> Callable[[], simpy.Event]:
        """A function that does so."""
        latency, demand = self._demands.latency_and_demand(rank, comm_op)
        return lambda: self._begin_action(latency, demand).done

    def latency_and_demand(self, rank: int, comm_op: CommOp) -> tuple[Seconds, FlowDemand | None]:
        """The latency, and the demand of the flow if it moves data."""
        return self._demands.latency_and_demand(rank, comm_op)

    def begin_collective(self, rank: int, comm_op: CommOp) -> InFlightCollective:
        """A flow whose rate may be bounded; the latency is not affected."""
        latency, demand = self._demands.latency_and_demand(rank, comm_op)
        return InFlightCollective(self._begin_action(latency, demand), moves_data=demand is not None)

    def _begin_action(self, latency: Seconds, demand: FlowDemand | None) -> FluidAction:
        """A flow that begins after the latency; without demand, the latency itself."""
        if demand is None:
            action = FluidAction(self._environment, latency)
            action.set_rate(1.0)
            return action
        flow = Flow(self.network, demand)
        simpy.Timeout(self._environment, latency).callbacks.append(lambda _: self.network.begin_flow(flow))
        return flow
