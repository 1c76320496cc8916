"""How long do the flows of a phase take together?

A flow advances with its slowest link and every link is shared in proportion to what
its flows carry: seconds per byte of payload are the largest load / bandwidth along the route. A group's phase lasts as
long as its slowest flow. Chunks follow each other, so with payload S, chunk c and `stages` the busiest link works for
S + stages * c. Latency is the number of dependent rounds times the latency of one, the longest in the group.

Assumption: the groups of a role are in step. A role that shares links with another role at the same time is the
engine's matter, not this module's.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import reduce
from typing import Final

import numpy as np
from numpy.typing import NDArray

from clustersim.collectives.flow_routes import LinkClasses, Routed, Routes
from clustersim.collectives.library import Generation, Library, Makes, Medium, Offer
from clustersim.collectives.phase import Rounds
from clustersim.common.arrays import BoolArray, FloatArray, IntArray
from clustersim.common.units import Seconds
from clustersim.hardware.link_technology import TECHNOLOGIES
from clustersim.hardware.topology import LINK_KINDS, LinkKind, LinkTable

MEDIUM_OF_KIND: Final[Mapping[LinkKind, Medium]] = {
    LinkKind.NVLINK: Medium.NVLINK,
    LinkKind.PCIE: Medium.PCIE,
    LinkKind.HOST: Medium.PCIE,
    LinkKind.NIC: Medium.NETWORK,
    LinkKind.LEAF: Medium.NETWORK,
    LinkKind.SPINE: Medium.NETWORK,
}
_MEDIA: Final = (Medium.NVLINK, Medium.PCIE, Medium.NETWORK)  # a route's medium is the last that it touches
_MEDIUM_NUMBER: Final = np.array([_MEDIA.index(MEDIUM_OF_KIND[kind]) for kind in LINK_KINDS], dtype=np.int8)


@dataclass(frozen=True, slots=True)
class Burden:
    """What flows mean to each group.

    busiest: [link classes, groups] the largest load on links of each class that the group crosses; pcie, network:
    [groups] whether a flow's medium is that; near, far: [groups] the most latency, beyond what rounds include, of
    routes that stay off the network and of those over it.
    """

    busiest: FloatArray
    pcie: BoolArray
    network: BoolArray
    near: FloatArray
    far: FloatArray

    @property
    def columns(self) -> list[FloatArray]:
        """All that tells groups apart: [groups] each."""
        return [*self.busiest, self.pcie.astype(np.float64), self.network.astype(np.float64), self.near, self.far]

    def of(self, groups: IntArray) -> "Burden":
        """That of some of the groups."""
        return Burden(
            self.busiest[:, groups], self.pcie[groups], self.network[groups], self.near[groups], self.far[groups]
        )

    def beside(self, other: "Burden") -> "Burden":
        """That of these flows and of others."""
        return Burden(
            busiest=np.maximum(self.busiest, other.busiest),
            pcie=self.pcie | other.pcie,
            network=self.network | other.network,
            near=np.maximum(self.near, other.near),
            far=np.maximum(self.far, other.far),
        )


def burden(routed: Routed, classes: LinkClasses, library: Library) -> Burden:
    """What a phase means to each group."""
    return reduce(Burden.beside, (_burden(part, routed.load, classes, library) for part in routed.parts))


def _burden(part: Routes, load: FloatArray, classes: LinkClasses, library: Library) -> Burden:
    busiest = np.zeros((len(classes.table.kind), len(part.latency)))
    medium = np.zeros(part.latency.shape, dtype=np.int8)
    carrier, delay = _delays(classes.table, library), np.zeros(part.latency.shape)
    for links in part.links:
        carried, found = load[links], classes.among(links)
        for item in found:
            crossed, own = links >= 0, carried
            if len(found) > 1:
                crossed &= classes.of(links) == item
                own = np.where(crossed, carried, 0.0)
            np.maximum(busiest[item], own.max(axis=1, initial=0.0), out=busiest[item])
            np.maximum(medium, crossed * _MEDIUM_NUMBER[classes.table.kind[item]], out=medium)
            np.maximum(delay, crossed * carrier[item], out=delay)
    beyond = np.maximum(part.latency - _included(medium, library), 0.0) + delay
    network = medium == _MEDIA.index(Medium.NETWORK)
    return Burden(
        busiest=busiest,
        pcie=(medium == _MEDIA.index(Medium.PCIE)).any(axis=1),
        network=network.any(axis=1),
        near=np.where(network, 0.0, beyond).max(axis=1, initial=0.0),
        far=np.where(network, beyond, 0.0).max(axis=1, initial=0.0),
    )


def effective_bandwidth(table: LinkTable, library: Library, offer: Offer, spans: int) -> FloatArray:
    """Bytes/s that an offer reaches on each link, in groups over `spans` domains: [links]."""
    medium, makes = _MEDIUM_NUMBER[table.kind], Makes.of(table)
    on_nvlink, on_network = (medium == _MEDIA.index(item) for item in (Medium.NVLINK, Medium.NETWORK))
    bandwidth: FloatArray = table.bandwidth * library.efficiency * offer.efficiency
    for make in makes.networks:
        links = on_network & (table.technology == TECHNOLOGIES.index(make))
        bandwidth[links] = table.bandwidth[links] * library.network(make).efficiency * offer.efficiency
    for make in makes.generations:
        links = on_nvlink & (table.technology == TECHNOLOGIES.index(make))
        factor, ceiling = _nvlink_limits(library.generation(make), offer, spans)
        bandwidth[links] = np.minimum(table.bandwidth[links] * offer.efficiency * factor, min(ceiling, offer.ceiling))
    return bandwidth


def _nvlink_limits(generation: Generation, offer: Offer, spans: int) -> tuple[float, float]:
    """Share of nominal bandwidth, and the rate that cannot be exceeded, on NVLink ports of this generation."""
    factor = generation.efficiency
    if needs_switch(offer):
        factor *= generation.in_network.share if generation.in_network else 1.0
    if offer.capped and generation.low_latency is not None:
        return factor, generation.low_latency[min(spans, 3) - 1]
    return factor, np.inf


def needs_switch(offer: Offer) -> bool:
    """Whether the switches of the NVLink domain must be able to add."""
    return offer.algorithm in ("in_network", "collnet_nvls")


def time_phase(burden: Burden, rates: "Rates", latency: FloatArray, stages: float) -> FloatArray:
    """Coefficients [4, groups]: S bytes in chunks of c take latency + S * per_byte + c * fill seconds.

    The fourth is what NVLink alone takes of per_byte. latency: [groups] from `phase_latency`; stages: of the phase.
    """
    busy = burden.busiest / rates.bandwidth[:, None]
    per_byte, inside = busy.max(axis=0, initial=0.0), busy[rates.inside].max(axis=0, initial=0.0)
    return np.stack([latency, per_byte, stages * per_byte, inside])


@dataclass(frozen=True, slots=True)
class Rates:
    """Of link classes. bandwidth: [classes] from `effective_bandwidth`; inside: [classes] whether they are NVLink."""

    bandwidth: FloatArray
    inside: BoolArray


def phase_latency(burden: Burden, rounds: Rounds, offer: Offer, *, alone: bool) -> FloatArray:
    """Seconds of latency of one phase in each group: start-up, dependent rounds and posts.

    alone: no domain holds a second member.
    """
    local = np.where(burden.pcie, *_local(offer))
    local = np.where(burden.network, np.maximum(local, offer.post), local) + burden.near
    between = (offer.alone if alone else offer.rounds[Medium.NETWORK]) + burden.far
    total: FloatArray = offer.startup + rounds.local * local + rounds.network * between + rounds.posts * offer.post
    return total


def least_latency(rounds: Rounds, offer: Offer) -> Seconds:
    """What the rounds of a phase take at least in any group, whatever its routes."""
    local, between = min(_local(offer)), min(offer.alone, offer.rounds[Medium.NETWORK])
    counts = (float(np.min(array)) for array in (rounds.local, rounds.network, rounds.posts))
    return offer.startup + sum(n * item for n, item in zip(counts, (local, between, offer.post), strict=True))


def _local(offer: Offer) -> tuple[float, float]:
    return offer.rounds[Medium.PCIE], offer.rounds[Medium.NVLINK]


def _delays(table: LinkTable, library: Library) -> FloatArray:
    """What the network of each link adds to a message: [links]."""
    makes = {TECHNOLOGIES.index(network): library.network(network).latency for network in Makes.of(table).networks}
    return np.array([makes.get(item, 0.0) for item in table.technology.tolist()])


def _included(medium: NDArray[np.int8], library: Library) -> FloatArray:
    return np.array([library.included[item] for item in _MEDIA])[medium]
