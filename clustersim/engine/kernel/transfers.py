"""How long does a collective or message take from when it can start?

Uncontended, as long as it takes alone. On a shared network, its latency and then as long as the links let it. Kernels
beside it slow what moves data, not the latency on a shared network.
"""

from collections.abc import Callable
from functools import partial
from typing import Final, Protocol

import simpy

from clustersim.common.units import Seconds
from clustersim.cost.segment import BlockCost
from clustersim.engine.kernel.environment import Clock
from clustersim.engine.kernel.in_flight_collective import Alone, Moving
from clustersim.engine.kernel.network.flow_demands import Loads
from clustersim.engine.kernel.network.fluid_network import Load, Network
from clustersim.program.task import Exchange


class Transfers(Protocol):
    """The seam between ranks and what carries their data."""

    @property
    def network(self) -> Network | None:
        """The links that exchanges share; None where each has its own."""

    def begin(self, rank: int, exchange: Exchange) -> simpy.Event:
        """Move the data of an exchange of the rank's group; the event happens when it is done."""

    def ready(self, rank: int, exchange: Exchange) -> Callable[[], simpy.Event]:
        """What begins an exchange that the rank's group runs again and again."""

    def asks(self, rank: int, exchange: Exchange) -> tuple[Seconds, Load | None]:
        """Seconds before anything moves, and what it asks of links that others share, in the rank's group."""

    def moving(self, rank: int, exchange: Exchange) -> Moving:
        """The same, where kernels of members may slow it."""


class Uncontended:
    """Every exchange takes its own time."""

    network: Final = None

    def __init__(self, environment: Clock, cost: BlockCost) -> None:
        self._environment, self._cost = environment, cost
        self._seconds: dict[tuple[Exchange, int], Seconds] = {}

    def begin(self, rank: int, exchange: Exchange) -> simpy.Event:
        """Wait for the duration of an exchange in the rank's group."""
        return self._environment.wait(self._alone(rank, exchange))

    def ready(self, rank: int, exchange: Exchange) -> Callable[[], simpy.Event]:
        """What waits for so long, each time."""
        return partial(self._environment.wait, self._alone(rank, exchange))

    def asks(self, rank: int, exchange: Exchange) -> tuple[Seconds, Load | None]:
        """Its duration, and nothing of links."""
        return self._alone(rank, exchange), None

    def moving(self, rank: int, exchange: Exchange) -> Moving:
        """The same, at a pace that may change."""
        alone = Alone(self._environment, self._alone(rank, exchange))
        return Moving(alone.done, alone.limit)

    def _alone(self, rank: int, exchange: Exchange) -> Seconds:
        known = self._seconds.get((exchange, rank))
        if known is None:
            known = self._seconds[exchange, rank] = self._cost.exchange(rank, exchange).seconds
        return known


class Shared:
    """Exchanges share the links of a network."""

    def __init__(self, environment: Clock, loads: Loads, network: Network) -> None:
        self._environment, self._loads, self.network = environment, loads, network

    def begin(self, rank: int, exchange: Exchange) -> simpy.Event:
        """Wait for the latency of an exchange, then load the network with its bytes."""
        return self._begin(*self._loads.of(rank, exchange))

    def ready(self, rank: int, exchange: Exchange) -> Callable[[], simpy.Event]:
        """What does so, each time."""
        return partial(self._begin, *self._loads.of(rank, exchange))

    def _begin(self, latency: Seconds, load: Load | None) -> simpy.Event:
        idle = self._environment.wait(latency)
        if load is None:
            return idle
        activity = self.network.planned(load)
        idle.callbacks.append(lambda _: self.network.begin(activity))
        return activity.done

    def asks(self, rank: int, exchange: Exchange) -> tuple[Seconds, Load | None]:
        """Its latency, and its load if it moves anything."""
        return self._loads.of(rank, exchange)

    def moving(self, rank: int, exchange: Exchange) -> Moving:
        """The same, at a speed that is limited from time to time; what is all latency is not."""
        latency, load = self._loads.of(rank, exchange)
        idle = self._environment.wait(latency)
        if load is None:
            return Moving(idle, lambda _: None)
        activity = self.network.planned(load)
        idle.callbacks.append(lambda _: self.network.begin(activity))
        return Moving(activity.done, lambda speed: self.network.limit(activity, speed))
