"""How is a run over weeks looked at? How long it takes, where its time goes, one run in detail, and what helps."""

from collections.abc import Iterable, Sequence
from html import escape
from pathlib import Path
from typing import Any, Final

import numpy as np

from clustersim.analysis.goodput import DAY, Goodput, Piece, Point
from clustersim.report.document import Card, document, figure_card, section
from clustersim.report.figure import Figure, Traces, axis, layout, legend, typed
from clustersim.report.files import write_text_atomically
from clustersim.report.goodput_table import LOSSES, facts, headline, losses, money_words, subject
from clustersim.report.keys import Cells, table
from clustersim.units import format_seconds, format_step_time

_COLOURS: Final = {
    "checkpoints": "#E69F00",
    "lost_work": "#D55E00",
    "detection": "#CC79A7",
    "restart": "#AA3377",
    "waiting": "#6B7280",
    "maintenance": "#8D96A0",
    "degraded": "#F0E442",
    "spares": "#BFC6CD",
}
_WORK: Final = "#0072B2"
_SLOW: Final = "#56B4E9"
_ROWS: Final = ("up", "lost", "down")
_FIRST: Final = 7.0  # days of the timeline that are drawn first
_LOSS_LEAD: Final = (
    "From the time that the run takes where nothing breaks to what it takes: the mean over runs. Lost work is done "
    "again from the last safe checkpoint; spare nodes are counted as if the whole job stood still for their part."
)
_TIME_LEAD: Final = (
    "The first of the runs: when the job was up, which work was lost, and what it was down for. The first week; "
    "double-click for the whole run."
)
_SPREAD_LEAD: Final = "Every run has the same job, and other things that break at other times."
_EVERY_LEAD: Final = (
    "Runs with checkpoints that come more and less often, in which the same things break. Young's and Daly's formulas "
    "know nothing of failures while restarting, of lengths that vary, and of writing beside steps."
)
_SPARES_LEAD: Final = (
    "Goodput of all nodes, spares too: with few of them the job waits for repair, with many they stand idle."
)


def write_goodput(found: Goodput, file: Path, path: str | Path) -> None:
    """Write the page, wholly or not at all; raise OutputError if it cannot be written. file: the scenario."""
    write_text_atomically(path, goodput_page(found, file))


def goodput_page(found: Goodput, file: Path) -> str:
    """The page as HTML text."""
    cards = [
        _verdict_card(found),
        figure_card("Where the time goes", loss_figure(found), lead=_LOSS_LEAD),
        *_what_if_card(found),
        figure_card("One run", timeline_figure(found), lead=_TIME_LEAD),
        *_spread_card(found),
        *_curve_cards(found),
        _broken_card(found),
        _states_card(found),
        _sources_card(found),
    ]
    return document(f"Goodput of {file.name}", cards)


def _verdict_card(found: Goodput) -> Card:
    notes = [*found.warnings] if found.complete else ["Stopped before the last run.", *found.warnings]
    alerts = "".join(f"<li>{escape(note)}</li>" for note in notes)
    alerts = f'<ul class="alerts">{alerts}</ul>' if notes else ""
    rows = (Cells(row) for row in facts(found))
    return Card(
        f'<section class="card verdict" aria-label="how long it takes"><h1>{escape(headline(found))}</h1>'
        f'<p class="subject">{escape(subject(found))}</p>{table(("", "", ""), rows, words=(2,))}{alerts}</section>'
    )


def loss_figure(found: Goodput) -> Figure:
    """A waterfall from the ideal to the whole: days, each bar behind the one before it."""
    rows = losses(found)
    names = ["without failures", *(words for words, _, _ in rows)]
    lengths = [found.ideal / DAY, *(seconds / DAY for _, seconds, _ in rows)]
    bases = [0.0, *np.cumsum(lengths)[:-1].tolist()]
    by_words = {words: name for name, words in LOSSES.items()}
    colours = [_WORK, *(_COLOURS[by_words[words]] for words, _, _ in rows)]
    told = [f"{length:.1f} d" for length in lengths[:1]] + [
        f"{format_seconds(seconds)}, {part:.1%}" for _, seconds, part in rows
    ]
    trace = {
        "type": "bar", "orientation": "h", "x": lengths, "base": bases, "y": names, "text": told,
        "textposition": "auto", "marker": {"color": colours}, "cliponaxis": False,
        "hovertemplate": "%{y}: %{text}<extra></extra>",
    }  # fmt: skip
    return Figure(
        name="losses",
        traces=[trace],
        layout=layout(
            xaxis=axis("days", range=[0.0, 1.15 * sum(lengths)]),
            yaxis=axis("", autorange="reversed", fixedrange=True, ticksuffix="  "),
            dragmode=False,
        ),
        height=90 + 30 * len(names),
        narrow={"font": {"size": 9}},
    )


def timeline_figure(found: Goodput) -> Figure:
    """What one run's time went into, from day to day."""
    groups: dict[str, list[Piece]] = {}
    for piece in found.timeline:
        groups.setdefault(piece.what, []).append(piece)
    traces: Traces = [_pieces(what, groups[what]) for what in sorted(groups, key=_order)]
    whole = max((piece.end for piece in found.timeline), default=DAY) / DAY
    return Figure(
        name="timeline",
        traces=traces,
        layout=layout(
            showlegend=True,
            legend=legend(),
            xaxis=axis("day", range=[0.0, min(_FIRST, whole)]),
            yaxis=axis("", categoryorder="array", categoryarray=[*reversed(_ROWS)], fixedrange=True, ticksuffix="  "),
        ),
        height=260,
        narrow={"legend": {"font": {"size": 9}}},
    )


def _order(what: str) -> tuple[int, str]:
    return ([*LOSSES].index(what) if what in LOSSES else -1, what)


def _pieces(what: str, pieces: Sequence[Piece]) -> dict[str, Any]:
    row = "lost" if what == "lost_work" else "down" if what in LOSSES else "up"
    colour = _COLOURS.get(what, _WORK if what == "healthy" else _SLOW)
    return {
        "type": "bar", "orientation": "h", "name": LOSSES.get(what, what), "y": [row] * len(pieces),
        "base": typed([piece.begin / DAY for piece in pieces]),
        "x": typed([(piece.end - piece.begin) / DAY for piece in pieces]),
        "customdata": [[format_seconds(piece.end - piece.begin), escape(piece.cause)] for piece in pieces],
        "hovertemplate": "%{customdata[0]} %{customdata[1]}<extra>" + escape(LOSSES.get(what, what)) + "</extra>",
        "marker": {"color": colour, "line": {"width": 0}},
    }  # fmt: skip


def _spread_card(found: Goodput) -> Iterable[Card]:
    if len(found.runs) < 2:
        return
    days = [run.wall / DAY for run in found.runs]
    figure = Figure(
        name="spread",
        traces=[
            {"type": "histogram", "x": typed(days), "nbinsx": 50, "marker": {"color": _WORK},
             "hovertemplate": "%{x} days: %{y} runs<extra></extra>"},
        ],
        layout=layout(xaxis=axis("days"), yaxis=axis("runs", rangemode="tozero"), dragmode=False,
                      shapes=[_line(found.ideal / DAY)], annotations=[_note(found.ideal / DAY, "nothing breaks")]),
        height=260,
        narrow={"font": {"size": 9}},
    )  # fmt: skip
    yield figure_card("How sure are the days?", figure, lead=_SPREAD_LEAD, caption=_sure(found))


def _sure(found: Goodput) -> str:
    days, (low, high) = found.days, found.step_band
    words = f"p10 {days['p10']:.1f}, p50 {days['p50']:.1f}, p90 {days['p90']:.1f}, mean {days['mean']:.1f} days"
    cost = money_words(found)
    band = f"{format_step_time(low)} to {format_step_time(high)}"
    return (
        f"{words}{f'; {cost}' if cost else ''}. The step itself is expected between {band}, which moves all of it in "
        "proportion and is not in these figures."
    )


def _line(at: float) -> dict[str, Any]:
    return {"type": "line", "x0": at, "x1": at, "yref": "paper", "y0": 0, "y1": 1,
            "line": {"color": "@muted", "width": 1, "dash": "dot"}}  # fmt: skip


def _note(at: float, words: str, *, high: float = 1.0) -> dict[str, Any]:
    return {"x": at, "y": high, "yref": "paper", "text": words, "showarrow": False, "xanchor": "left",
            "yanchor": "top", "font": {"size": 11, "color": "@muted"}}  # fmt: skip


def _curve_cards(found: Goodput) -> Iterable[Card]:
    if found.intervals:
        yield figure_card("How often checkpoints?", interval_figure(found), lead=_EVERY_LEAD)
    if len(found.spares) > 1:
        yield figure_card("How many spares?", spares_figure(found), lead=_SPARES_LEAD)


def interval_figure(found: Goodput) -> Figure:
    """Days over the time between checkpoints, with the one that is run, and those of formulas."""
    every = found.checkpoint
    marks = [(every.interval, "as run", 1.0), (every.young, "Young", 0.85), (every.daly, "Daly", 0.7)]
    marks = [mark for mark in marks if 0.0 < mark[0] < float("inf")]
    return Figure(
        name="intervals",
        traces=[
            _curve(found.intervals, 60.0, [point.days for point in found.intervals], "%{x:.3g} min: %{y:.1f} days")
        ],
        layout=layout(
            xaxis=axis("minutes of work between checkpoints", type="log"),
            yaxis=axis("days, mean"),
            dragmode=False,
            shapes=[_line(at / 60.0) for at, _, _ in marks],
            annotations=[_note(float(np.log10(at / 60.0)), words, high=high) for at, words, high in marks],
        ),
        height=280,
        narrow={"font": {"size": 9}},
    )


def spares_figure(found: Goodput) -> Figure:
    """Goodput of all nodes over the number of spares."""
    goodput = [100.0 * point.goodput for point in found.spares]
    return Figure(
        name="spares",
        traces=[_curve(found.spares, 1.0, goodput, "%{x} spares: %{y:.1f} %")],
        layout=layout(
            xaxis=axis("spare nodes"),
            yaxis=axis("goodput of all nodes [%]"),
            dragmode=False,
            shapes=[_line(found.spare_nodes)],
            annotations=[_note(found.spare_nodes, "as run")],
        ),
        height=280,
        narrow={"font": {"size": 9}},
    )


def _curve(points: Sequence[Point], size: float, values: Sequence[float], words: str) -> dict[str, Any]:
    return {
        "type": "scatter", "mode": "lines+markers", "x": [point.value / size for point in points], "y": [*values],
        "line": {"color": _WORK, "width": 2}, "marker": {"size": 6}, "hovertemplate": words + "<extra></extra>",
    }  # fmt: skip


def _what_if_card(found: Goodput) -> Iterable[Card]:
    if not found.changes:
        return
    rows = (Cells((each.words, f"{each.days:.1f}", f"{each.days - each.before:+.1f}")) for each in found.changes)
    lead = "The same runs with one thing changed; the interval between checkpoints follows unless it is said."
    yield Card(section("What if?", table(("with", "days, mean", "difference"), rows), lead=lead))


def _broken_card(found: Goodput) -> Card:
    rows = (
        Cells((name, f"{many:,.2f}", escape(found.sources.get(f"failures.{name}.rate", ""))))
        for name, many in found.failures.items()
    )
    return Card(section("What breaks", table(("kind", "in a run", "its rate is from"), rows, words=(2,))))


def _states_card(found: Goodput) -> Card:
    rows = [
        Cells((name, "–" if step is None else format_step_time(step), f"{share:.2%}"))
        for name, (step, share) in found.states.items()
    ]
    down = 1.0 - sum(share for _, share in found.states.values())
    rows.append(Cells(("down", "", f"{down:.2%}"), "sum"))
    lead = (
        "Every state of the cluster that occurs was simulated once; shares are of the wall time, checkpoints among it."
    )
    return Card(section("States of the cluster", table(("state", "step", "share of the time"), rows), lead=lead))


def _sources_card(found: Goodput) -> Card:
    rows = (
        Cells((name, words))
        for name, words in found.sources.items()
        if not name.startswith("failures.") or ".rate" not in name
    )
    what = f"Preset {found.preset}: {found.description}."
    return Card(section("Where the figures are from", table(("value", "source"), rows, words=(1,)), lead=what))
