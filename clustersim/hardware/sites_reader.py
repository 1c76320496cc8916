"""Reads the sites of a cluster file, and the links between them.

    sites: [{name, cluster, gpus}, ...]
    links: [{source, target, bandwidth, distance | round_trip, transport?, ...}, ...]

A link is one in each direction unless `both_directions` is false. `transport` limits what one GPU reaches (see
`site_links`): {protocol, window, connections, loss, packet}; `efficiency` is the fraction of the bandwidth that is
there for the job, `price_per_gb` the egress price in USD per 10^9 bytes.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

from clustersim.common.mapping_reader import MappingReader
from clustersim.common.units import Dimension
from clustersim.hardware.site_links import FIBRE_SECONDS_PER_METRE, SiteLink, Transport, TransportProtocol

MAX_SITES: Final = 64
MAX_CONNECTIONS: Final = 1024
_DEFAULT_PACKET: Final = {TransportProtocol.RDMA: 4096.0, TransportProtocol.TCP: 1460.0}
"""Bytes of a packet's payload: InfiniBand's largest MTU; TCP over Ethernet's 1,500 bytes."""


def has_sites(content: Mapping[str, Any]) -> bool:
    """Whether the content of a cluster file lists sites."""
    return "sites" in content


def read_site_entries(section: MappingReader) -> list[MappingReader]:
    """Readers of the sites, at least one and each with a name of its own; raise InputError."""
    entries = list(section.get_entries("sites", "name"))
    if not 1 <= len(entries) <= MAX_SITES:
        raise section.input_error("sites", f"lists {len(entries)} sites; there are 1 to {MAX_SITES}")
    names: list[str] = []
    for entry in entries:
        name = entry.get_name("name")
        if name in names:
            raise entry.input_error("name", f"there is a site {name} already")
        if "/" in name:
            raise entry.input_error("name", f"{name!r} has a slash, which separates a site from what is in it")
        names.append(name)
    return entries


def read_site_links(section: MappingReader, names: Sequence[str]) -> tuple[SiteLink, ...]:
    """The links between sites of these names, each direction; raise InputError."""
    if not section.has_key("links"):
        raise section.input_error("links", f"is missing; nothing joins the sites {', '.join(names)}")
    links: list[SiteLink] = []
    for entry in section.get_entries("links", "source", "target"):
        for link in _read_directions(entry, names):
            if any((link.source, link.target) == (other.source, other.target) for other in links):
                raise entry.input_error(
                    "target", "there is such a link already; write parallel links as one of their bandwidth"
                )
            links.append(link)
    return tuple(links)


def _read_directions(entry: MappingReader, names: Sequence[str]) -> Iterator[SiteLink]:
    source, target = (names.index(entry.get_choice(key, *names, required=True)) for key in ("source", "target"))
    if source == target:
        raise entry.input_error("target", "the link ends where it starts")
    latency = _read_latency(entry)
    link = SiteLink(
        source,
        target,
        bandwidth=entry.get_quantity("bandwidth", Dimension.BANDWIDTH) * entry.get_ratio("efficiency", max_value=1.0),
        latency=latency,
        transport=_read_transport(entry.get_section("transport")) if entry.has_key("transport") else Transport(),
        price_per_byte=entry.get_float("price_per_gb") / 1e9 if entry.has_key("price_per_gb") else 0.0,
    )
    yield link
    if entry.get_bool("both_directions", default=True):
        yield SiteLink(target, source, link.bandwidth, latency, link.transport, price_per_byte=link.price_per_byte)
    entry.reject_unknown_keys()


def _read_latency(entry: MappingReader) -> float:
    """Seconds one way: half of a measured round trip, or light over the distance."""
    if entry.has_key("round_trip") == entry.has_key("distance"):
        problem = "both say how far it is; keep one" if entry.has_key("distance") else "is missing"
        raise entry.input_error(
            "round_trip", f"{problem}; write round_trip (21 ms), measured, or distance (1000 km), of the fibre"
        )
    if entry.has_key("round_trip"):
        return entry.get_quantity("round_trip", Dimension.TIME) / 2.0
    return entry.get_quantity("distance", Dimension.LENGTH) * FIBRE_SECONDS_PER_METRE


def _read_transport(section: MappingReader) -> Transport:
    protocol = section.get_member("protocol", TransportProtocol)
    transport = Transport(
        protocol,
        window=section.get_quantity("window", Dimension.SIZE) if section.has_key("window") else math.inf,
        connections=section.get_int("connections", max_value=MAX_CONNECTIONS) if section.has_key("connections") else 1,
        loss=section.get_float("loss") if section.has_key("loss") else 0.0,
        packet=section.get_quantity("packet", Dimension.SIZE)
        if section.has_key("packet")
        else _DEFAULT_PACKET[protocol],
    )
    if transport.loss >= 1.0:
        raise section.input_error("loss", f"{transport.loss:g} is not a fraction of the packets, from 0 to below 1")
    if transport.loss and protocol is TransportProtocol.RDMA and math.isinf(transport.window):
        raise section.input_error("window", "is missing; what a loss costs rdma depends on the bytes in flight")
    section.reject_unknown_keys()
    return transport
