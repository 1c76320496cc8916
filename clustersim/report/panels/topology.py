"""What does the cluster look like, and which links lie between the groups of a layout on it?

A figure by tiers, drawn in the same way for one node and for 16,384 GPUs. Each tier is a line of boxes, all
of a few and a logarithmic number of many; between two tiers is the bandwidth that connects them. Next to the
tiers, every mesh axis of a layout is a line from the GPUs up to the highest tier that its groups cross,
with a dot at each tier whose links connect neighbours of a group. The figure shows counts and uplink
bandwidths, not cabling.
"""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import Final

import numpy as np

from clustersim.common.units import format_bandwidth
from clustersim.hardware import topology as hardware
from clustersim.hardware.cluster import Cluster, describe_tiers
from clustersim.hardware.topology import LINK_KINDS, LinkKind
from clustersim.report.draw.charts import PlotlyDict, annotation, line_trace, marker_trace, xy_figure
from clustersim.report.figure import MUTED, SURFACE, Figure, Traces, format_share
from clustersim.report.html_document import Panel, html_document, render_panel
from clustersim.report.labels import LINK_KIND_LABELS
from clustersim.report.legend_markup import axis_markup
from clustersim.report.placement_labels import describe_placement
from clustersim.report.theme import COMM_STYLES
from clustersim.results.axis_tiers import AxisLocality, axis_localities
from clustersim.results.simulation_result import SimulationResult

_TIER_LABELS: Final = {
    "gpu": "GPU",
    "nvswitch": "NVLink domain",
    "host": "PCIe root",
    "nic": "NIC",
    "switch": "switch",
    "site": "site",
}
_MAX_BOXES: Final = 36
_BOXES_PER_DOUBLING: Final = 2.3  # additional boxes for each doubling beyond eight
_BOX_HEIGHT: Final = 0.26  # height of a box, in tiers
_TEXT_HEIGHT: Final = 0.24  # height of a line of text
_TIER_PIXELS: Final = 92
_AXIS_WIDTH: Final = 0.115  # width of an axis, relative to the boxes' total width of 1


@dataclass(frozen=True, slots=True)
class TierView:
    """One tier of a cluster.

    label: "GPU", "leaf switch"; bandwidth: of an uplink, per direction, with link kind and unit, empty for the
    top; note: anything else, such as "8 per node" or "1:7 oversubscribed".
    """

    label: str
    count: int
    bandwidth: str = ""
    note: str = ""


@dataclass(frozen=True, slots=True)
class AxisView:
    """One mesh axis of a layout.

    tier_levels: tier that each crossing leads up to, from 0 on; link_labels: of each crossing.
    """

    span: AxisLocality
    tier_levels: tuple[int, ...]
    link_labels: tuple[str, ...]

    @property
    def stride_label(self) -> str:
        """Stride between members of a group."""
        return "adjacent" if self.span.stride == 1 else f"stride {self.span.stride:,}"

    @property
    def description(self) -> str:
        """Count, size, stride and node count of the groups."""
        node_label = "1 node" if self.span.max_nodes == 1 else f"{self.span.max_nodes:,} nodes"
        return f"{self.span.group_count:,} × {self.span.group_size:,} GPUs, {self.stride_label}, {node_label}"

    @property
    def colour(self) -> str:
        """Colour of the axis's communication."""
        return COMM_STYLES[self.span.axis][1].colour


@dataclass(frozen=True, slots=True)
class TopologyView:
    """A cluster's tiers from the GPUs up, and the mesh axes of a layout on it, if any."""

    title: str
    tiers: tuple[TierView, ...]
    axes: tuple[AxisView, ...] = ()


def build_topology(cluster: Cluster, spans: Sequence[AxisLocality] = ()) -> TopologyView:
    """Tiers of a cluster, and the mesh axes of a layout on it."""
    tiers = describe_tiers(cluster)
    kind, bandwidth, top_level = cluster.fabric.links.kind, cluster.fabric.links.bandwidth, len(tiers) - 1
    links = {
        LINK_KINDS[kind_index]: float(bandwidth[kind == kind_index].max()) for kind_index in np.unique(kind).tolist()
    }
    tier_views = tuple(
        TierView(name, tier.count, "" if level == top_level else _uplink_label(tier, links), _tier_note(tier, links))
        for level, (name, tier) in enumerate(zip(tier_labels(tiers), tiers, strict=True))
    )
    axis_views = (
        AxisView(span, tuple(crossing.tier_index(tiers) for crossing in span.crossings), tuple(crossing_labels(span)))
        for span in spans
    )
    return TopologyView(f"{cluster.name}: {describe_size(cluster)}", tier_views, tuple(axis_views))


def result_topology(result: SimulationResult) -> TopologyView:
    """Cluster of a result, and the mesh axes of its layout."""
    scenario = result.scenario
    return build_topology(
        scenario.cluster, axis_localities(scenario.layout, scenario.cluster.fabric, scenario.placement)
    )


def describe_size(cluster: Cluster) -> str:
    """GPU count and model, GPUs per node, and placement on the machine."""
    size = ", ".join(_accelerator_counts(cluster))
    if cluster.sites is None:
        size = f"{size}, {cluster.gpus_per_node} per node"
    placement = describe_placement(cluster)
    return f"{size}, on {placement}" if placement else size


def _accelerator_counts(cluster: Cluster) -> list[str]:
    """Sites may differ in their GPUs; other clusters are named after their main ones."""
    if cluster.sites is None:
        return [f"{cluster.gpu_count:,} x {cluster.accelerator.name}"]
    accelerators, kinds = cluster.accelerator_kinds()
    return [
        f"{int(count):,} x {accelerator.name}"
        for accelerator, count in zip(accelerators, np.bincount(kinds), strict=True)
    ]


def tier_labels(tiers: Sequence[hardware.FabricTier]) -> list[str]:
    """Labels of the tiers; several of one kind are numbered from below."""
    kinds = [tier.kind for tier in tiers]
    labels = [_TIER_LABELS.get(kind, f"{kind} switch") for kind in kinds]
    return [
        f"{label} {kinds[: level + 1].count(kind)}" if kinds.count(kind) > 1 else label
        for level, (kind, label) in enumerate(zip(kinds, labels, strict=True))
    ]


def crossing_labels(span: AxisLocality) -> list[str]:
    """Labels of the links between neighbours for each crossing; with their share if not all cross."""
    kinds = [crossing.kind for crossing in span.crossings]
    labels = [
        LINK_KIND_LABELS[kind] if kind not in kinds[:index] else "switch to switch" for index, kind in enumerate(kinds)
    ]
    return [
        label + f" ({format_share(crossing.fraction)})" * (crossing.fraction < 1.0)
        for label, crossing in zip(labels, span.crossings, strict=True)
    ]


def _uplink_label(tier: hardware.FabricTier, links: Mapping[LinkKind, float]) -> str:
    """Bandwidth of an uplink, with its link kind inside a node; empty above an NVLink domain, which has no uplink."""
    if tier.kind == "nvswitch":
        return ""
    link_kinds = {"gpu": (LinkKind.NVLINK, LinkKind.PCIE), "host": (LinkKind.PCIE,)}.get(tier.kind, ())
    prefix = next((f"{LINK_KIND_LABELS[kind]} " for kind in link_kinds if kind in links), "")
    return prefix + format_bandwidth(tier.bandwidth)


def _tier_note(tier: hardware.FabricTier, links: Mapping[LinkKind, float]) -> str:
    """Oversubscription of a tier, and the links that bypass an NVLink domain or connect root complexes."""
    if tier.kind == "nvswitch" and LinkKind.PCIE in links:
        return f"from each GPU: PCIe {format_bandwidth(links[LinkKind.PCIE])}"
    if tier.kind == "host" and LinkKind.HOST in links:
        return f"between them {format_bandwidth(links[LinkKind.HOST])}"
    return "" if (tier.oversubscription or 1.0) <= 1.0 else f"1:{tier.oversubscription:.3g} oversubscribed"


def topology_page(topology: TopologyView, others: Iterable[Panel] = ()) -> str:
    """A page with the figure and its tables, and other panels below."""
    return html_document(topology.title, [topology_panel(topology, topology.title), *others])


def topology_panel(topology: TopologyView, title: str = "Cluster and layout") -> Panel:
    """Panel of the figure, the crossings of each axis, and a table of tiers."""
    return render_panel(
        "topology.html",
        title=title,
        figure=topology_figure(topology),
        tiers=topology.tiers,
        lanes=topology.axes,
        axis_name=axis_markup,
    )


def topology_figure(topology: TopologyView) -> Figure:
    """Boxes as bars, uplinks as bands with labels; mesh axes as lines next to them."""
    tiers, axes = topology.tiers, topology.axes
    traces: Traces = []
    for level, tier in enumerate(tiers):
        traces += [
            _uplink_band(level, *adjacent_tiers)
            for adjacent_tiers in zip(tiers[level : level + 1], tiers[level + 1 :], strict=False)
        ]
        traces.append(_box_trace(level, tier))
    traces += [trace for index, axis in enumerate(axes) for trace in _axis_line(index, axis)]
    traces += [_crossing_markers(index, axis, tiers) for index, axis in enumerate(axes)]
    annotations = [note for level, tier in enumerate(tiers) for note in _tier_annotations(level, tier)]
    wide_labels, narrow_axis_labels = (
        [
            axis_annotation
            for index, axis in enumerate(axes)
            for axis_annotation in _axis_annotations(index, axis, is_wide=is_wide)
        ]
        for is_wide in (True, False)
    )
    axis_options = {"visible": False, "fixedrange": True}
    x = {"range": [-0.02, 1.02 + _AXIS_WIDTH * (len(axes) + 0.3)], **axis_options}
    y = {"range": [-0.45, len(tiers) - 0.8 + 0.25 * bool(axes)], **axis_options}
    height, narrow = _TIER_PIXELS * len(tiers) + 40, {"annotations": annotations + narrow_axis_labels}
    options = {"showlegend": False, "dragmode": False, "margin": {"l": 4, "r": 4, "t": 4, "b": 4}}
    return xy_figure(
        "topology", traces, x, y, height=height, narrow=narrow, annotations=annotations + wide_labels, **options
    )


def box_count(count: int) -> int:
    """Boxes that represent `count` elements: all of a few, then logarithmic, so that 16,384 are 33 boxes.

    >>> [box_count(count) for count in (1, 8, 100, 16384)]
    [1, 8, 16, 33]
    """
    return min(count, 8) + round(_BOXES_PER_DOUBLING * math.log2(max(1.0, count / 8)))


def _box_positions(count: int) -> list[float]:
    boxes = min(box_count(count), _MAX_BOXES)
    return [0.5 + (index - (boxes - 1) / 2) / _MAX_BOXES for index in range(boxes)]


def _box_trace(level: int, tier: TierView) -> PlotlyDict:
    positions = _box_positions(tier.count)
    return {
        "type": "bar",
        "x": positions,
        "y": [_BOX_HEIGHT] * len(positions),
        "base": [level - _BOX_HEIGHT / 2] * len(positions),
        "marker": {"color": MUTED if level else "@accent", "opacity": 0.6 if level else 1.0, "cornerradius": 3},
        "width": 0.8 / _MAX_BOXES,
        "hovertemplate": escape(f"{tier.count:,} × {tier.label}") + "<extra></extra>",
    }


def _uplink_band(level: int, lower: TierView, upper: TierView) -> PlotlyDict:
    """A pale band as wide as the two tiers that it connects."""
    half = 0.5 / _MAX_BOXES
    lower_positions, upper_positions = _box_positions(lower.count), _box_positions(upper.count)
    bottom, top = level + _BOX_HEIGHT / 2 + 0.03, level + 1 - _BOX_HEIGHT / 2 - _TEXT_HEIGHT
    outline = [
        lower_positions[0] - half,
        lower_positions[-1] + half,
        upper_positions[-1] + half,
        upper_positions[0] - half,
    ]
    return line_trace(outline, [bottom, bottom, top, top], {"width": 0}, fill="toself", fillcolor="@track")


def _tier_annotations(level: int, tier: TierView) -> Iterator[PlotlyDict]:
    title = f"<b>{tier.count:,} × {escape(tier.label)}</b>"
    uplink = " · ".join(map(escape, filter(None, (f"↑ {tier.bandwidth}" if tier.bandwidth else "", tier.note))))
    options: PlotlyDict = {"x": 0.5, "xanchor": "center"}
    yield annotation(title, y=level - _BOX_HEIGHT / 2 - _TEXT_HEIGHT / 2, font={"size": 13}, **options)
    if uplink:
        yield annotation(uplink, y=level + 0.5 - _TEXT_HEIGHT / 2, font={"size": 12, "color": MUTED}, **options)


def _axis_position(index: int) -> float:
    """Horizontal position of an axis."""
    return 1.02 + _AXIS_WIDTH * (index + 0.6)


def _axis_line(index: int, axis: AxisView) -> Traces:
    """Line from the GPUs to the highest tier, with caps; its edge is darker because some colours are pale."""
    middle, half, top = _axis_position(index), 0.25 * _AXIS_WIDTH, max(axis.tier_levels)
    x = [middle - half, middle + half, None, middle, middle, None, middle - half, middle + half]
    y = [0, 0, None, 0, top, None, top, top]
    return [line_trace(x, y, {"width": width, "color": colour}) for width, colour in ((7, MUTED), (4, axis.colour))]


def _crossing_markers(index: int, axis: AxisView, tiers: Sequence[TierView]) -> PlotlyDict:
    """Markers of the links between neighbours of a group; open if only some neighbours use them."""
    prefix = f"<b>{axis.span.axis}</b>: {axis.description}<br>between neighbours: "
    crossed = zip(axis.link_labels, axis.tier_levels, strict=True)
    hover_texts = [prefix + escape(f"{links}, up to {tiers[level].label}") for links, level in crossed]
    colours = [axis.colour if crossing.fraction == 1.0 else SURFACE for crossing in axis.span.crossings]
    marker = {"size": 15, "color": colours, "line": {"width": 2, "color": "@ink"}}
    x = [_axis_position(index)] * len(axis.tier_levels)
    return marker_trace(axis.span.axis, x, list(axis.tier_levels), marker, hovertext=hover_texts, hoverinfo="text")


def _axis_annotations(index: int, axis: AxisView, *, is_wide: bool) -> Iterator[PlotlyDict]:
    """Name of an axis below its line, and its group size above, with the stride on large screens."""
    options: PlotlyDict = {"x": _axis_position(index), "xanchor": "center"}
    size_label = f"{axis.span.group_size:,} GPUs<br>{axis.stride_label}" if is_wide else f"{axis.span.group_size:,}"
    yield annotation(f"<b>{axis.span.axis}</b>", y=-_BOX_HEIGHT / 2 - _TEXT_HEIGHT / 2, font={"size": 13}, **options)
    yield annotation(
        size_label, y=max(axis.tier_levels) + 0.14, yanchor="bottom", font={"size": 11 if is_wide else 10}, **options
    )
