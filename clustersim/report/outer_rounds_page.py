"""Which page shows local training over sites? Its rounds over time, and utilization against bandwidth."""

from pathlib import Path
from typing import Final

from clustersim.common.units import format_step_time
from clustersim.report.draw.charts import bar_figure, bar_trace, line_trace, xy_figure
from clustersim.report.figure import Figure, axis_layout
from clustersim.report.html_document import figure_panel, html_document, render_panel
from clustersim.report.terminal.outer_rounds import CHOICE_COLUMNS, CONVERGENCE_NOTE, choice_rows, headline
from clustersim.results.outer_rounds import OuterRounds

_SHOWN_ROUNDS: Final = 3
_COLOURS: Final = {"inner steps": "#0072B2", "waiting": "#BFC6CD"}
_CURVE_COLOURS: Final = ("#56B4E9", "#0072B2", "#D55E00")


def outer_rounds_page(result: OuterRounds, file: Path) -> str:
    """The page as HTML."""
    rounds = figure_panel(
        headline(result),
        round_figure(result),
        caption="The first rounds of each site: inner steps, and waiting for slower sites, the exchange and the outer "
        f"optimizer ({format_step_time(result.exposed_seconds + result.optimizer_seconds)} a round). "
        f"{CONVERGENCE_NOTE}",
    )
    panels = [rounds]
    if result.curves:
        caption = "All links between sites scaled by one factor; nothing else changes."
        panels.append(figure_panel("Utilization against bandwidth", curve_figure(result), caption=caption))
    if result.choices:
        panels.append(render_panel("outer_choices.html", columns=CHOICE_COLUMNS, rows=choice_rows(result)))
    return html_document(f"Local training of {file.name}", panels)


def round_figure(result: OuterRounds) -> Figure:
    """A row for each site, with some rounds."""
    names = [site.name for site in result.sites]
    traces = []
    for index in range(_SHOWN_ROUNDS):
        start = index * result.round_seconds
        working = [result.site_utilization(site) * result.round_seconds for site in result.sites]
        waiting = [result.round_seconds - seconds for seconds in working]
        ends = [start + seconds for seconds in working]
        for name, lengths, base in (("inner steps", working, [start] * len(names)), ("waiting", waiting, ends)):
            marker = {"color": _COLOURS[name]}
            traces.append(
                bar_trace(name, names, lengths, marker, base=base, showlegend=index == 0, hovertemplate="%{y}: " + name)
            )
    x = axis_layout("seconds", range=[0.0, _SHOWN_ROUNDS * result.round_seconds])
    height = 110 + 34 * len(names)
    return bar_figure("rounds", traces, x, height=height, narrow={}, barmode="overlay", showlegend=True)


def curve_figure(result: OuterRounds) -> Figure:
    """A line for each number of inner steps."""
    traces = [
        line_trace(
            [bandwidth * 8.0 / 1e9 for bandwidth in curve.bandwidths],
            [100.0 * utilization for utilization in curve.utilizations],
            {"color": colour, "width": 2},
            name=f"{curve.inner_steps:,} inner steps",
            showlegend=True,
            hoverinfo="x+y+name",
        )
        for curve, colour in zip(result.curves, _CURVE_COLOURS, strict=False)
    ]
    x = axis_layout("Gbit/s of the slowest link between sites, each way", type="log")
    y = axis_layout("utilization, %", range=[0.0, 102.0])
    return xy_figure("curves", traces, x, y, height=320, narrow={})
