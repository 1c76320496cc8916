"""How accurate are predictions?

A page of predictions against measurements: all cases on log axes, errors by factor.

Input are plain values, so that this package does not depend on how cases are read, grouped or predicted.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from html import escape
from typing import Final, NamedTuple

from clustersim.common.units import format_bytes, format_number, format_seconds
from clustersim.report.draw.charts import PlotlyDict, line_trace, marker_trace, xy_figure
from clustersim.report.figure import Figure, Traces, axis_layout, wrap_label
from clustersim.report.html_document import html_document, render_panel
from clustersim.report.row_selection import group_by
from clustersim.report.theme import SERIES_COLOURS

ERROR_BAND: Final = 0.1  # relative half-width of the shaded band around the identity line
_SYMBOLS: Final = ("circle", "square", "diamond", "triangle-up", "cross", "x", "pentagon", "star")
_MAX_FACTOR_VALUES: Final = 14  # maximum number of values of a factor; rarer values are merged into one more
_VALUE_PIXELS: Final = 36
_FEW_DECADES: Final = 2.5
_OTHERS_LABEL: Final = "all others"


@dataclass(frozen=True, slots=True)
class ValidationPoint:
    """A case with its prediction, both in seconds or bytes.

    factors: value of each factor by which errors are grouped.

    interval: prediction interval, None if not known.
    """

    case_id: str
    source: str
    measured: float
    predicted: float
    factors: Mapping[str, str]
    interval: tuple[float, float] | None = None

    @property
    def relative_error(self) -> float:
        """Relative error: predicted over measured, minus one."""
        return self.predicted / self.measured - 1.0


class TextTable(NamedTuple):
    """A table of texts. headers: of all columns; rows: name and cells of each row; total_rows: rows below them."""

    headers: Sequence[str]
    rows: Sequence[Sequence[str]]
    total_rows: Sequence[Sequence[str]] = ()


@dataclass(frozen=True, slots=True)
class ValidationSection:
    """All cases of one kind. unit: `s`, `B` or none; skipped: case ids by reason; notes: sentences below the table.

    interval_coverage: share of cases inside their prediction interval by stratum, None if not known.
    """

    title: str
    unit: str
    cases: tuple[ValidationPoint, ...]
    sources: TextTable
    skipped: Mapping[str, tuple[str, ...]]
    notes: tuple[str, ...] = ()
    interval_coverage: TextTable | None = None


def validation_page(title: str, sections: Sequence[ValidationSection], layout_ranking: TextTable | None = None) -> str:
    """The page as HTML; layout_ranking: how well the fastest layout is chosen, if there are sets of layouts."""
    shown = [
        (
            section,
            scatter_figure(section, f"scatter{index}") if section.cases else None,
            factor_figure(section.cases, f"factor{index}") if any(point.factors for point in section.cases) else None,
        )
        for index, section in enumerate(sections)
    ]
    figures = [figure for _, *section_figures in shown for figure in section_figures if figure is not None]
    return html_document(
        title, [render_panel("validation.html", *figures, title=title, sections=shown, layouts=layout_ranking)]
    )


def scatter_figure(section: ValidationSection, name: str) -> Figure:
    """Predicted against measured on log axes."""
    unit_size = 2.0**30 if section.unit == "B" else 1.0
    values = [value / unit_size for point in section.cases for value in (point.measured, point.predicted)]
    lower, upper = 0.7 * min(values), 1.4 * max(values)
    ticks = _log_ticks(lower, upper)
    tick_options = {"tickvals": ticks, "ticktext": [_format_quantity(tick * unit_size, section.unit) for tick in ticks]}
    scale: PlotlyDict = {"type": "log", "range": [math.log10(lower), math.log10(upper)], **tick_options}
    traces, narrow = (
        [*_identity_traces(lower, upper), *_source_traces(section, unit_size)],
        {"height": 520, "legend": {"font": {"size": 9}}},
    )
    return xy_figure(
        name, traces, axis_layout("measured", **scale), axis_layout("predicted", **scale), height=680, narrow=narrow
    )


def _log_ticks(lower: float, upper: float) -> list[float]:
    """Powers of ten, with 2 and 5 in between if there are few.

    >>> _log_ticks(0.02, 30.0), _log_ticks(0.7, 3.0)
    ([0.1, 1.0, 10.0], [1.0, 2.0])
    """
    low, high = math.floor(math.log10(lower)), math.ceil(math.log10(upper))
    steps = (1, 2, 5) if math.log10(upper / lower) < _FEW_DECADES else (1,)
    ticks = [float(f"{step}e{power}") for power in range(low, high + 1) for step in steps]
    return [tick for tick in ticks if lower <= tick <= upper]


def _identity_traces(lower: float, upper: float) -> Traces:
    """Band of 10 % error, and the identity line."""
    ends = [lower * (1 - ERROR_BAND), upper * (1 - ERROR_BAND), upper * (1 + ERROR_BAND), lower * (1 + ERROR_BAND)]
    return [
        line_trace([lower, upper, upper, lower], ends, {"width": 0}, fill="toself", fillcolor="@track"),
        line_trace([lower, upper], [lower, upper], {"width": 1, "color": "@muted"}),
    ]


def _source_traces(section: ValidationSection, unit_size: float) -> Traces:
    """One colour and symbol for each source; sources with most cases first, so that they are drawn below the others."""
    groups = group_by(section.cases, lambda point: point.source)
    return [
        marker_trace(
            escape(source or "no source"),
            [point.measured / unit_size for point in cases],
            [point.predicted / unit_size for point in cases],
            {
                "color": SERIES_COLOURS[index % len(SERIES_COLOURS)],
                "symbol": _SYMBOLS[index % len(_SYMBOLS)],
                "size": 8,
                "opacity": 0.8,
                "line": {"width": 0.5, "color": "@surface"},
            },
            text=[hover_text(point, section.unit) for point in cases],
            hovertemplate="%{text}<extra></extra>",
        )
        for index, (source, cases) in enumerate(sorted(groups.items(), key=lambda group: -len(group[1])))
    ]


def hover_text(point: ValidationPoint, unit: str) -> str:
    """Hover text of a case."""
    measured, predicted = (_format_quantity(value, unit) for value in (point.measured, point.predicted))
    header = [f"<b>{wrap_label(point.case_id, 60)}</b>", f"measured {measured}, predicted {predicted}"]
    factors = [f"{escape(name)}: {escape(value)}" for name, value in point.factors.items()]
    interval_text = " to ".join(_format_quantity(value, unit) for value in point.interval or ())
    return "<br>".join(
        [
            *header,
            f"error {point.relative_error:+.1%}",
            *([f"expected {interval_text}"] if interval_text else []),
            *factors,
        ]
    )


def _format_quantity(value: float, unit: str) -> str:
    if not unit:
        return format_number(value)
    return format_bytes(value) if unit == "B" else format_seconds(float(f"{value:.4g}"))


def factor_figure(points: Sequence[ValidationPoint], name: str) -> Figure:
    """Box plots of the errors by the values of a factor that the reader selects."""
    factors = dict.fromkeys(factor for point in points for factor in point.factors)
    groups = {factor: _points_by_value(points, factor) for factor in factors}
    row_count = max(len(values) for values in groups.values())
    band_shape = {
        "type": "rect", "layer": "below", "xref": "x", "yref": "paper", "x0": -100 * ERROR_BAND, "x1": 100 * ERROR_BAND,
        "y0": 0, "y1": 1, "fillcolor": "@track", "line": {"width": 0},
    }  # fmt: skip
    x = axis_layout("predicted over measured, less one", ticksuffix=" %", zeroline=True, zerolinecolor="@muted")
    y = axis_layout("", type="category", autorange="reversed", ticksuffix="  ", fixedrange=True)
    height, narrow = 110 + _VALUE_PIXELS * row_count, {"yaxis": {"tickfont": {"size": 9}}}
    figure = xy_figure(name, [], x, y, height=height, narrow=narrow, showlegend=False, shapes=[band_shape], boxgap=0.35)
    return replace(figure, choices=tuple((factor, _box_traces(values)) for factor, values in groups.items()))


def _points_by_value(points: Sequence[ValidationPoint], factor: str) -> dict[str, list[ValidationPoint]]:
    """Cases by their value of a factor, most frequent values first, rare values merged."""
    groups = group_by((point for point in points if factor in point.factors), lambda point: point.factors[factor])
    ordered = sorted(groups, key=lambda value: (-len(groups[value]), value))
    has_rare_values = len(ordered) > _MAX_FACTOR_VALUES + 1
    frequent, rare = (ordered[:_MAX_FACTOR_VALUES], ordered[_MAX_FACTOR_VALUES:]) if has_rare_values else (ordered, [])
    rare_points = [point for value in rare for point in groups[value]]
    return {value: groups[value] for value in frequent} | ({_OTHERS_LABEL: rare_points} if rare_points else {})


def _box_traces(values: Mapping[str, Sequence[ValidationPoint]]) -> Traces:
    return [
        {
            "type": "box", "orientation": "h", "boxpoints": "all", "jitter": 0.6, "pointpos": 0, "name": "",
            "x": [100 * point.relative_error for point in points], "y": [f"{escape(value)} "
                                                                         f"({len(points):,})"] * len(points),
            "text": [f"{escape(point.case_id)}<br>{escape(point.source)}: "
                     f"{point.relative_error:+.1%}" for point in points],
            "hovertemplate": "%{text}<extra></extra>", "hoveron": "points",
            "marker": {"color": "@accent", "size": 4, "opacity": 0.5}, "line": {"color": "@ink", "width": 1},
            "fillcolor": "rgba(0,0,0,0)",
        }
        for value, points in values.items()
    ]  # fmt: skip
