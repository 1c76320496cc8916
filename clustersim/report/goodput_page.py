"""How is a run over weeks looked at? How long it takes, where its time goes, one run in detail, and what helps."""

from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import Final

import numpy as np

from clustersim.common.units import format_seconds
from clustersim.report.draw.charts import Drawn, bar, chart, level, note, plot
from clustersim.report.figure import Figure, axis, typed
from clustersim.report.html_document import document, drawn
from clustersim.report.row_selection import grouped
from clustersim.report.terminal import goodput as said
from clustersim.report.terminal.goodput import LOSSES, losses
from clustersim.results.goodput import DAY, Goodput, Piece, Point

_SMALL: Final = {"font": {"size": 9}}
_WORK: Final = "#0072B2"
_SLOW: Final = "#56B4E9"
_ROWS: Final = ("up", "lost", "down")
_FIRST: Final = 7.0  # days of the timeline that are drawn first


def goodput_page(found: Goodput, file: Path) -> str:
    """The page as HTML text."""
    figures = {
        "losses": loss_figure(found),
        "timeline": timeline_figure(found),
        "spread": spread_figure(found) if len(found.runs) > 1 else None,
        "intervals": interval_figure(found) if found.intervals else None,
        "spares": spares_figure(found) if len(found.spares) > 1 else None,
    }
    return document(f"Goodput of {file.name}", [drawn("goodput.html", said=said, found=found, **figures)])


def loss_figure(found: Goodput) -> Figure:
    """A waterfall from the ideal to the whole: days, each bar behind the one before it."""
    rows = losses(found)
    names, colours = zip(("without failures", _WORK), *(LOSSES[name] for name, _, _ in rows), strict=True)
    lengths = [found.ideal / DAY, *(seconds / DAY for _, seconds, _ in rows)]
    told = [f"{lengths[0]:.1f} d", *(f"{format_seconds(seconds)}, {part:.1%}" for _, seconds, part in rows)]
    trace = bar(
        "", list(names), lengths, {"color": list(colours)}, base=[0.0, *np.cumsum(lengths)[:-1].tolist()], text=told,
        textposition="auto", cliponaxis=False, hovertemplate="%{y}: %{text}<extra></extra>",
    )  # fmt: skip
    days = axis("days", range=[0.0, 1.15 * sum(lengths)])
    return chart("losses", [trace], days, height=90 + 30 * len(names), narrow=_SMALL)


def timeline_figure(found: Goodput) -> Figure:
    """What one run's time went into, from day to day."""
    groups = grouped(found.timeline, lambda piece: piece.what)
    whole = max((piece.end for piece in found.timeline), default=DAY) / DAY
    traces = [_pieces(what, groups[what]) for what in sorted(groups, key=_order)]
    rows = axis("", categoryorder="array", categoryarray=[*reversed(_ROWS)], fixedrange=True, ticksuffix="  ")
    x = axis("day", range=[0.0, min(_FIRST, whole)])
    return plot("timeline", traces, x, rows, height=260, narrow={"legend": {"font": {"size": 9}}})


def _order(what: str) -> tuple[int, str]:
    return ([*LOSSES].index(what) if what in LOSSES else -1, what)


def _pieces(what: str, pieces: Sequence[Piece]) -> Drawn:
    row = "lost" if what == "lost_work" else "down" if what in LOSSES else "up"
    name, colour = LOSSES.get(what, (what, _WORK if what == "healthy" else _SLOW))
    return bar(
        name, [row] * len(pieces), typed([(piece.end - piece.begin) / DAY for piece in pieces]),
        {"color": colour, "line": {"width": 0}}, base=typed([piece.begin / DAY for piece in pieces]),
        customdata=[[format_seconds(piece.end - piece.begin), escape(piece.cause)] for piece in pieces],
        hovertemplate="%{customdata[0]} %{customdata[1]}<extra>" + escape(name) + "</extra>",
    )  # fmt: skip


def spread_figure(found: Goodput) -> Figure:
    """How many runs take how many days, beside how long it takes where nothing breaks."""
    runs = {
        "type": "histogram", "x": typed([run.wall / DAY for run in found.runs]), "nbinsx": 50,
        "marker": {"color": _WORK}, "hovertemplate": "%{x} days: %{y} runs<extra></extra>",
    }  # fmt: skip
    ideal = [(found.ideal / DAY, "nothing breaks", 1.0)]
    return _marked("spread", runs, axis("days"), axis("runs", rangemode="tozero"), ideal, height=260)


def _marked(
    name: str, trace: Drawn, x: Drawn, y: Drawn, marks: Sequence[tuple[float, str, float]], *, height: int = 280
) -> Figure:
    """A figure with lines across it and words beside them. marks: where on the x axis, words, how high they are."""
    log = x.get("type") == "log"
    look = {"color": "@muted", "width": 1, "dash": "dot"}
    notes = [
        note(words, float(np.log10(at)) if log else at, high, yref="paper", xanchor="left", yanchor="top")
        for at, words, high in marks
    ]
    drawn = {"shapes": [level("x", at, look) for at, _, _ in marks], "annotations": notes, "dragmode": False}
    return plot(name, [trace], x, y, height=height, narrow=_SMALL, showlegend=False, **drawn)


def interval_figure(found: Goodput) -> Figure:
    """Days over the time between checkpoints, with the one that is run, and those of formulas."""
    every = found.checkpoint
    marks = [(every.interval, "as run", 1.0), (every.young, "Young", 0.85), (every.daly, "Daly", 0.7)]
    marks = [(at / 60.0, words, high) for at, words, high in marks if 0.0 < at < float("inf")]
    days = [point.days for point in found.intervals]
    curve = _curve(found.intervals, 60.0, days, "%{x:.3g} min: %{y:.1f} days")
    x = axis("minutes of work between checkpoints", type="log")
    return _marked("intervals", curve, x, axis("days, mean"), marks)


def spares_figure(found: Goodput) -> Figure:
    """Goodput of all nodes over the number of spares."""
    goodput = [100.0 * point.goodput for point in found.spares]
    curve = _curve(found.spares, 1.0, goodput, "%{x} spares: %{y:.1f} %")
    y = axis("goodput of all nodes [%]")
    return _marked("spares", curve, axis("spare nodes"), y, [(found.spare_nodes, "as run", 1.0)])


def _curve(points: Sequence[Point], size: float, values: Sequence[float], words: str) -> Drawn:
    return {
        "type": "scatter", "mode": "lines+markers", "x": [point.value / size for point in points], "y": [*values],
        "line": {"color": _WORK, "width": 2}, "marker": {"size": 6}, "hovertemplate": words + "<extra></extra>",
    }  # fmt: skip
