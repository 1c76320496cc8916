"""Which page shows local training over sites? Its rounds over time, and utilization against bandwidth."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np

from clustersim.common.units import format_step_time
from clustersim.report.draw.charts import bar_figure, bar_trace, line_trace, xy_figure
from clustersim.report.figure import Figure, axis_layout
from clustersim.report.html_document import Panel, figure_panel, html_document, render_panel
from clustersim.report.terminal.outer_rounds import (
    CHOICE_COLUMNS,
    LINK_COLUMNS,
    REPLICA_COLUMNS,
    ROUND_COLUMNS,
    choice_rows,
    headline,
    link_rows,
    replica_rows,
    round_rows,
)
from clustersim.results.outer_rounds import CONVERGENCE_NOTE, OuterRounds, ReplicaRound

_SHOWN_ROUNDS: Final = 3
_COLOURS: Final = {
    "inner steps": "#0072B2",
    "slowed by an exchange": "#56B4E9",
    "waiting for slower replicas": "#BFC6CD",
    "waiting for the exchange": "#D55E00",
}
_CURVE_COLOURS: Final = ("#56B4E9", "#0072B2", "#D55E00")


def outer_rounds_page(result: OuterRounds, file: Path) -> str:
    """The page as HTML."""
    rounds = figure_panel(
        headline(result),
        round_figure(result),
        caption="The first rounds of each replica: inner steps, and waiting for slower replicas, the exchange and the "
        f"outer optimizer ({format_step_time(result.exposed_seconds + result.optimizer_seconds)} a round). "
        f"{CONVERGENCE_NOTE}",
    )
    panels = [
        rounds,
        _table_panel("Round", ROUND_COLUMNS, round_rows(result), text_columns=(2,)),
        _table_panel("Replicas", REPLICA_COLUMNS, replica_rows(result)),
    ]
    if result.links:
        panels.append(_table_panel("Links between sites", LINK_COLUMNS, link_rows(result), text_columns=(1,)))
    if result.curves:
        caption = "All links between sites scaled by one factor; nothing else changes."
        panels.append(figure_panel("Utilization against bandwidth", curve_figure(result), caption=caption))
    if result.choices:
        panels.append(
            _table_panel(
                "Settings that reach the utilization",
                CHOICE_COLUMNS,
                choice_rows(result),
                lead="With the fewest inner steps first: these are closest to synchronous training.",
                caption="A link in a day: what the most loaded link between sites carries in one direction.",
            )
        )
    return html_document(f"Local training of {file.name}", panels)


def _table_panel(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]], **options: Any) -> Panel:
    """A card with a table. options: its lead and caption, and which columns hold text."""
    options = {"lead": "", "caption": "", "text_columns": ()} | options
    return render_panel("outer_table.html", title=title, columns=columns, rows=rows, **options)


def round_figure(result: OuterRounds) -> Figure:
    """A row for each replica, with some rounds of it."""
    names = [replica.name for replica in result.replicas]
    lengths = np.array([result.replica_round_seconds(replica) for replica in result.replicas])
    durations = np.array([_round_parts(result, replica) for replica in result.replicas])
    traces = []
    for index in range(_SHOWN_ROUNDS):
        base = index * lengths
        for name, seconds in zip(_COLOURS, durations.T, strict=True):
            traces.append(
                bar_trace(
                    name,
                    names,
                    seconds.tolist(),
                    {"color": _COLOURS[name]},
                    base=base.tolist(),
                    showlegend=index == 0,
                    hovertemplate="%{y}: " + name,
                )
            )
            base = base + seconds
    x = axis_layout("seconds", range=[0.0, _SHOWN_ROUNDS * result.round_seconds])
    height = 110 + 34 * len(names)
    return bar_figure("rounds", traces, x, height=height, narrow={}, barmode="overlay", showlegend=True)


def _round_parts(result: OuterRounds, replica: ReplicaRound) -> tuple[float, ...]:
    """Seconds of one round, in the order of `_COLOURS`."""
    waits = result.waits(replica)
    return result.inner_steps(replica) * replica.step_time, waits.slowed, waits.slower, waits.exchange


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
