"""How are rows of bars drawn, and what stands beside them? One house style for every page.

Whatever has two axes is a `xy_figure`. Rows of bars are a `bar_figure`: bars lie, one row for each label from the top, and it
neither zooms nor pans.
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
"""Parts of a row by their columns: name and look."""


def bar_trace(name: str, y: Any, x: Any, marker: Mapping[str, Any], **extra: Any) -> PlotlyDict:
    """Bars of one name. y: where they are; x: how long they are; look: plotly's `bar_marker`."""
    return {"type": "bar", "orientation": "h", "name": name, "y": y, "x": x, "marker": marker, **extra}


def marker_trace(name: str, x: Any, y: Any, marker: Mapping[str, Any], **extra: Any) -> PlotlyDict:
    """Marks of one name. look: plotly's `bar_marker`."""
    return {"type": "scatter", "mode": "markers", "name": name, "x": x, "y": y, "marker": marker, **extra}


def line_trace(x: Any, y: Any, line: Mapping[str, Any], **extra: Any) -> PlotlyDict:
    """A line without a name. look: plotly's `line`."""
    defaults = {"type": "scatter", "mode": "lines", "hoverinfo": "skip", "showlegend": False}
    return {**defaults, "x": x, "y": y, "line": line, **extra}


def text_trace(x: Any, y: Any, text: Sequence[str], **extra: Any) -> PlotlyDict:
    """Words to the right of places in a figure."""
    defaults = {"type": "scatter", "mode": "text", "textposition": "middle right", "hoverinfo": "skip"}
    return {**defaults, "x": x, "y": y, "text": text, **extra}


def xy_figure(
    name: str, traces: Traces, x: PlotlyDict, y: PlotlyDict, *, height: int, narrow: Mapping[str, Any], **extra: Any
) -> Figure:
    """A figure over two axes, with a legend if `showlegend` is not false."""
    legend_options = {"legend": legend_layout()} if extra.setdefault("showlegend", True) else {}
    return Figure(name, traces, base_layout(**{"xaxis": x, "yaxis": y, **legend_options, **extra}), height, narrow)


def bar_figure(
    name: str, traces: Traces, x: PlotlyDict, *, height: int, narrow: Mapping[str, Any], barmode: str = "", **extra: Any
) -> Figure:
    """Rows of bars. x: their axis; stacked: plotly's barmode where bars of a row follow each other."""
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
    """A bar of parts for each row. size: of a unit of x; told: what a value is in words."""
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
    """A trace for each part. labels: [rows]; values: [rows, parts]; size: of a unit; told: [parts] words of rows."""
    return [
        bar_trace(
            escape(name), labels, encode_floats(values[:, index] / unit_size), bar_marker(style), customdata=list(hover_texts[index]),
            hovertemplate=f"<b>%{{y}}</b><br>{escape(name)}: %{{customdata}}<extra></extra>",
        )
        for index, (name, style) in enumerate(columns)
    ]  # fmt: skip


def interval_bars(
    name: str, y: float, start: FloatArray, end: FloatArray, marker: Mapping[str, Any], **extra: Any
) -> PlotlyDict:
    """Bars in one row of numbers, each from where to where."""
    return bar_trace(
        escape(name), encode_floats(np.full(len(start), y)), encode_floats(end - start), marker, base=encode_floats(start),
        hovertemplate="%{hovertext}<extra></extra>", **extra,
    )  # fmt: skip


def diamond_marker(colour: str, edge_width: float) -> PlotlyDict:
    """A mark that stands out among bars."""
    return {"symbol": "diamond", "size": 11, "color": colour, "line": {"width": edge_width, "color": SURFACE}}


def tick_labels(values: Sequence[Any], labels: Sequence[str], **extra: Any) -> PlotlyDict:
    """What an axis has instead of numbers."""
    return {"tickmode": "array", "tickvals": values, "ticktext": labels, **extra}


def wrapped_tick_labels(values: Sequence[Any], names: Sequence[str], **extra: Any) -> PlotlyDict:
    """The same in short lines, for small screens."""
    return tick_labels(values, [wrap_label(name) for name in names], **extra)


def reference_line(axis_letter: str, value: float, line: Mapping[str, Any], **extra: Any) -> PlotlyDict:
    """A line across the figure. along: the axis on which `at` is; look: plotly's `line`."""
    cross_axis = "y" if axis_letter == "x" else "x"
    return {
        "type": "line", f"{axis_letter}0": value, f"{axis_letter}1": value, f"{cross_axis}0": 0, f"{cross_axis}1": 1, f"{cross_axis}ref": "paper",
        "line": line, **extra,
    }  # fmt: skip


def annotation(text: str, x: Any, y: Any, colour: str = MUTED, **extra: Any) -> PlotlyDict:
    """Words beside what is drawn."""
    return {"text": text, "x": x, "y": y, "showarrow": False, "font": {"size": 11, "color": colour}, **extra}


def padded_range(ends: ArrayLike, margin_fraction: float) -> list[float]:
    """An axis from the longest bar to the left to the longest to the right; room: of the longest, beside both."""
    values = np.append(0.0, ends)
    margin = margin_fraction * float(np.abs(values).max()) or 1.0
    return [float(values.min()) - margin, float(values.max()) + margin]
