"""How much is the network used, by whom, and where is it full?

A heatmap of tiers over time, the links that are used most, and which axis of the layout crosses which tier.
"""

from dataclasses import dataclass
from html import escape
from typing import Any, Final

from clustersim.build import resolved_library
from clustersim.common.arrays import FloatArray
from clustersim.report.draw.charts import Drawn, note, plot
from clustersim.report.figure import MUTED, Figure, axis, share_words, time_scale
from clustersim.report.html_document import Card, drawn
from clustersim.report.labels import LINK_WORDS
from clustersim.report.legend_markup import axis_name
from clustersim.report.theme import LISTED_LOOKS
from clustersim.results.link_volumes import Metered
from clustersim.results.network_utilization import NetworkUse, TierUse, network_use
from clustersim.results.simulation_result import SimulationResult
from clustersim.results.tolerance_groups import steady
from clustersim.scenario import Contention

OVER_COLOUR: Final = "#D55E00"
_STOPS: Final = (0.0, 0.01, 0.03, 0.1, 0.3, 0.6, 1.0)  # of utilisation: little is to be seen, too
_VISIBLE: Final = 5e-4  # of what a link carries
_ROW: Final = 34  # pixels
_SCALE_ROOM: Final = 52  # pixels of the scale of colours
SAME: Final = 0.05
"""Of utilisation: neighbours in time that differ by less have one colour, that of their mean."""


@dataclass(frozen=True, slots=True)
class Network:
    """What the card shows.

    shared: links are shared in the run; recorded: some times are those of a record; hosts: ranks copy to their hosts.
    """

    use: NetworkUse
    shared: bool
    recorded: bool
    hosts: bool = False


def network_of(result: SimulationResult) -> Network | None:
    """How the links were used; None where the ranks exchange nothing."""
    scenario, program = result.scenario, result.program
    cluster, cost = scenario.cluster, scenario.cost
    volumes = Metered(cluster.fabric, resolved_library(scenario), program.groups)
    use = network_use(result.trace_table, cluster.fabric, volumes)
    if use is None:
        return None
    healthy = not scenario.degradations.affects_network  # else no collective is looked up in the record
    recorded = healthy and cost.record is not None and bool(cost.record.collectives)
    return Network(
        use, shared=cost.network is Contention.SHARED, recorded=recorded, hosts=result.host_memory is not None
    )


def network_card(network: Network | None) -> Card:
    """The heatmap with its numbers, and the tables; a sentence where there is nothing to see."""
    if network is None:
        return drawn("network.html", use=None)
    use, order = network.use, list(LISTED_LOOKS)
    axes = sorted(use.axes, key=lambda each: order.index(each.axis))
    return drawn(
        "network.html",
        figure=utilisation_figure(use),
        use=use,
        axes=axes,
        named=[axis_name(axis_use.axis) for axis_use in axes],
        axis_name=axis_name,
        names=LINK_WORDS,
        visible=_VISIBLE,
        over=not network.shared and any(tier.peak > 1.0 for tier in use.tiers),  # axes do not slow each other
        network=network,
    )


def utilisation_figure(use: NetworkUse) -> Figure:
    """Tiers by time, the GPUs' own links at the bottom."""
    scale = time_scale(use.seconds)
    labels = [LINK_WORDS[tier.kind] for tier in use.tiers]
    most = max(1.0, *(tier.peak for tier in use.tiers))
    width = use.seconds / len(use.tiers[0].over_time) / scale.size
    trace = {
        "type": "heatmap", "y": labels, "x0": width / 2, "dx": width,
        "z": [_rounded(steady(tier.over_time, SAME)) for tier in use.tiers],
        "customdata": [_rounded(tier.over_time) for tier in use.tiers],
        "zmin": 0.0, "zmax": most, "colorscale": colour_scale(most), "ygap": 3,
        "showscale": True, "colorbar": _scale_of_colours(),
        "hovertemplate": f"<b>%{{y}}</b><br>at %{{x:.4~g}} {scale.unit}: %{{customdata:.1%}} used<extra></extra>",
    }  # fmt: skip
    x = axis(f"time [{scale.unit}]", range=[0, use.seconds / scale.size], showgrid=False)
    y = axis("", fixedrange=True, type="category", ticksuffix=" ", showgrid=False)
    words = [_numbers(label, tier) for label, tier in zip(labels, use.tiers, strict=True)]
    margin, height = {"l": 8, "r": 170, "t": _SCALE_ROOM, "b": 40}, 60 + _SCALE_ROOM + _ROW * len(labels)
    narrow, plain = {"annotations": [], "margin": {**margin, "r": 8}}, {"showlegend": False, "margin": margin}
    return plot("network", [trace], x, y, height=height, narrow=narrow, annotations=words, **plain)


def _rounded(values: FloatArray) -> list[float]:
    return [round(value, 4) for value in values.tolist()]


def _scale_of_colours() -> Drawn:
    """Above the rows, in percent; its title says what has one colour."""
    title = f"used of nominal; neighbours within {SAME:.0%} have one colour"
    return {
        "orientation": "h", "thickness": 8, "len": 0.6, "x": 0, "xanchor": "left", "y": 1.02, "yanchor": "bottom",
        "tickformat": ".0%", "outlinewidth": 0, "tickfont": {"size": 10, "color": MUTED},
        "title": {"text": title, "side": "top", "font": {"size": 11, "color": MUTED}},
    }  # fmt: skip


def colour_scale(most: float) -> list[list[Any]]:
    """From clear to blue at 100 %, so that it reads on light and dark; orange above. most: utilisation at the end.

    >>> colour_scale(1.0)[0], colour_scale(1.0)[-1]
    ([0.0, 'rgba(38,143,214,0.1)'], [1.0, 'rgba(38,143,214,1)'])
    >>> colour_scale(2.0)[-2:]
    [[0.5, '#D55E00'], [1.0, '#D55E00']]
    """
    within = [[stop / most, f"rgba(38,143,214,{0.1 + 0.9 * stop**0.4:.3g})"] for stop in _STOPS]
    return within if most <= 1.0 else [*within, [1.0 / most, OVER_COLOUR], [1.0, OVER_COLOUR]]


def _numbers(label: str, tier: TierUse) -> Drawn:
    """Mean and peak, at the right of a row."""
    words = escape(f"mean {share_words(tier.mean)}, peak {share_words(tier.peak)}")
    return note(words, 1.01, label, xref="paper", xanchor="left")
