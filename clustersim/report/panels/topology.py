"""What does the cluster look like, and what lies between the groups of a layout on it?

A picture by tiers, drawn the same for one node and for 16,384 GPUs. Each tier is a line of boxes, all of a few and ever
fewer of many; between two tiers stands what connects them. Beside them every axis of a layout is a line from the GPUs
up to the highest tier that its groups cross, with a dot at each tier whose links neighbours of a group have between
them. The picture shows how many there are and how fast the way up is, not which cable goes where.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import Final

import numpy as np

from clustersim.common.units import format_bandwidth
from clustersim.hardware import topology as hardware
from clustersim.hardware.cluster import Cluster, describe_tiers
from clustersim.hardware.topology import LINK_KINDS, LinkKind
from clustersim.report.draw.charts import Drawn, lines, note, plot, points
from clustersim.report.figure import MUTED, SURFACE, Figure, Traces, share_words
from clustersim.report.html_document import Card, document, drawn
from clustersim.report.labels import LINK_WORDS
from clustersim.report.legend_markup import axis_name
from clustersim.report.placement_labels import placement_line
from clustersim.report.theme import LISTED_LOOKS
from clustersim.results.axis_tiers import AxisSpan, axis_spans
from clustersim.results.simulation_result import SimulationResult

_NAMES: Final = {"gpu": "GPU", "nvswitch": "NVLink domain", "host": "PCIe root", "nic": "NIC", "switch": "switch"}
_MOST_DRAWN: Final = 36
_MOST_EXTRA: Final = 2.3  # boxes for each doubling beyond eight
_BOX: Final = 0.26  # height of a box, in tiers
_WORDS: Final = 0.24  # height of a line of words
_TIER_PIXELS: Final = 92
_LANE: Final = 0.115  # width of what an axis has beside the boxes, whose width is 1


@dataclass(frozen=True, slots=True)
class Tier:
    """One tier of a cluster.

    kind: "GPU", "leaf switch"; bandwidth: of the way up, per direction, with its unit and what it is made of, empty
    for the top; note: anything else, such as "8 per node" or "1:7 oversubscribed".
    """

    kind: str
    count: int
    bandwidth: str = ""
    note: str = ""


@dataclass(frozen=True, slots=True)
class Lane:
    """One axis of a layout. levels: of the tier to which each crossing leads up, from 0 on; links: each in words."""

    span: AxisSpan
    levels: tuple[int, ...]
    links: tuple[str, ...]

    @property
    def apart(self) -> str:
        """How far members of a group are from each other."""
        return "adjacent" if self.span.stride == 1 else f"stride {self.span.stride:,}"

    @property
    def words(self) -> str:
        """The groups, in words."""
        nodes = "1 node" if self.span.nodes == 1 else f"{self.span.nodes:,} nodes"
        return f"{self.span.groups:,} × {self.span.size:,} GPUs, {self.apart}, {nodes}"

    @property
    def colour(self) -> str:
        """That of its communication."""
        return LISTED_LOOKS[self.span.axis][1].colour


@dataclass(frozen=True, slots=True)
class Picture:
    """A cluster from the GPUs up, and the axes of a layout on it, if any."""

    title: str
    tiers: tuple[Tier, ...]
    lanes: tuple[Lane, ...] = ()


def picture(cluster: Cluster, spans: Sequence[AxisSpan] = ()) -> Picture:
    """A cluster's tiers, and the axes of a layout on it."""
    tiers = describe_tiers(cluster)
    kind, bandwidth, top = cluster.fabric.links.kind, cluster.fabric.links.bandwidth, len(tiers) - 1
    links = {LINK_KINDS[item]: float(bandwidth[kind == item].max()) for item in np.unique(kind).tolist()}
    rows = tuple(
        Tier(name, tier.count, "" if place == top else _way_up(tier, links), _note(tier, links))
        for place, (name, tier) in enumerate(zip(tier_names(tiers), tiers, strict=True))
    )
    lanes = (
        Lane(span, tuple(crossing.level(tiers) for crossing in span.crossings), tuple(crossing_words(span)))
        for span in spans
    )
    return Picture(f"{cluster.name}: {size_words(cluster)}", rows, tuple(lanes))


def picture_of(result: SimulationResult) -> Picture:
    """The cluster of a result, and the axes of its layout on it."""
    scenario = result.scenario
    return picture(scenario.cluster, axis_spans(scenario.layout, scenario.cluster.fabric, scenario.placement))


def size_words(cluster: Cluster) -> str:
    """How many GPUs of which kind, and which of the machine's."""
    size = f"{cluster.gpu_count:,} x {cluster.accelerator.name}, {cluster.gpus_per_node} per node"
    placement = placement_line(cluster)
    return f"{size}, on {placement}" if placement else size


def tier_names(tiers: Sequence[hardware.FabricTier]) -> list[str]:
    """What people call the tiers; of several of one kind, with their number from below."""
    kinds = [tier.kind for tier in tiers]
    names = [_NAMES.get(kind, f"{kind} switch") for kind in kinds]
    return [
        f"{name} {kinds[: place + 1].count(kind)}" if kinds.count(kind) > 1 else name
        for place, (kind, name) in enumerate(zip(kinds, names, strict=True))
    ]


def crossing_words(span: AxisSpan) -> list[str]:
    """What is between neighbours of each of the axis' crossings; part of them where it is not all."""
    kinds = [crossing.kind for crossing in span.crossings]
    names = [LINK_WORDS[kind] if kind not in kinds[:place] else "switch to switch" for place, kind in enumerate(kinds)]
    return [
        name + f" ({share_words(crossing.part)})" * (crossing.part < 1.0)
        for name, crossing in zip(names, span.crossings, strict=True)
    ]


def _way_up(tier: hardware.FabricTier, links: Mapping[LinkKind, float]) -> str:
    """The bandwidth of a way up, and its kind where it is inside a node; from an NVLink domain none leads up."""
    if tier.kind == "nvswitch":
        return ""
    own = {"gpu": (LinkKind.NVLINK, LinkKind.PCIE), "host": (LinkKind.PCIE,)}.get(tier.kind, ())
    name = next((f"{LINK_WORDS[kind]} " for kind in own if kind in links), "")
    return name + format_bandwidth(tier.bandwidth)


def _note(tier: hardware.FabricTier, links: Mapping[LinkKind, float]) -> str:
    """How far a tier is oversubscribed, and what leads past an NVLink domain or from one root complex to the next."""
    if tier.kind == "nvswitch" and LinkKind.PCIE in links:
        return f"from each GPU: PCIe {format_bandwidth(links[LinkKind.PCIE])}"
    if tier.kind == "host" and LinkKind.HOST in links:
        return f"between them {format_bandwidth(links[LinkKind.HOST])}"
    return "" if (tier.oversubscription or 1.0) <= 1.0 else f"1:{tier.oversubscription:.3g} oversubscribed"


def topology_page(picture: Picture) -> str:
    """A page with the picture and its tables."""
    return document(picture.title, [topology_card(picture, picture.title)])


def topology_card(picture: Picture, title: str = "Cluster and layout") -> Card:
    """The picture, what each axis crosses, and the tiers in numbers."""
    return drawn(
        "topology.html",
        title=title,
        figure=topology_figure(picture),
        tiers=picture.tiers,
        lanes=picture.lanes,
        axis_name=axis_name,
    )


def topology_figure(picture: Picture) -> Figure:
    """Boxes as bars, connections as bands, words between them; axes as lines beside them."""
    tiers, lanes = picture.tiers, picture.lanes
    traces: Traces = []
    for level, tier in enumerate(tiers):
        traces += [_ways_up(level, *item) for item in zip(tiers[level : level + 1], tiers[level + 1 :], strict=False)]
        traces.append(_boxes(level, tier))
    traces += [trace for place, lane in enumerate(lanes) for trace in _line(place, lane)]
    traces += [_dots(place, lane, tiers) for place, lane in enumerate(lanes)]
    words = [note for level, tier in enumerate(tiers) for note in _words(level, tier)]
    wide, short = (
        [label for place, lane in enumerate(lanes) for label in _labels(place, lane, more=more)]
        for more in (True, False)
    )
    hidden = {"visible": False, "fixedrange": True}
    x = {"range": [-0.02, 1.02 + _LANE * (len(lanes) + 0.3)], **hidden}
    y = {"range": [-0.45, len(tiers) - 0.8 + 0.25 * bool(lanes)], **hidden}
    height, narrow = _TIER_PIXELS * len(tiers) + 40, {"annotations": words + short}
    plain = {"showlegend": False, "dragmode": False, "margin": {"l": 4, "r": 4, "t": 4, "b": 4}}
    return plot("topology", traces, x, y, height=height, narrow=narrow, annotations=words + wide, **plain)


def boxes_of(count: int) -> int:
    """How many boxes stand for `count`: all of a few, then ever fewer, so that a tier of 16,384 is 33 boxes wide.

    >>> [boxes_of(count) for count in (1, 8, 100, 16384)]
    [1, 8, 16, 33]
    """
    return min(count, 8) + round(_MOST_EXTRA * math.log2(max(1.0, count / 8)))


def _places(count: int) -> list[float]:
    boxes = min(boxes_of(count), _MOST_DRAWN)
    return [0.5 + (index - (boxes - 1) / 2) / _MOST_DRAWN for index in range(boxes)]


def _boxes(level: int, tier: Tier) -> Drawn:
    places = _places(tier.count)
    return {
        "type": "bar", "x": places, "y": [_BOX] * len(places), "base": [level - _BOX / 2] * len(places),
        "marker": {"color": MUTED if level else "@accent", "opacity": 0.6 if level else 1.0, "cornerradius": 3},
        "width": 0.8 / _MOST_DRAWN, "hovertemplate": escape(f"{tier.count:,} × {tier.kind}") + "<extra></extra>",
    }  # fmt: skip


def _ways_up(level: int, lower: Tier, upper: Tier) -> Drawn:
    """A pale band as wide as the two tiers that it joins."""
    half = 0.5 / _MOST_DRAWN
    below, above = _places(lower.count), _places(upper.count)
    bottom, top = level + _BOX / 2 + 0.03, level + 1 - _BOX / 2 - _WORDS
    across = [below[0] - half, below[-1] + half, above[-1] + half, above[0] - half]
    return lines(across, [bottom, bottom, top, top], {"width": 0}, fill="toself", fillcolor="@track")


def _words(level: int, tier: Tier) -> Iterator[Drawn]:
    name = f"<b>{tier.count:,} × {escape(tier.kind)}</b>"
    up = " · ".join(map(escape, filter(None, (f"↑ {tier.bandwidth}" if tier.bandwidth else "", tier.note))))
    common: Drawn = {"x": 0.5, "xanchor": "center"}
    yield note(name, y=level - _BOX / 2 - _WORDS / 2, font={"size": 13}, **common)
    if up:
        yield note(up, y=level + 0.5 - _WORDS / 2, font={"size": 12, "color": MUTED}, **common)


def _middle(place: int) -> float:
    """Where the place-th axis stands."""
    return 1.02 + _LANE * (place + 0.6)


def _line(place: int, lane: Lane) -> Traces:
    """From the GPUs to the highest tier, with a cap; a darker edge, because some colours are pale."""
    middle, half, top = _middle(place), 0.25 * _LANE, max(lane.levels)
    x = [middle - half, middle + half, None, middle, middle, None, middle - half, middle + half]
    y = [0, 0, None, 0, top, None, top, top]
    return [lines(x, y, {"width": width, "color": colour}) for width, colour in ((7, MUTED), (4, lane.colour))]


def _dots(place: int, lane: Lane, tiers: Sequence[Tier]) -> Drawn:
    """Links that neighbours of a group have between them; a ring where only some of them do."""
    name = f"<b>{lane.span.axis}</b>: {lane.words}<br>between neighbours: "
    crossed = zip(lane.links, lane.levels, strict=True)
    words = [name + escape(f"{links}, up to {tiers[level].kind}") for links, level in crossed]
    colours = [lane.colour if crossing.part == 1.0 else SURFACE for crossing in lane.span.crossings]
    look = {"size": 15, "color": colours, "line": {"width": 2, "color": "@ink"}}
    x = [_middle(place)] * len(lane.levels)
    return points(lane.span.axis, x, list(lane.levels), look, hovertext=words, hoverinfo="text")


def _labels(place: int, lane: Lane, *, more: bool) -> Iterator[Drawn]:
    """The name of an axis below its line, and what its groups are above, on large screens in more words."""
    common: Drawn = {"x": _middle(place), "xanchor": "center"}
    above = f"{lane.span.size:,} GPUs<br>{lane.apart}" if more else f"{lane.span.size:,}"
    yield note(f"<b>{lane.span.axis}</b>", y=-_BOX / 2 - _WORDS / 2, font={"size": 13}, **common)
    yield note(above, y=max(lane.levels) + 0.14, yanchor="bottom", font={"size": 11 if more else 10}, **common)
