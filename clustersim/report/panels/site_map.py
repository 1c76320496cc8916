"""Which data centres does a cluster have, and which links join them? A map, and a table.

Sites stand on a circle, their size in GPUs; a line is a link, as wide as the logarithm of its bandwidth.
"""

import math
from collections.abc import Iterator, Sequence
from typing import Final

import numpy as np

from clustersim.common.units import format_bandwidth, format_seconds
from clustersim.hardware.cluster import Cluster
from clustersim.hardware.site_links import SiteLink
from clustersim.hardware.sites import SitesFabric
from clustersim.report.draw.charts import annotation, line_trace, marker_trace, xy_figure
from clustersim.report.figure import MUTED, Figure, Traces
from clustersim.report.html_document import Panel, figure_panel, render_panel

SITE_COLUMNS: Final = ("site", "GPUs", "accelerator")
SITE_LINK_COLUMNS: Final = ("from", "to", "bandwidth", "round trip", "a GPU at most", "egress a TB")
_GIGABIT: Final = 1.25e8
_PIXELS: Final = 360


def site_rows(cluster: Cluster) -> list[tuple[str, ...]]:
    """A row for each site; columns: `SITE_COLUMNS`; none on a single site."""
    machine, site_ids = cluster.sites, cluster.site_ids
    if machine is None or site_ids is None:
        return []
    accelerators, kinds = cluster.accelerator_kinds()
    return [
        (
            site.name,
            f"{np.count_nonzero(site_ids == index):,}",
            ", ".join(accelerators[kind].name for kind in dict.fromkeys(kinds[site_ids == index].tolist())),
        )
        for index, site in enumerate(machine.sites)
    ]


def site_link_rows(cluster: Cluster) -> list[tuple[str, ...]]:
    """A row for each direction of a link between sites; columns: `SITE_LINK_COLUMNS`."""
    machine = cluster.sites
    if machine is None:
        return []
    return [
        (
            machine.sites[link.source].name,
            machine.sites[link.target].name,
            format_bandwidth(link.bandwidth) if link.is_alive else "cut",
            format_seconds(2.0 * link.latency),
            _gpu_limit(link),
            f"{1e12 * link.price_per_byte:,.2f} USD" if link.price_per_byte else "",
        )
        for link in machine.site_links
    ]


def site_panels(cluster: Cluster) -> Iterator[Panel]:
    """The map and the tables; none on a single site."""
    machine = cluster.sites
    if machine is None:
        return
    yield figure_panel(
        "Sites", site_figure(machine), caption="A line is a link, with its bandwidth each way and its round trip."
    )
    for title, columns, rows in (
        ("Sites and their GPUs", SITE_COLUMNS, site_rows(cluster)),
        ("Links between sites", SITE_LINK_COLUMNS, site_link_rows(cluster)),
    ):
        yield render_panel(
            "outer_table.html", title=title, columns=columns, rows=rows, lead="", caption="", text_columns=(1,)
        )


def site_figure(machine: SitesFabric) -> Figure:
    """Sites on a circle, and a line for each pair that a link joins."""
    positions = _positions(len(machine.sites))
    pairs = {(min(link.source, link.target), max(link.source, link.target)): link for link in machine.site_links}
    traces: Traces = [_link_line(link, positions) for link in pairs.values() if link.is_alive]
    sizes = [14.0 + 3.0 * math.log10(site.fabric.gpu_count) ** 2 for site in machine.sites]
    x, y = ([position[axis] for position in positions] for axis in (0, 1))
    names = [f"{site.name}: {site.fabric.gpu_count:,} GPUs" for site in machine.sites]
    traces.append(marker_trace("sites", x, y, {"color": "@accent", "size": sizes}, hovertext=names, hoverinfo="text"))
    labels = [
        annotation(f"<b>{name}</b>", x=position[0], y=position[1], yshift=26, font={"size": 12})
        for name, position in zip(names, positions, strict=True)
    ]
    labels += [_link_label(link, positions) for link in pairs.values()]
    hidden = {"visible": False, "fixedrange": True, "range": [-1.9, 1.9]}
    options = {"showlegend": False, "dragmode": False, "margin": {"l": 4, "r": 4, "t": 4, "b": 4}}
    return xy_figure(
        "sites",
        traces,
        hidden,
        hidden | {"range": [-1.6, 1.6]},
        height=_PIXELS,
        narrow={},
        annotations=labels,
        **options,
    )


def _positions(count: int) -> list[tuple[float, float]]:
    """Places on a circle, the first at the left."""
    angles = [math.pi - 2.0 * math.pi * index / count for index in range(count)]
    return [(math.cos(angle), math.sin(angle)) for angle in angles]


def _link_line(link: SiteLink, positions: Sequence[tuple[float, float]]) -> dict[str, object]:
    ends = positions[link.source], positions[link.target]
    width = 1.5 + max(0.0, math.log10(link.bandwidth / _GIGABIT))
    return line_trace([end[0] for end in ends], [end[1] for end in ends], {"width": width, "color": MUTED})


def _link_label(link: SiteLink, positions: Sequence[tuple[float, float]]) -> dict[str, object]:
    """Not half of the way along, so that labels of crossing lines do not meet in the middle."""
    source, target = positions[link.source], positions[link.target]
    x, y = (source[axis] + (target[axis] - source[axis]) * 0.42 for axis in (0, 1))
    state = format_bandwidth(link.bandwidth) if link.is_alive else "cut"
    return annotation(f"{state}, {format_seconds(2.0 * link.latency)}", x=x, y=y, font={"size": 11}, bgcolor="@surface")


def _gpu_limit(link: SiteLink) -> str:
    """What the transport lets a GPU send over the link alone; empty where it does not limit it."""
    round_trip = 2.0 * link.latency
    rate = link.transport.gpu_rate(round_trip) if round_trip else math.inf
    return format_bandwidth(rate) if math.isfinite(rate) else ""
