"""How are bar charts and other figures built? Plotly traces, axes and annotations in one style for every page.

`xy_figure` is any figure with two axes. `bar_figure` is a horizontal bar chart: one row for each label from
the top, without zoom or pan.
"""

from collections.abc import Callable, Mapping, Sequence
from html import escape
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from clustersim.common.arrays import FloatArray
from clustersim.report.figure import (
    MUTED,
    SURFACE,
    Figure,
    Traces,
    axis_layout,
    bar_marker,
    base_layout,
    encode_floats,
    legend_layout,
    narrow_labels,
    wrap_label,
)
from clustersim.report.row_selection import MergedBars, bar_chart_height, narrow_height
from clustersim.report.theme import CategoryStyle

PlotlyDict = dict[str, Any]
StackColumns = Mapping[int, tuple[str, CategoryStyle]]
"""Label and style of the stacked segments, by their column in the values."""


def bar_trace(name: str, y: Any, x: Any, marker: Mapping[str, Any], **extra: Any) -> PlotlyDict:
    """Horizontal bar trace. y: positions; x: lengths; marker: from `bar_marker`; extra: other trace properties."""
    return {"type": "bar", "orientation": "h", "name": name, "y": y, "x": x, "marker": marker, **extra}


def marker_trace(name: str, x: Any, y: Any, marker: Mapping[str, Any], **extra: Any) -> PlotlyDict:
    """Scatter trace of markers. marker: plotly's `bar_marker`; extra: further trace properties."""
    return {"type": "scatter", "mode": "markers", "name": name, "x": x, "y": y, "marker": marker, **extra}


def line_trace(x: Any, y: Any, line: Mapping[str, Any], **extra: Any) -> PlotlyDict:
    """Unnamed line trace without hover text. line: plotly's `line`; extra: further trace properties."""
    defaults = {"type": "scatter", "mode": "lines", "hoverinfo": "skip", "showlegend": False}
    return {**defaults, "x": x, "y": y, "line": line, **extra}


def text_trace(x: Any, y: Any, text: Sequence[str], **extra: Any) -> PlotlyDict:
    """Text trace: labels to the right of the points (x, y)."""
    defaults = {"type": "scatter", "mode": "text", "textposition": "middle right", "hoverinfo": "skip"}
    return {**defaults, "x": x, "y": y, "text": text, **extra}


def xy_figure(
    name: str, traces: Traces, x: PlotlyDict, y: PlotlyDict, *, height: int, narrow: Mapping[str, Any], **extra: Any
) -> Figure:
    """Figure with two axes; it has a legend unless `showlegend` is false. extra: further layout properties."""
    legend_options = {"legend": legend_layout()} if extra.setdefault("showlegend", True) else {}
    return Figure(name, traces, base_layout(**{"xaxis": x, "yaxis": y, **legend_options, **extra}), height, narrow)


def bar_figure(
    name: str, traces: Traces, x: PlotlyDict, *, height: int, narrow: Mapping[str, Any], barmode: str = "", **extra: Any
) -> Figure:
    """Horizontal bar chart.

    x: layout of the value axis; barmode: plotly's, if bars of one row are stacked or overlaid.
    """
    mode_options = (
        {"barmode": barmode, "legend": legend_layout(traceorder="normal")} if barmode else {"showlegend": False}
    )
    y = axis_layout("", autorange="reversed", fixedrange=True, type="category", ticksuffix="  ")
    options = {"dragmode": False, **mode_options, **extra}
    return xy_figure(name, traces, {**x, "fixedrange": True}, y, height=height, narrow=narrow, **options)


def stacked_bar_figure(
    name: str,
    bars: MergedBars,
    columns: StackColumns,
    x: PlotlyDict,
    *,
    unit_size: float,
    format_value: Callable[[float], str],
    **extra: Any,
) -> Figure:
    """Stacked bar chart: one bar for each row, one segment for each column.

    unit_size: size of the x axis's unit; format_value: text of a value in the hover box.
    """
    labels, values = [escape(label) for label in bars.labels], bars.values[:, list(columns)]
    traces = stacked_bar_traces(
        labels,
        [*columns.values()],
        values,
        unit_size,
        [map(format_value, column_values) for column_values in values.T.tolist()],
    )
    height = bar_chart_height(len(labels))
    narrow = {**narrow_labels(labels, bars.wrapped_labels), "height": narrow_height(height, len(traces))}
    return bar_figure(name, traces, x, height=height, narrow=narrow, barmode="stack", **extra, bargap=0.22)


def stacked_bar_traces(
    labels: Sequence[str],
    columns: Sequence[tuple[str, CategoryStyle]],
    values: FloatArray,
    unit_size: float,
    hover_texts: Sequence[Any],
) -> Traces:
    """One bar trace for each column of values.

    labels: [rows]; values: [rows, columns]; unit_size: size of the axis's unit; hover_texts: [columns] texts by
    row.
    """
    return [
        bar_trace(
            escape(name),
            labels,
            encode_floats(values[:, index] / unit_size),
            bar_marker(style),
            customdata=list(hover_texts[index]),
            hovertemplate=f"<b>%{{y}}</b><br>{escape(name)}: %{{customdata}}<extra></extra>",
        )
        for index, (name, style) in enumerate(columns)
    ]


def interval_bars(
    name: str, y: float, start: FloatArray, end: FloatArray, marker: Mapping[str, Any], **extra: Any
) -> PlotlyDict:
    """Bars in one row at height y, each from `start` to `end`."""
    return bar_trace(
        escape(name),
        encode_floats(np.full(len(start), y)),
        encode_floats(end - start),
        marker,
        base=encode_floats(start),
        hovertemplate="%{hovertext}<extra></extra>",
        **extra,
    )


def diamond_marker(colour: str, edge_width: float) -> PlotlyDict:
    """Diamond marker that stands out among bars."""
    return {"symbol": "diamond", "size": 11, "color": colour, "line": {"width": edge_width, "color": SURFACE}}


def tick_labels(values: Sequence[Any], labels: Sequence[str], **extra: Any) -> PlotlyDict:
    """Axis properties that label the given values instead of numbers."""
    return {"tickmode": "array", "tickvals": values, "ticktext": labels, **extra}


def wrapped_tick_labels(values: Sequence[Any], names: Sequence[str], **extra: Any) -> PlotlyDict:
    """The same with wrapped labels, for small screens."""
    return tick_labels(values, [wrap_label(name) for name in names], **extra)


def wrapped_row_pixels(names: Sequence[str]) -> int:
    """Row height in pixels of a bar chart whose wrapped labels do not touch each other."""
    return max(34, 8 + 13 * max((1 + wrap_label(name).count("<br>") for name in names), default=1))


def reference_line(axis_letter: str, value: float, line: Mapping[str, Any], **extra: Any) -> PlotlyDict:
    """Straight line across the figure. axis_letter: axis ("x" or "y") on which `value` lies; line: plotly's `line`."""
    cross_axis = "y" if axis_letter == "x" else "x"
    return {
        "type": "line",
        f"{axis_letter}0": value,
        f"{axis_letter}1": value,
        f"{cross_axis}0": 0,
        f"{cross_axis}1": 1,
        f"{cross_axis}ref": "paper",
        "line": line,
        **extra,
    }


def annotation(text: str, x: Any, y: Any, colour: str = MUTED, **extra: Any) -> PlotlyDict:
    """Text annotation without an arrow."""
    return {"text": text, "x": x, "y": y, "showarrow": False, "font": {"size": 11, "color": colour}, **extra}


def padded_range(ends: ArrayLike, margin_fraction: float) -> list[float]:
    """Axis range with 0 and all bar ends. margin_fraction: at both sides, relative to the longest bar."""
    values = np.append(0.0, ends)
    margin = margin_fraction * float(np.abs(values).max()) or 1.0
    return [float(values.min()) - margin, float(values.max()) + margin]
