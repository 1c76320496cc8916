"""How much is the network used, by which axes, and which links are saturated?

A heatmap of tiers over time, the busiest links, and which axis of the layout crosses which tier.
"""

from dataclasses import dataclass
from html import escape
from typing import Any, Final

from clustersim.build import resolved_library
from clustersim.common.arrays import FloatArray
from clustersim.report.draw.charts import PlotlyDict, annotation, xy_figure
from clustersim.report.figure import MUTED, Figure, axis_layout, format_share, time_scale
from clustersim.report.html_document import Panel, render_panel
from clustersim.report.labels import LINK_KIND_LABELS
from clustersim.report.legend_markup import axis_markup
from clustersim.report.theme import COMM_STYLES
from clustersim.results.link_volumes import MeteredCollectiveCost
from clustersim.results.network_utilization import NetworkUtilization, TierUtilization, network_utilization
from clustersim.results.simulation_result import SimulationResult
from clustersim.results.tolerance_groups import smooth_runs
from clustersim.scenario import Contention

OVERLOAD_COLOUR: Final = "#D55E00"
_COLOUR_STOPS: Final = (
    0.0,
    0.01,
    0.03,
    0.1,
    0.3,
    0.6,
    1.0,
)  # utilisation; dense near zero so that light use is visible
_MIN_SHARE: Final = 5e-4  # relative to the bytes of a link
_ROW_PIXELS: Final = 34  # pixels
_COLOUR_BAR_PIXELS: Final = 52  # pixels of the colour bar
MERGE_TOLERANCE: Final = 0.05
"""Utilisation: neighbouring bins that differ by less have the colour of their mean."""


@dataclass(frozen=True, slots=True)
class NetworkView:
    """Content of the panel.

    network_use: utilisation by tier, link and axis; is_shared: contention between axes is simulated;
    uses_recorded_times: some times are from a calibration record; has_host_copies: ranks copy to or from their
    hosts.
    """

    network_use: NetworkUtilization
    is_shared: bool
    uses_recorded_times: bool
    has_host_copies: bool = False


def build_network(result: SimulationResult) -> NetworkView | None:
    """Network utilisation; None if the ranks do not communicate."""
    scenario, program = result.scenario, result.program
    cluster, cost = scenario.cluster, scenario.cost
    volumes = MeteredCollectiveCost(cluster.fabric, resolved_library(scenario), program.groups)
    usage = network_utilization(result.trace_table, cluster.fabric, volumes)
    if usage is None:
        return None
    is_undegraded = (
        not scenario.degradations.affects_network
    )  # a degraded network disables the lookup of recorded collectives
    uses_recorded_times = is_undegraded and cost.record is not None and bool(cost.record.collectives)
    return NetworkView(
        usage,
        is_shared=cost.network is Contention.SHARED,
        uses_recorded_times=uses_recorded_times,
        has_host_copies=result.host_memory is not None,
    )


def network_panel(network: NetworkView | None) -> Panel:
    """Panel of the heatmap with means and peaks, and the tables; a sentence if there is no traffic."""
    if network is None:
        return render_panel("network.html", use=None)
    usage, order = network.network_use, list(COMM_STYLES)
    axes = sorted(usage.axis_traffic, key=lambda axis: order.index(axis.axis))
    return render_panel(
        "network.html",
        figure=utilisation_figure(usage),
        use=usage,
        axes=axes,
        named=[axis_markup(axis.axis) for axis in axes],
        axis_name=axis_markup,
        names=LINK_KIND_LABELS,
        visible=_MIN_SHARE,
        over=not network.is_shared
        and any(tier.peak_utilization > 1.0 for tier in usage.tiers),  # contention between axes is not simulated
        network=network,
    )


def utilisation_figure(usage: NetworkUtilization) -> Figure:
    """Heatmap of tiers by time, GPU links at the bottom."""
    scale = time_scale(usage.makespan)
    labels = [LINK_KIND_LABELS[tier.kind] for tier in usage.tiers]
    max_utilisation = max(1.0, *(tier.peak_utilization for tier in usage.tiers))
    bin_width = usage.makespan / len(usage.tiers[0].utilization_over_time) / scale.unit_size
    trace = {
        "type": "heatmap", "y": labels, "x0": bin_width / 2, "dx": bin_width,
        "z": [_rounded(smooth_runs(tier.utilization_over_time, MERGE_TOLERANCE)) for tier in usage.tiers],
        "customdata": [_rounded(tier.utilization_over_time) for tier in usage.tiers],
        "zmin": 0.0, "zmax": max_utilisation, "colorscale": colour_scale(max_utilisation), "ygap": 3,
        "showscale": True, "colorbar": _colour_bar(),
        "hovertemplate": f"<b>%{{y}}</b><br>at %{{x:.4~g}} {scale.unit}: %{{customdata:.1%}} used<extra></extra>",
    }  # fmt: skip
    x = axis_layout(f"time [{scale.unit}]", range=[0, usage.makespan / scale.unit_size], showgrid=False)
    y = axis_layout("", fixedrange=True, type="category", ticksuffix=" ", showgrid=False)
    annotations = [_mean_and_peak(label, tier) for label, tier in zip(labels, usage.tiers, strict=True)]
    margin, height = (
        {"l": 8, "r": 170, "t": _COLOUR_BAR_PIXELS, "b": 40},
        60 + _COLOUR_BAR_PIXELS + _ROW_PIXELS * len(labels),
    )
    narrow, options = {"annotations": [], "margin": {**margin, "r": 8}}, {"showlegend": False, "margin": margin}
    return xy_figure("network", [trace], x, y, height=height, narrow=narrow, annotations=annotations, **options)


def _rounded(values: FloatArray) -> list[float]:
    return [round(value, 4) for value in values.tolist()]


def _colour_bar() -> PlotlyDict:
    """Colour bar above the rows, in percent; its title states the merge tolerance."""
    title = f"used of nominal; neighbours within {MERGE_TOLERANCE:.0%} have one colour"
    return {
        "orientation": "h", "thickness": 8, "len": 0.6, "x": 0, "xanchor": "left", "y": 1.02, "yanchor": "bottom",
        "tickformat": ".0%", "outlinewidth": 0, "tickfont": {"size": 10, "color": MUTED},
        "title": {"text": title, "side": "top", "font": {"size": 11, "color": MUTED}},
    }  # fmt: skip


def colour_scale(max_utilisation: float) -> list[list[Any]]:
    """From transparent to blue at 100 %, readable on light and dark; orange above. max_utilisation: at the end.

    >>> colour_scale(1.0)[0], colour_scale(1.0)[-1]
    ([0.0, 'rgba(38,143,214,0.1)'], [1.0, 'rgba(38,143,214,1)'])
    >>> colour_scale(2.0)[-2:]
    [[0.5, '#D55E00'], [1.0, '#D55E00']]
    """
    up_to_nominal = [
        [stop / max_utilisation, f"rgba(38,143,214,{0.1 + 0.9 * stop**0.4:.3g})"] for stop in _COLOUR_STOPS
    ]
    return (
        up_to_nominal
        if max_utilisation <= 1.0
        else [*up_to_nominal, [1.0 / max_utilisation, OVERLOAD_COLOUR], [1.0, OVERLOAD_COLOUR]]
    )


def _mean_and_peak(label: str, tier: TierUtilization) -> PlotlyDict:
    """Annotation of mean and peak, to the right of a row."""
    text = escape(f"mean {format_share(tier.mean_utilization)}, peak {format_share(tier.peak_utilization)}")
    return annotation(text, 1.01, label, xref="paper", xanchor="left")
