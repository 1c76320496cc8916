"""Is it true? A page that shows predictions beside measurements: all cases on log axes, and their errors by factor.

Rows come as plain values, so that this room needs to know nothing of how cases are read, grouped or predicted.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from html import escape
from typing import Final, NamedTuple

from clustersim.common.units import format_bytes, format_number, format_seconds
from clustersim.report.draw.charts import Drawn, lines, plot, points
from clustersim.report.figure import Figure, Traces, axis, wrapped
from clustersim.report.html_document import document, drawn
from clustersim.report.row_selection import grouped
from clustersim.report.theme import SERIES

BAND: Final = 0.1  # of the shaded band around the truth
_SYMBOLS: Final = ("circle", "square", "diamond", "triangle-up", "cross", "x", "pentagon", "star")
_MOST_VALUES: Final = 14  # of a factor; the rest is one more
_VALUE_PIXELS: Final = 36
_FEW_DECADES: Final = 2.5
_REST: Final = "all others"


@dataclass(frozen=True, slots=True)
class Point:
    """A case with its prediction, both in seconds or bytes. factors: by what errors are grouped, in words.

    expected: between what and what it is expected, None: that is not said.
    """

    case_id: str
    source: str
    measured: float
    predicted: float
    factors: Mapping[str, str]
    expected: tuple[float, float] | None = None

    @property
    def error(self) -> float:
        """Predicted over measured, less one."""
        return self.predicted / self.measured - 1.0


class Lines(NamedTuple):
    """A table. heads: of all columns; rows: names and their cells, in words; sums: the same, below the rows."""

    heads: Sequence[str]
    rows: Sequence[Sequence[str]]
    sums: Sequence[Sequence[str]] = ()


@dataclass(frozen=True, slots=True)
class Part:
    """All cases of one kind. unit: `s`, `B` or none; skipped: case ids by the reason; notes: sentences below the table.

    bands: how many lie where they are expected, by regime; None: that is not said.
    """

    title: str
    unit: str
    points: tuple[Point, ...]
    sources: Lines
    skipped: Mapping[str, tuple[str, ...]]
    notes: tuple[str, ...] = ()
    bands: Lines | None = None


def validation_page(title: str, parts: Sequence[Part], layouts: Lines | None = None) -> str:
    """The page as HTML text; layouts: how well the fastest layout is chosen, if there is anything to choose."""
    shown = [
        (
            part,
            scatter_figure(part, f"scatter{number}") if part.points else None,
            factor_figure(part.points, f"factor{number}") if any(point.factors for point in part.points) else None,
        )
        for number, part in enumerate(parts)
    ]
    figures = [figure for _, *both in shown for figure in both if figure is not None]
    return document(title, [drawn("validation.html", *figures, title=title, parts=shown, layouts=layouts)])


def scatter_figure(part: Part, name: str) -> Figure:
    """Predicted against measured on log axes."""
    size = 2.0**30 if part.unit == "B" else 1.0
    values = [value / size for point in part.points for value in (point.measured, point.predicted)]
    least, most = 0.7 * min(values), 1.4 * max(values)
    ticks = _ticks(least, most)
    words = {"tickvals": ticks, "ticktext": [_quantity(tick * size, part.unit) for tick in ticks]}
    scale: Drawn = {"type": "log", "range": [math.log10(least), math.log10(most)], **words}
    traces, narrow = [*_truth(least, most), *_sources(part, size)], {"height": 520, "legend": {"font": {"size": 9}}}
    return plot(name, traces, axis("measured", **scale), axis("predicted", **scale), height=680, narrow=narrow)


def _ticks(least: float, most: float) -> list[float]:
    """Powers of ten, and between them 2 and 5 where there are few.

    >>> _ticks(0.02, 30.0), _ticks(0.7, 3.0)
    ([0.1, 1.0, 10.0], [1.0, 2.0])
    """
    low, high = math.floor(math.log10(least)), math.ceil(math.log10(most))
    steps = (1, 2, 5) if math.log10(most / least) < _FEW_DECADES else (1,)
    ticks = [float(f"{step}e{power}") for power in range(low, high + 1) for step in steps]
    return [tick for tick in ticks if least <= tick <= most]


def _truth(least: float, most: float) -> Traces:
    """The band within 10 %, and the line on which a prediction is exact."""
    ends = [least * (1 - BAND), most * (1 - BAND), most * (1 + BAND), least * (1 + BAND)]
    return [
        lines([least, most, most, least], ends, {"width": 0}, fill="toself", fillcolor="@track"),
        lines([least, most], [least, most], {"width": 1, "color": "@muted"}),
    ]


def _sources(part: Part, size: float) -> Traces:
    """One colour and symbol for each source, those with most cases first and so below the others."""
    groups = grouped(part.points, lambda point: point.source)
    return [
        points(
            escape(source or "no source"), [point.measured / size for point in cases],
            [point.predicted / size for point in cases],
            {
                "color": SERIES[number % len(SERIES)], "symbol": _SYMBOLS[number % len(_SYMBOLS)], "size": 8,
                "opacity": 0.8, "line": {"width": 0.5, "color": "@surface"},
            },
            text=[hover(point, part.unit) for point in cases], hovertemplate="%{text}<extra></extra>",
        )
        for number, (source, cases) in enumerate(sorted(groups.items(), key=lambda group: -len(group[1])))
    ]  # fmt: skip


def hover(point: Point, unit: str) -> str:
    """What a mark says of its case."""
    measured, predicted = (_quantity(value, unit) for value in (point.measured, point.predicted))
    lines = [f"<b>{wrapped(point.case_id, 60)}</b>", f"measured {measured}, predicted {predicted}"]
    factors = [f"{escape(name)}: {escape(value)}" for name, value in point.factors.items()]
    ends = " to ".join(_quantity(value, unit) for value in point.expected or ())
    return "<br>".join([*lines, f"error {point.error:+.1%}", *([f"expected {ends}"] if ends else []), *factors])


def _quantity(value: float, unit: str) -> str:
    if not unit:
        return format_number(value)
    return format_bytes(value) if unit == "B" else format_seconds(float(f"{value:.4g}"))


def factor_figure(points: Sequence[Point], name: str) -> Figure:
    """The errors of all cases by the values of a factor, which the reader chooses."""
    factors = dict.fromkeys(factor for point in points for factor in point.factors)
    groups = {factor: _values(points, factor) for factor in factors}
    rows = max(len(values) for values in groups.values())
    zone = {
        "type": "rect", "layer": "below", "xref": "x", "yref": "paper", "x0": -100 * BAND, "x1": 100 * BAND,
        "y0": 0, "y1": 1, "fillcolor": "@track", "line": {"width": 0},
    }  # fmt: skip
    x = axis("predicted over measured, less one", ticksuffix=" %", zeroline=True, zerolinecolor="@muted")
    y = axis("", type="category", autorange="reversed", ticksuffix="  ", fixedrange=True)
    height, narrow = 110 + _VALUE_PIXELS * rows, {"yaxis": {"tickfont": {"size": 9}}}
    figure = plot(name, [], x, y, height=height, narrow=narrow, showlegend=False, shapes=[zone], boxgap=0.35)
    return replace(figure, choices=tuple((factor, _boxes(values)) for factor, values in groups.items()))


def _values(points: Sequence[Point], factor: str) -> dict[str, list[Point]]:
    """Cases by their value of a factor, values of most cases first, rare ones together."""
    groups = grouped((point for point in points if factor in point.factors), lambda point: point.factors[factor])
    ordered = sorted(groups, key=lambda value: (-len(groups[value]), value))
    many = len(ordered) > _MOST_VALUES + 1
    kept, rest = (ordered[:_MOST_VALUES], ordered[_MOST_VALUES:]) if many else (ordered, [])
    others = [point for value in rest for point in groups[value]]
    return {value: groups[value] for value in kept} | ({_REST: others} if others else {})


def _boxes(values: Mapping[str, Sequence[Point]]) -> Traces:
    return [
        {
            "type": "box", "orientation": "h", "boxpoints": "all", "jitter": 0.6, "pointpos": 0, "name": "",
            "x": [100 * point.error for point in points], "y": [f"{escape(value)} ({len(points):,})"] * len(points),
            "text": [f"{escape(point.case_id)}<br>{escape(point.source)}: {point.error:+.1%}" for point in points],
            "hovertemplate": "%{text}<extra></extra>", "hoveron": "points",
            "marker": {"color": "@accent", "size": 4, "opacity": 0.5}, "line": {"color": "@ink", "width": 1},
            "fillcolor": "rgba(0,0,0,0)",
        }
        for value, points in values.items()
    ]  # fmt: skip
