"""How are rows of bars drawn, and what stands beside them? One house style for every page.

Whatever has two axes is a `plot`. Rows of bars are a `chart`: bars lie, one row for each label from the top, and it
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
    axis,
    layout,
    legend,
    marker,
    short_labels,
    typed,
    wrapped,
)
from clustersim.report.row_selection import Bars, height_of, narrow_height
from clustersim.report.theme import Category

Drawn = dict[str, Any]
Columns = Mapping[int, tuple[str, Category]]
"""Parts of a row by their columns: name and look."""


def bar(name: str, y: Any, x: Any, look: Mapping[str, Any], **more: Any) -> Drawn:
    """Bars of one name. y: where they are; x: how long they are; look: plotly's `marker`."""
    return {"type": "bar", "orientation": "h", "name": name, "y": y, "x": x, "marker": look, **more}


def points(name: str, x: Any, y: Any, look: Mapping[str, Any], **more: Any) -> Drawn:
    """Marks of one name. look: plotly's `marker`."""
    return {"type": "scatter", "mode": "markers", "name": name, "x": x, "y": y, "marker": look, **more}


def lines(x: Any, y: Any, look: Mapping[str, Any], **more: Any) -> Drawn:
    """A line without a name. look: plotly's `line`."""
    common = {"type": "scatter", "mode": "lines", "hoverinfo": "skip", "showlegend": False}
    return {**common, "x": x, "y": y, "line": look, **more}


def words_in(x: Any, y: Any, text: Sequence[str], **more: Any) -> Drawn:
    """Words to the right of places in a figure."""
    common = {"type": "scatter", "mode": "text", "textposition": "middle right", "hoverinfo": "skip"}
    return {**common, "x": x, "y": y, "text": text, **more}


def plot(
    name: str, traces: Traces, x: Drawn, y: Drawn, *, height: int, narrow: Mapping[str, Any], **more: Any
) -> Figure:
    """A figure over two axes, with a legend if `showlegend` is not false."""
    named = {"legend": legend()} if more.setdefault("showlegend", True) else {}
    return Figure(name, traces, layout(**{"xaxis": x, "yaxis": y, **named, **more}), height, narrow)


def chart(
    name: str, traces: Traces, x: Drawn, *, height: int, narrow: Mapping[str, Any], stacked: str = "", **more: Any
) -> Figure:
    """Rows of bars. x: their axis; stacked: plotly's barmode where bars of a row follow each other."""
    named = {"barmode": stacked, "legend": legend(traceorder="normal")} if stacked else {"showlegend": False}
    rows = axis("", autorange="reversed", fixedrange=True, type="category", ticksuffix="  ")
    plain = {"dragmode": False, **named, **more}
    return plot(name, traces, {**x, "fixedrange": True}, rows, height=height, narrow=narrow, **plain)


def stacked(
    name: str, rows: Bars, parts: Columns, x: Drawn, *, size: float, told: Callable[[float], str], **more: Any
) -> Figure:
    """A bar of parts for each row. size: of a unit of x; told: what a value is in words."""
    labels, values = [escape(label) for label in rows.labels], rows.values[:, list(parts)]
    traces = in_parts(labels, [*parts.values()], values, size, [map(told, column) for column in values.T.tolist()])
    height = height_of(len(labels))
    narrow = {**short_labels(labels, rows.lines), "height": narrow_height(height, len(traces))}
    return chart(name, traces, x, height=height, narrow=narrow, stacked="stack", **more, bargap=0.22)


def in_parts(
    labels: Sequence[str], parts: Sequence[tuple[str, Category]], values: FloatArray, size: float, told: Sequence[Any]
) -> Traces:
    """A trace for each part. labels: [rows]; values: [rows, parts]; size: of a unit; told: [parts] words of rows."""
    return [
        bar(
            escape(name), labels, typed(values[:, place] / size), marker(look), customdata=list(told[place]),
            hovertemplate=f"<b>%{{y}}</b><br>{escape(name)}: %{{customdata}}<extra></extra>",
        )
        for place, (name, look) in enumerate(parts)
    ]  # fmt: skip


def placed(name: str, y: float, start: FloatArray, end: FloatArray, look: Mapping[str, Any], **more: Any) -> Drawn:
    """Bars in one row of numbers, each from where to where."""
    return bar(
        escape(name), typed(np.full(len(start), y)), typed(end - start), look, base=typed(start),
        hovertemplate="%{hovertext}<extra></extra>", **more,
    )  # fmt: skip


def diamond(colour: str, edge: float) -> Drawn:
    """A mark that stands out among bars."""
    return {"symbol": "diamond", "size": 11, "color": colour, "line": {"width": edge, "color": SURFACE}}


def ticks(values: Sequence[Any], words: Sequence[str], **more: Any) -> Drawn:
    """What an axis has instead of numbers."""
    return {"tickmode": "array", "tickvals": values, "ticktext": words, **more}


def in_lines(labels: Sequence[Any], names: Sequence[str], **more: Any) -> Drawn:
    """The same in short lines, for small screens."""
    return ticks(labels, [wrapped(name) for name in names], **more)


def level(along: str, at: float, look: Mapping[str, Any], **more: Any) -> Drawn:
    """A line across the figure. along: the axis on which `at` is; look: plotly's `line`."""
    across = "y" if along == "x" else "x"
    return {
        "type": "line", f"{along}0": at, f"{along}1": at, f"{across}0": 0, f"{across}1": 1, f"{across}ref": "paper",
        "line": look, **more,
    }  # fmt: skip


def note(text: str, x: Any, y: Any, colour: str = MUTED, **more: Any) -> Drawn:
    """Words beside what is drawn."""
    return {"text": text, "x": x, "y": y, "showarrow": False, "font": {"size": 11, "color": colour}, **more}


def reach(ends: ArrayLike, room: float) -> list[float]:
    """An axis from the longest bar to the left to the longest to the right; room: of the longest, beside both."""
    found = np.append(0.0, ends)
    beside = room * float(np.abs(found).max()) or 1.0
    return [float(found.min()) - beside, float(found.max()) + beside]
