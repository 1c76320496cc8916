"""How much is each tier of links used, when, and by whom?

A tier is all links of one kind (`LinkKind`) but those that end at a GPU outside the job. Its utilisation in a stretch
of time is the bytes that its links carry in it over what they could carry at their nominal bandwidth; that of one link
is the time that its bytes take at its full rate over the step. What protocols add on the wire, and the part of the
nominal bandwidth that a library cannot reach, keep a busy tier below 100 %.

Bytes are counted for all groups, also of ranks that were not simulated: a group does what its first member (of a
message, the sender) does, when the rank does that stands for it. The bytes of a collective or message are spread evenly
over its span, those of exchanges inside a block evenly over the block. Where links are not shared (`cost.network:
uncontended`) roles that meet on a link do not slow each other, so that more than 100 % says where sharing would; where
they are, a whole step never has more, a short stretch may, because of the even spread.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

import numpy as np

from clustersim.common.arrays import BoolArray, FloatArray, IntArray
from clustersim.common.units import Bytes, BytesPerSecond, Seconds
from clustersim.hardware.topology import LINK_KINDS, Fabric, LinkInfo, LinkKind
from clustersim.results.link_volumes import Volumes
from clustersim.results.trace_table import Rows
from clustersim.results.transfer_events import Kind, bytes_over_time, kinds_of, moves_of
from clustersim.symmetry.labels import unique_by_columns

BINS: Final = 400
MOST: Final = 8
"""Busiest links that are named: of those that are alike, one is, and of one kind a few."""
_MOST_OF_KIND: Final = 2
_EQUAL: Final = 1e-4  # of the step: links that are used by each axis for as long, up to this, are alike


@dataclass(frozen=True, slots=True)
class TierUse:
    """One kind of links. capacity: bytes/s of all of them; over_time: [bins] utilisation; busiest: that of one link."""

    kind: LinkKind
    links: int
    capacity: BytesPerSecond
    over_time: FloatArray
    busiest: float

    @property
    def mean(self) -> float:
        """Utilisation over the whole run."""
        return float(self.over_time.mean())

    @property
    def peak(self) -> float:
        """Utilisation of the fullest bin."""
        return float(self.over_time.max())


@dataclass(frozen=True, slots=True)
class BusyLink:
    """A link that carries much.

    alike: how many links of its kind and bandwidth carry as much for the same axes, itself among them; parallel: how
    many cables it stands for; seconds: that the bytes of a step take at its full rate; carried: bytes in a step, by
    axis.
    """

    link: LinkInfo
    alike: int
    parallel: int
    seconds: Seconds
    utilisation: float
    carried: dict[str, Bytes]


@dataclass(frozen=True, slots=True)
class AxisUse:
    """What the groups of one axis, or of a role such as embedding, move in a step, all of them together.

    sent: bytes that members send; crossing: [tiers] those of them that cross each tier.
    """

    axis: str
    sent: Bytes
    crossing: FloatArray


@dataclass(frozen=True, slots=True)
class NetworkUse:
    """The network's part in a run. seconds: of the whole run, from bin to bin of equal length; gpus: of the job."""

    seconds: Seconds
    gpus: int
    tiers: tuple[TierUse, ...]
    busiest: tuple[BusyLink, ...]
    axes: tuple[AxisUse, ...]


def network_use(rows: Rows, fabric: Fabric, volumes: Volumes, bins: int = BINS) -> NetworkUse | None:
    """Count the bytes of a run on the links of a fabric; None where nothing is moved."""
    moves = moves_of(rows)
    kinds = list(kinds_of(rows, moves, volumes))
    if not kinds:
        return None
    carried = _by_axis(kinds, len(fabric.links.kind))
    step = rows.trace.makespan / rows.steps
    tiers = tuple(_tiers(bytes_over_time(rows, fabric, moves, kinds, bins), carried, fabric, rows))
    present = [LINK_KINDS.index(tier.kind) for tier in tiers]
    return NetworkUse(
        seconds=rows.trace.makespan,
        gpus=rows.program.world_size,
        tiers=tiers,
        busiest=tuple(_busiest(carried, fabric, step)),
        axes=tuple(_axes(kinds, present)),
    )


def _by_axis(kinds: list[Kind], links: int) -> dict[str, FloatArray]:
    """Bytes on every link in a step, by axis: [links]."""
    found: dict[str, FloatArray] = {}
    for kind in kinds:
        carried = kind.carried
        amount = carried.share * kind.weights[kind.owner[carried.group]]
        found[kind.axis] = found.get(kind.axis, np.zeros(links)) + np.bincount(carried.link, amount, minlength=links)
    return found


def _tiers(moved: FloatArray, carried: dict[str, FloatArray], fabric: Fabric, rows: Rows) -> Iterator[TierUse]:
    """The use of every kind of links that there is. moved: [LINK_KINDS, bins] bytes."""
    width, step = rows.trace.makespan / moved.shape[1], rows.trace.makespan / rows.steps
    usable, table = _usable(fabric, rows.program.world_size), fabric.links
    seconds = _seconds(np.sum(list(carried.values()), axis=0), table.bandwidth)
    for kind in np.unique(table.kind[usable]).tolist():
        links = usable & (table.kind == kind)
        capacity = float(table.bandwidth[links].sum())
        most = float(seconds[links].max()) / step
        yield TierUse(LINK_KINDS[kind], int(links.sum()), capacity, moved[kind] / (capacity * width), most)


def _usable(fabric: Fabric, gpus: int) -> BoolArray:
    """Links that do not end at a GPU beyond the first ones, which are the job's: [links]."""
    if fabric.gpu_count <= gpus:
        return np.ones(len(fabric.links.kind), np.bool_)
    ends = fabric.link_endpoints
    foreign = [(end >= gpus) & (end < fabric.gpu_count) for end in (ends.source, ends.target)]
    usable: BoolArray = ~(foreign[0] | foreign[1])
    return usable


def _seconds(carried: FloatArray, bandwidth: FloatArray) -> FloatArray:
    """What bytes take at the full rate of their links; nothing on links that are cut."""
    seconds: FloatArray = np.divide(carried, bandwidth, out=np.zeros_like(carried), where=bandwidth > 0.0)
    return seconds


def _busiest(carried: dict[str, FloatArray], fabric: Fabric, step: Seconds) -> Iterator[BusyLink]:
    """The links that are used most, those that carry the same once."""
    table, axes = fabric.links, np.stack(list(carried.values()))
    links = np.flatnonzero(axes.any(axis=0))
    loads, bandwidth = axes[:, links], table.bandwidth[links]
    rounded = [np.round(_seconds(load, bandwidth) / step / _EQUAL) for load in loads]
    colour, first = unique_by_columns([table.kind[links], bandwidth, *rounded])
    seconds = _seconds(loads.sum(axis=0), bandwidth)[first]
    alike = np.bincount(colour)
    order = np.lexsort((links[first], -np.round(seconds / step / _EQUAL)))
    for item in _few(order, table.kind[links[first]]):
        own = dict(zip(carried, loads[:, first[item]].tolist(), strict=True))
        busy = float(seconds[item])
        yield BusyLink(
            link=fabric.link_info(int(links[first[item]])),
            alike=int(alike[item]),
            parallel=fabric.parallel_link_count(int(links[first[item]])),
            seconds=busy,
            utilisation=busy / step,
            carried={axis: amount for axis, amount in own.items() if amount > 0.0},
        )


def _few(order: IntArray, kind: IntArray) -> list[int]:
    """The first of an order of things, not too many of one kind."""
    place = np.zeros(len(order), np.int64)
    for item in np.unique(kind).tolist():
        own = kind[order] == item
        place[own] = np.arange(own.sum())
    return [int(element) for element in order[place < _MOST_OF_KIND][:MOST].tolist()]


def _axes(kinds: list[Kind], tiers: list[int]) -> Iterator[AxisUse]:
    """What each axis moves in a step."""
    for axis in dict.fromkeys(kind.axis for kind in kinds):
        own = [kind for kind in kinds if kind.axis == axis]
        sent = sum(float(kind.in_step(kind.carried.sent).sum()) for kind in own)
        crossing = sum(kind.in_step(kind.carried.crossing).sum(axis=0) for kind in own)
        yield AxisUse(axis, sent, np.asarray(crossing)[tiers])
