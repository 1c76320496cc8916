"""How long does a collective or message take from when it can start?

Uncontended, as long as it takes alone. On a shared network, its latency and then as long as the links let it.
"""

from typing import Protocol

import simpy

from clustersim.cost.block import BlockCost
from clustersim.engine.network.loads import Loads
from clustersim.engine.network.network import Network
from clustersim.program.task import Exchange
from clustersim.units import Seconds


class Transfers(Protocol):
    """The seam between ranks and what carries their data."""

    def begin(self, rank: int, exchange: Exchange) -> simpy.Event:
        """Move the data of an exchange of the rank's group; the event happens when it is done."""


class Uncontended:
    """Every exchange takes its own time."""

    def __init__(self, environment: simpy.Environment, cost: BlockCost) -> None:
        self._environment, self._cost = environment, cost
        self._seconds: dict[tuple[Exchange, int], Seconds] = {}

    def begin(self, rank: int, exchange: Exchange) -> simpy.Event:
        """Wait for the duration of an exchange in the rank's group."""
        known = self._seconds.get((exchange, rank))
        if known is None:
            known = self._seconds[exchange, rank] = self._cost.exchange(rank, exchange).seconds
        return self._environment.timeout(known)


class Shared:
    """Exchanges share the links of a network."""

    def __init__(self, environment: simpy.Environment, loads: Loads, links: int) -> None:
        self._environment, self._loads = environment, loads
        self._network = Network(environment, links)

    def begin(self, rank: int, exchange: Exchange) -> simpy.Event:
        """Wait for the latency of an exchange, then load the network with its bytes."""
        latency, load = self._loads.of(rank, exchange)
        idle = self._environment.timeout(latency)
        if load is None:
            return idle
        done = self._environment.event()
        idle.callbacks.append(lambda _: self._network.start(load, done))
        return done
