"""How fast is the link between two data centres (sites)?

A link has a bandwidth for each direction and a round-trip time, given or that of light over a distance of fibre.
What one GPU reaches over it is also limited by the transport: a connection has at most its window in flight, so at
most window / round trip (the bandwidth-delay limit), and lost packets slow it further:

    tcp    packet / round trip * sqrt(3/2) / sqrt(loss), whatever the window
    rdma   1 / (1 + loss * packets in flight) of its rate, because a loss repeats a whole window (go-back-N)

Traffic between sites without a link of their own passes others: fewest links first, then the shortest round trip,
then the order in the file. The limits of a connection are then those of the whole route.

Reference: Mathis et al. 1997, "The macroscopic behavior of the TCP congestion avoidance algorithm", eq. 3; Mittal et
al. 2018, "Revisiting network support for RDMA", SIGCOMM, section 2 (go-back-N); Corning SMF-28 ULL data sheet: group
index 1.4682 at 1550 nm.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Final

from clustersim.common.units import Bytes, BytesPerSecond, Seconds

FIBRE_SECONDS_PER_METRE: Final = 1.4682 / 299_792_458.0
"""One way, at the speed of light in fibre: 4.9 us for 1 km."""
MATHIS_CONSTANT: Final = math.sqrt(1.5)


class TransportProtocol(Enum):
    """What carries the bytes of a connection between sites."""

    RDMA = "rdma"
    TCP = "tcp"


@dataclass(frozen=True, slots=True)
class Transport:
    """How GPUs send over a link between sites.

    window: bytes in flight of one connection, infinite: not limited; connections: of a GPU to its peer; loss:
    fraction of packets; packet: bytes.
    """

    protocol: TransportProtocol = TransportProtocol.RDMA
    window: Bytes = math.inf
    connections: int = 1
    loss: float = 0.0
    packet: Bytes = 4096.0

    def gpu_rate(self, round_trip: Seconds) -> BytesPerSecond:
        """Bytes/s that one GPU reaches at most over a route with this round trip; infinite without any limit."""
        window_rate = self.window / round_trip
        if not self.loss:
            return self.connections * window_rate
        if self.protocol is TransportProtocol.TCP:
            loss_rate = self.packet / round_trip * MATHIS_CONSTANT / math.sqrt(self.loss)
            return self.connections * min(window_rate, loss_rate)
        return self.connections * window_rate / (1.0 + self.loss * self.window / self.packet)


@dataclass(frozen=True, slots=True)
class SiteLink:
    """One direction of a link between two sites, by their indices.

    bandwidth: bytes/s that it carries; latency: one way; is_alive: whether it is routed over; price_per_byte: USD for a
    byte that leaves the source (egress).
    """

    source: int
    target: int
    bandwidth: BytesPerSecond
    latency: Seconds
    transport: Transport = Transport()
    is_alive: bool = True
    price_per_byte: float = 0.0


Route = tuple[int, ...]
"""Indices of links, in order of travel."""


def find_routes(site_count: int, links: Sequence[SiteLink]) -> dict[tuple[int, int], Route]:
    """The route between every pair of sites that alive links connect."""
    return {
        (source, target): route
        for source in range(site_count)
        for target, route in _routes_from(source, links).items()
        if target != source
    }


def _routes_from(source: int, links: Sequence[SiteLink]) -> dict[int, Route]:
    """Routes from one site, breadth first; among equally many links the least latency, then the first in order."""
    routes: dict[int, Route] = {source: ()}
    frontier = [source]
    while frontier:
        next_routes: dict[int, Route] = {}
        for index, link in enumerate(links):
            if link.is_alive and link.source in frontier and link.target not in routes:
                route = (*routes[link.source], index)
                if link.target not in next_routes or route_latency(route, links) < route_latency(
                    next_routes[link.target], links
                ):
                    next_routes[link.target] = route
        routes |= next_routes
        frontier = list(next_routes)
    return routes


def route_latency(route: Route, links: Sequence[SiteLink]) -> Seconds:
    """Seconds one way."""
    return sum(links[index].latency for index in route)


def route_gpu_rate(route: Route, links: Sequence[SiteLink]) -> BytesPerSecond:
    """Bytes/s that one GPU reaches at most over a route, by the transports of its links."""
    round_trip = 2.0 * route_latency(route, links)
    return min(links[index].transport.gpu_rate(round_trip) if round_trip else math.inf for index in route)
