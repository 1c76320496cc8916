"""Which page shows a run of weeks? Duration, time losses, one run in detail, and what would help."""

from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import Final

import numpy as np

from clustersim.common.units import format_seconds
from clustersim.report.draw.charts import PlotlyDict, annotation, bar_figure, bar_trace, reference_line, xy_figure
from clustersim.report.figure import Figure, axis_layout, encode_floats
from clustersim.report.html_document import html_document, render_panel
from clustersim.report.row_selection import group_by
from clustersim.report.terminal import goodput as labels
from clustersim.report.terminal.goodput import LOSS_LABELS, loss_shares
from clustersim.results.goodput import SECONDS_PER_DAY, GoodputResult, SweepPoint, TimelineInterval

_SMALL_FONT: Final = {"font": {"size": 9}}
_NARROW_LABEL_SPACE: Final = 1.6  # range of the losses over their sum, where labels are as wide as bars
_WORK_COLOUR: Final = "#0072B2"
_DEGRADED_COLOUR: Final = "#56B4E9"
_TIMELINE_ROWS: Final = ("up", "lost", "down")
_INITIAL_DAYS: Final = 7.0  # days that the timeline shows before any zoom


def goodput_page(result: GoodputResult, file: Path) -> str:
    """The page as HTML."""
    figures = {
        "losses": loss_figure(result),
        "timeline": timeline_figure(result),
        "spread": duration_histogram(result) if len(result.runs) > 1 else None,
        "intervals": interval_figure(result) if result.interval_sweep else None,
        "spares": spares_figure(result) if len(result.spares_sweep) > 1 else None,
    }
    panel = render_panel("goodput.html", labels=labels, result=result, **figures)
    return html_document(f"Goodput of {file.name}", [panel])


def loss_figure(result: GoodputResult) -> Figure:
    """Waterfall from the ideal duration to the mean one, in days."""
    losses_with_share = loss_shares(result)
    names, colours = zip(
        ("without failures", _WORK_COLOUR), *(LOSS_LABELS[name] for name, _, _ in losses_with_share), strict=True
    )
    lengths = [
        result.ideal_seconds / SECONDS_PER_DAY,
        *(seconds / SECONDS_PER_DAY for _, seconds, _ in losses_with_share),
    ]
    bar_labels = [
        f"{lengths[0]:.1f} d",
        *(f"{format_seconds(seconds)}, {share:.1%}" for _, seconds, share in losses_with_share),
    ]
    trace = bar_trace(
        "",
        list(names),
        lengths,
        {"color": list(colours)},
        base=[0.0, *np.cumsum(lengths)[:-1].tolist()],
        text=bar_labels,
        textposition="auto",
        cliponaxis=False,
        hovertemplate="%{y}: %{text}<extra></extra>",
    )
    days = axis_layout("days", range=[0.0, 1.15 * sum(lengths)])
    narrow = {**_SMALL_FONT, "xaxis": {"range": [0.0, _NARROW_LABEL_SPACE * sum(lengths)]}}
    return bar_figure("losses", [trace], days, height=90 + 30 * len(names), narrow=narrow)


def timeline_figure(result: GoodputResult) -> Figure:
    """State of the job over one run."""
    groups = group_by(result.timeline, lambda interval: interval.label)
    total_days = max((interval.end for interval in result.timeline), default=SECONDS_PER_DAY) / SECONDS_PER_DAY
    traces = [_interval_trace(state, groups[state]) for state in sorted(groups, key=_legend_order)]
    y = axis_layout(
        "", categoryorder="array", categoryarray=[*reversed(_TIMELINE_ROWS)], fixedrange=True, ticksuffix="  "
    )
    x = axis_layout("day", range=[0.0, min(_INITIAL_DAYS, total_days)])
    return xy_figure("timeline", traces, x, y, height=260, narrow={"legend": {"font": {"size": 9}}})


def _legend_order(state: str) -> tuple[int, str]:
    return ([*LOSS_LABELS].index(state) if state in LOSS_LABELS else -1, state)


def _interval_trace(state: str, intervals: Sequence[TimelineInterval]) -> PlotlyDict:
    row = "lost" if state == "lost_work" else "down" if state in LOSS_LABELS else "up"
    name, colour = LOSS_LABELS.get(state, (state, _WORK_COLOUR if state == "healthy" else _DEGRADED_COLOUR))
    return bar_trace(
        name,
        [row] * len(intervals),
        encode_floats([(interval.end - interval.begin) / SECONDS_PER_DAY for interval in intervals]),
        {"color": colour, "line": {"width": 0}},
        base=encode_floats([interval.begin / SECONDS_PER_DAY for interval in intervals]),
        customdata=[[format_seconds(interval.end - interval.begin), escape(interval.cause)] for interval in intervals],
        hovertemplate="%{customdata[0]} %{customdata[1]}<extra>" + escape(name) + "</extra>",
    )


def duration_histogram(result: GoodputResult) -> Figure:
    """Histogram of the runs' durations in days, with the duration without failures marked."""
    runs = {
        "type": "histogram", "x": encode_floats([run.wall / SECONDS_PER_DAY for run in result.runs]), "nbinsx": 50,
        "marker": {"color": _WORK_COLOUR}, "hovertemplate": "%{x} days: %{y} runs<extra></extra>",
    }  # fmt: skip
    ideal = [(result.ideal_seconds / SECONDS_PER_DAY, "nothing breaks", 1.0)]
    return _figure_with_markers(
        "spread", runs, axis_layout("days"), axis_layout("runs", rangemode="tozero"), ideal, height=260
    )


def _figure_with_markers(
    name: str,
    trace: PlotlyDict,
    x: PlotlyDict,
    y: PlotlyDict,
    marks: Sequence[tuple[float, str, float]],
    *,
    height: int = 280,
) -> Figure:
    """Figure with labelled vertical lines. marks: x position, label, and height of the label."""
    log = x.get("type") == "log"
    line = {"color": "@muted", "width": 1, "dash": "dot"}
    notes = [
        annotation(
            label,
            float(np.log10(position)) if log else position,
            label_height,
            yref="paper",
            xanchor="left",
            yanchor="top",
        )
        for position, label, label_height in marks
    ]
    layout_options = {
        "shapes": [reference_line("x", position, line) for position, _, _ in marks],
        "annotations": notes,
        "dragmode": False,
    }
    return xy_figure(name, [trace], x, y, height=height, narrow=_SMALL_FONT, showlegend=False, **layout_options)


def interval_figure(result: GoodputResult) -> Figure:
    """Days above the best over the checkpoint interval; the simulated interval, Young's and Daly's optima are marked.

    The points are means of few runs, which are not the days of the result.
    """
    checkpoint = result.checkpoint
    marks = [(checkpoint.interval, "as run", 1.0), (checkpoint.young, "Young", 0.85), (checkpoint.daly, "Daly", 0.7)]
    marks = [
        (position / 60.0, label, label_height)
        for position, label, label_height in marks
        if 0.0 < position < float("inf")
    ]
    best = min(point.days for point in result.interval_sweep)
    days = [point.days - best for point in result.interval_sweep]
    curve = _curve_trace(result.interval_sweep, 60.0, days, "%{x:.3g} min: %{y:.2f} days more")
    x = axis_layout("minutes of work between checkpoints", type="log")
    return _figure_with_markers("intervals", curve, x, axis_layout("days above the best"), marks)


def spares_figure(result: GoodputResult) -> Figure:
    """Goodput of all nodes over the number of spare nodes."""
    goodput = [100.0 * point.goodput for point in result.spares_sweep]
    curve = _curve_trace(result.spares_sweep, 1.0, goodput, "%{x} spares: %{y:.1f} %")
    y = axis_layout("goodput of all nodes [%]")
    return _figure_with_markers("spares", curve, axis_layout("spare nodes"), y, [(result.spare_nodes, "as run", 1.0)])


def _curve_trace(
    points: Sequence[SweepPoint], unit_size: float, values: Sequence[float], hover_template: str
) -> PlotlyDict:
    return {
        "type": "scatter",
        "mode": "lines+markers",
        "x": [point.value / unit_size for point in points],
        "y": [*values],
        "line": {"color": _WORK_COLOUR, "width": 2},
        "marker": {"size": 6},
        "hovertemplate": hover_template + "<extra></extra>",
    }
