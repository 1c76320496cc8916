"""How long do the flows of a phase take together?

All groups of a role communicate at the same time, so a link's load is the sum over the flows of all groups, as a
fraction of one group's payload. A flow advances with its slowest link and every link is shared in proportion to what
its flows carry: seconds per byte of payload are the largest load / bandwidth along the route. A group's phase lasts as
long as its slowest flow. Chunks follow each other, so with payload S, chunk c and `stages` the busiest link works for
S + stages * c. Latency is the number of dependent rounds times the latency of one, the longest in the group.

Assumption: the groups of a role are in step. A role that shares links with another role at the same time is the
engine's matter, not this module's.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from clustersim.collectives.library import Library, Medium, Offer
from clustersim.collectives.phase import Arrangement, FloatArray, IntArray, Phase
from clustersim.hardware.topology import LINK_KINDS, Fabric, LinkKind, LinkTable, Paths

MEDIUM_OF_KIND: Final[Mapping[LinkKind, Medium]] = {
    LinkKind.NVLINK: Medium.NVLINK,
    LinkKind.PCIE: Medium.PCIE,
    LinkKind.HOST: Medium.PCIE,
    LinkKind.NIC: Medium.NETWORK,
    LinkKind.LEAF: Medium.NETWORK,
    LinkKind.SPINE: Medium.NETWORK,
}
_MEDIA: Final = (Medium.NVLINK, Medium.PCIE, Medium.NETWORK)  # a route's medium is the last that it touches
_MEDIUM_NUMBER: Final = np.array([_MEDIA.index(MEDIUM_OF_KIND[kind]) for kind in LINK_KINDS])


@dataclass(frozen=True, slots=True)
class Routed:
    """A phase on a fabric. links: [groups, flows, hops], -1 for no link; load: [links + 1] payloads per link.

    medium: [groups, flows] index into the media; latency: [groups, flows] seconds.
    """

    phase: Phase
    links: IntArray
    load: FloatArray
    medium: IntArray
    latency: FloatArray


def route(phase: Phase, fabric: Fabric) -> Routed:
    """Find the routes of all flows of a phase and add up the links' loads."""
    shape = phase.sources.shape
    paths = fabric.paths(phase.sources.ravel(), phase.targets.ravel())
    table = fabric.links
    return Routed(
        phase=phase,
        links=paths.links.reshape(*shape, -1),
        load=link_loads(paths, phase.share.ravel(), len(table.bandwidth)),
        medium=_medium(paths, table).reshape(shape),
        latency=paths.latency.reshape(shape),
    )


def link_loads(paths: Paths, share: FloatArray, links: int) -> FloatArray:
    """Payloads that cross each link: [links + 1]; the last entry stands for "no link" and is zero."""
    hops = paths.links.shape[1]
    load = np.bincount((paths.links + 1).ravel(), weights=np.repeat(share, hops), minlength=links + 1)
    return np.append(load[1:], 0.0)


def _medium(paths: Paths, table: LinkTable) -> IntArray:
    """The medium of each route: the network if it leaves the host, else PCIe if it touches it, else NVLink."""
    numbers = np.append(_MEDIUM_NUMBER[table.kind], 0)
    medium: IntArray = numbers[paths.links].max(axis=1, initial=0)
    return medium


def effective_bandwidth(fabric: Fabric, library: Library, offer: Offer, spans: int) -> FloatArray:
    """Bytes/s that an offer reaches on each link, in groups over `spans` domains: [links + 1]."""
    table = fabric.links
    medium = _MEDIUM_NUMBER[table.kind]
    on_nvlink = medium == _MEDIA.index(Medium.NVLINK)
    shares = np.array([1.0, library.efficiency[Medium.PCIE], library.efficiency[Medium.NETWORK]])
    bandwidth = table.bandwidth * shares[medium] * offer.efficiency
    if on_nvlink.any():
        factor, ceiling = _nvlink_limits(library, offer, spans, float(table.bandwidth[on_nvlink].max()))
        bandwidth[on_nvlink] = np.minimum(bandwidth[on_nvlink] * factor, ceiling)
    return np.append(bandwidth, np.inf)


def _nvlink_limits(library: Library, offer: Offer, spans: int, port: float) -> tuple[float, float]:
    """Share of nominal bandwidth, and the rate that cannot be exceeded, on NVLink ports of this generation."""
    generation = library.generation(port)
    factor = generation.efficiency
    if needs_switch(offer):
        factor *= generation.in_network or 1.0
    if offer.capped and generation.low_latency is not None:
        return factor, generation.low_latency[min(spans, 3) - 1]
    return factor, np.inf


def needs_switch(offer: Offer) -> bool:
    """Whether the switches of the NVLink domain must be able to add."""
    return offer.algorithm == "in_network"


def time_phase(routed: Routed, bandwidth: FloatArray, latency: FloatArray) -> FloatArray:
    """Coefficients [3, groups]: S bytes in chunks of c take latency + S * per_byte + c * fill seconds.

    bandwidth: [links + 1] from `effective_bandwidth`; latency: [groups] from `phase_latency`.
    """
    seconds = routed.load / bandwidth
    per_byte = seconds[routed.links].max(axis=(1, 2), initial=0.0)
    return np.stack([latency, per_byte, routed.phase.stages * per_byte])


def phase_latency(routed: Routed, library: Library, offer: Offer, arrangement: Arrangement) -> FloatArray:
    """Seconds of latency of one phase in each group: start-up, dependent rounds and posts."""
    network = routed.medium == _MEDIA.index(Medium.NETWORK)
    rounds = routed.phase.rounds
    local = np.where((routed.medium == _MEDIA.index(Medium.PCIE)).any(axis=1), *_local(offer))
    local = np.where(network.any(axis=1), np.maximum(local, offer.post), local)
    alone = arrangement.spans == arrangement.size
    between = np.where(alone, offer.alone, offer.rounds[Medium.NETWORK])
    beyond = np.maximum(routed.latency - _included(routed.medium, library), 0.0)
    local = local + np.where(network, 0.0, beyond).max(axis=1, initial=0.0)
    between = between + np.where(network, beyond, 0.0).max(axis=1, initial=0.0)
    total: FloatArray = offer.startup + rounds.local * local + rounds.network * between + rounds.posts * offer.post
    return total


def _local(offer: Offer) -> tuple[float, float]:
    return offer.rounds[Medium.PCIE], offer.rounds[Medium.NVLINK]


def _included(medium: IntArray, library: Library) -> NDArray[np.float64]:
    return np.array([library.included[each] for each in _MEDIA])[medium]
