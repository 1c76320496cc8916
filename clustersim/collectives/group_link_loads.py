"""Which links does each group of a role keep busy by itself?

As `transfer`, but group by group: a link's load is that of one group's own flows. Who shares the link with them, and
for how long, is the engine's matter.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from clustersim.collectives.flow_routes import Routed, Routes
from clustersim.collectives.library import Library, Offer
from clustersim.collectives.phase_cost import effective_bandwidth
from clustersim.common.arrays import FloatArray, IntArray
from clustersim.hardware.topology import Fabric
from clustersim.symmetry.link_load_matrix import NO_LINK_LOADS, LinkLoadMatrix


@dataclass(frozen=True, slots=True)
class OwnLoads:
    """What one offer asks of links in groups that communicate alone.

    per_byte, fill: [groups] seconds per byte of payload, and per byte of a chunk while pipelines fill; flow: [groups]
    payloads that the largest flow carries, on the wire; crossings: the links that it loads.
    """

    per_byte: FloatArray
    fill: FloatArray
    flow: FloatArray
    crossings: LinkLoadMatrix


def own_loads(fabric: Fabric, library: Library, offer: Offer, phases: Sequence[Routed], spans: int) -> OwnLoads:
    """Add up the phases of an offer in groups over `spans` domains."""
    bandwidth = np.append(effective_bandwidth(fabric.links, library, offer, spans), np.inf)
    groups = len(phases[0].parts[0].latency)
    per_byte, fill, flow = np.zeros((3, groups))
    parts = [NO_LINK_LOADS]
    for routed in phases:
        crossings = _crossings(routed, bandwidth)
        seconds = np.zeros(groups)
        np.maximum.at(seconds, crossings.group_index, crossings.seconds_per_byte)
        per_byte += seconds
        fill += routed.phase.stages * seconds
        flow += _largest(routed)
        parts.append(crossings)
    return OwnLoads(per_byte, fill, flow / offer.efficiency, _together(parts, per_byte))


def spread(parts: Sequence[tuple[IntArray, OwnLoads]], groups: int) -> OwnLoads:
    """Loads of all groups from those of some: each part says which groups it is about; the others ask for nothing."""
    if len(parts) == 1 and len(parts[0][0]) == groups:
        return parts[0][1]
    per_byte, fill, flow = np.zeros((3, groups))
    crossings = [NO_LINK_LOADS]
    for own, loads in parts:
        per_byte[own], fill[own], flow[own] = loads.per_byte, loads.fill, loads.flow
        crossings.append(
            LinkLoadMatrix(
                own[loads.crossings.group_index], loads.crossings.link_index, loads.crossings.seconds_per_byte
            )
        )
    return OwnLoads(per_byte, fill, flow, _joined(crossings))


def picked(offers: Mapping[int, OwnLoads], taken: IntArray) -> OwnLoads:
    """Loads of groups that take different offers: group g takes offers[taken[g]], none where that is negative."""
    if len(offers) == 1 and taken.min() >= 0:
        return next(iter(offers.values()))
    per_byte, fill, flow = np.zeros((3, len(taken)))
    parts = [NO_LINK_LOADS]
    for number, loads in offers.items():
        own, mine = taken == number, taken[loads.crossings.group_index] == number
        per_byte[own], fill[own], flow[own] = loads.per_byte[own], loads.fill[own], loads.flow[own]
        parts.append(LinkLoadMatrix(*(column[mine] for column in _columns(loads.crossings))))
    return OwnLoads(per_byte, fill, flow, _joined(parts))


def _joined(parts: Sequence[LinkLoadMatrix]) -> LinkLoadMatrix:
    return LinkLoadMatrix(*(np.concatenate(columns) for columns in zip(*map(_columns, parts), strict=True)))


def _columns(crossings: LinkLoadMatrix) -> tuple[IntArray, IntArray, FloatArray]:
    return crossings.group_index, crossings.link_index, crossings.seconds_per_byte


def _largest(routed: Routed) -> FloatArray:
    """The share of each group's largest flow: [groups]."""
    parts = [(part.links >= 0).any(axis=(0, 2)) * part.share for part in routed.parts]
    largest: FloatArray = np.max(parts, axis=0)
    return largest


def _crossings(routed: Routed, bandwidth: FloatArray) -> LinkLoadMatrix:
    """Seconds per byte that each group keeps each link busy in one phase."""
    entries = [entry for part in routed.parts if part.share > 0 for entry in _entries(part)]
    loads = _summed(_joined([NO_LINK_LOADS, *entries]), len(bandwidth))
    return LinkLoadMatrix(loads.group_index, loads.link_index, loads.seconds_per_byte / bandwidth[loads.link_index])


def _entries(part: Routes) -> Iterator[LinkLoadMatrix]:
    """What each group loads, hop by hop."""
    for links in part.links:
        group, flow = np.nonzero(links >= 0)
        yield LinkLoadMatrix(group, links[group, flow], np.full(len(group), part.share))


def _together(parts: Sequence[LinkLoadMatrix], most: FloatArray) -> LinkLoadMatrix:
    """Crossings of several phases; rounding cannot keep a link busier than the group is."""
    loading = [part for part in parts if len(part.link_index)]
    if len(loading) < 2:
        return next(iter(loading), NO_LINK_LOADS)
    links = max(int(part.link_index.max()) for part in loading) + 1
    whole = _summed(_joined(loading), links)
    return LinkLoadMatrix(
        whole.group_index, whole.link_index, np.minimum(whole.seconds_per_byte, most[whole.group_index])
    )


def _summed(entries: LinkLoadMatrix, links: int) -> LinkLoadMatrix:
    """Add up entries of the same group and link. They come in sorted stretches, which a stable sort makes use of."""
    pairs = entries.group_index * links + entries.link_index
    order = np.argsort(pairs, kind="stable")
    pairs = pairs[order]
    first = np.diff(pairs, prepend=-1) != 0
    total = np.bincount(np.cumsum(first) - 1, entries.seconds_per_byte[order]).astype(np.float64)
    group, link = np.divmod(pairs[first], links)
    return LinkLoadMatrix(group, link, total)
