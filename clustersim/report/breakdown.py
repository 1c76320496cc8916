"""Where does the step's time go? Parts, each from where the last one ends, up to the step time; and every stage.

The first part, computation, is in two where it can be: what the model's FLOP take at the peak, and what kernels need
more.
Wide bars are the mean over ranks; thin ones below them are the critical path, whose parts sum to the step time, too.
"""

from dataclasses import dataclass
from html import escape
from typing import Final

from clustersim.analysis.losses import BELOW_PEAK
from clustersim.arrays import FloatArray
from clustersim.report.figure import (
    Figure,
    Traces,
    axis,
    layout,
    legend,
    marker,
    share_words,
    short_labels,
    time_scale,
    typed,
    wrapped,
)
from clustersim.report.rows import Bars, bars, height_of, narrow_height
from clustersim.report.theme import Category
from clustersim.report.view import Breakdown, Row
from clustersim.units import Seconds, format_seconds, format_step_time

THIN: Final = "thin: the critical path"
IDEAL: Final = "ideal: model FLOP at the peak"
_WIDE: Final = 0.62  # of a row
_THIN: Final = 0.12


@dataclass(frozen=True, slots=True)
class Fall:
    """One row of the waterfall. path: seconds on the critical path, from path_start; None: not told apart there."""

    name: str
    category: Category
    start: Seconds
    seconds: Seconds
    path_start: Seconds
    path: Seconds | None


def falls(breakdown: Breakdown) -> list[Fall]:
    """The rows of the waterfall, which sum to the step time; so do those of the critical path."""
    parts, ideal = breakdown.present, breakdown.ideal
    rows: list[Fall] = []
    start = path = 0.0
    for part in parts.tolist():
        name, look = breakdown.labels[part], breakdown.categories[part]
        seconds, on_path = float(breakdown.step[part]), float(breakdown.path[part])
        if part == 0 and ideal:
            rows.append(Fall(IDEAL, look, 0.0, ideal, 0.0, None))
            start, seconds, name = ideal, seconds - ideal, BELOW_PEAK
        rows.append(Fall(name, look, start, seconds, path, on_path))
        start, path = start + seconds, path + on_path
    return rows


def waterfall(breakdown: Breakdown) -> Figure:
    """For each part a bar and a thin one, each starting where the last one ended; the last bar is the whole step."""
    rows = falls(breakdown)
    total = float(breakdown.step.sum())
    scale = time_scale(total)
    wide = [_part_bar(row, total, scale.size) for row in rows]
    paths = [_path_bar(row, row.path, scale.size) for row in rows if row.path is not None]
    if paths:
        paths[0] |= {"name": THIN, "showlegend": True}
    reach = total / scale.size
    return Figure(
        name="waterfall",
        traces=[*wide, *paths, _total_bar(total, scale.size)],
        layout=layout(
            showlegend=True,
            legend=legend(),
            xaxis=axis(f"time [{scale.unit}]", range=[0, reach * 1.3 if reach else 1], fixedrange=True),
            yaxis=axis("", autorange="reversed", fixedrange=True, ticksuffix="  "),
            dragmode=False,
            bargap=0.28,
        ),
        height=70 + 34 * (len(rows) + 1),
        narrow={
            "font": {"size": 10},
            "xaxis": {"range": [0, reach * 1.9 if reach else 1]},
            "yaxis": _wrapped([row.name for row in rows]),
        },
    )


def stage_bars(breakdown: Breakdown, rows: tuple[Row, ...]) -> Bars:
    """The whole step of every stage: neighbours that are alike share a bar."""
    titles, short = [row.title for row in rows], [row.short for row in rows]
    return bars(titles, short, breakdown.stages, float(breakdown.step.sum()))


def stage_breakdown(breakdown: Breakdown, drawn: Bars) -> Figure:
    """One stacked bar for each stage, or for several that are alike, every bar as long as the step."""
    total = float(breakdown.step.sum())
    scale = time_scale(total)
    labels = [escape(label) for label in drawn.labels]
    traces, height = _stage_traces(breakdown, drawn.values, labels, scale.size), height_of(len(labels))
    return Figure(
        name="stages",
        traces=traces,
        layout=layout(
            barmode="stack",
            showlegend=True,
            legend=legend(traceorder="normal"),
            xaxis=axis(f"time [{scale.unit}]", range=[0, total / scale.size or 1], fixedrange=True),
            yaxis=axis("", autorange="reversed", fixedrange=True, type="category", ticksuffix=" "),
            dragmode=False,
            bargap=0.22,
        ),
        height=height,
        narrow={**short_labels(labels, drawn.lines), "height": narrow_height(height, len(traces))},
    )


def _wrapped(labels: list[str]) -> dict[str, object]:
    """Tick labels in short lines, for small screens."""
    return {
        "tickmode": "array",
        "tickvals": list(range(len(labels) + 1)),
        "ticktext": [*map(wrapped, labels), "<b>step</b>"],
        "tickfont": {"size": 10},
    }


def _part_bar(row: Fall, total: Seconds, size: float) -> dict[str, object]:
    share = row.seconds / total
    name = escape(row.name)
    return {
        "type": "bar",
        "orientation": "h",
        "name": name,
        "y": [name],
        "x": [row.seconds / size],
        "base": [row.start / size],
        "text": [f"{format_seconds(row.seconds)} · {share_words(share)}"],
        "textposition": "outside",
        "cliponaxis": False,
        "hovertemplate": f"<b>{name}</b><br>{format_seconds(row.seconds)}, {share:.2%} of the step<extra></extra>",
        "showlegend": False,
        "marker": marker(row.category),
        "width": _WIDE,
        "offset": -0.4,
    }


def _path_bar(row: Fall, seconds: Seconds, size: float) -> dict[str, object]:
    name = "computation" if row.name == BELOW_PEAK else escape(row.name)
    words = f"<b>{name}</b> on the critical path<br>{format_seconds(seconds)}<extra></extra>"
    return {
        "type": "bar",
        "orientation": "h",
        "name": f"{name} on the critical path",
        "y": [escape(row.name)],
        "x": [seconds / size],
        "base": [row.path_start / size],
        "hovertemplate": words,
        "legendgroup": "path",
        "showlegend": False,
        "marker": {"color": "@ink", "opacity": 0.55},
        "width": _THIN,
        "offset": _WIDE - 0.4 + 0.03,
    }


def _total_bar(total: float, size: float) -> dict[str, object]:
    return {
        "type": "bar",
        "orientation": "h",
        "name": "step",
        "y": ["<b>step</b>"],
        "x": [total / size],
        "text": [f"<b>{format_step_time(total)}</b>"],
        "textposition": "outside",
        "hoverinfo": "skip",
        "showlegend": False,
        "marker": {"color": "@ink"},
    }


def _stage_traces(breakdown: Breakdown, stages: FloatArray, labels: list[str], size: float) -> Traces:
    """stages: [bars, parts] seconds."""
    traces: Traces = []
    for part in breakdown.present:
        seconds = stages[:, part]
        name = escape(breakdown.labels[part])
        traces.append(
            {
                "type": "bar",
                "orientation": "h",
                "name": name,
                "x": typed(seconds / size),
                "y": labels,
                "customdata": [format_seconds(float(value)) for value in seconds],
                "hovertemplate": f"<b>%{{y}}</b><br>{name}: %{{customdata}}<extra></extra>",
                "marker": marker(breakdown.categories[part]),
            }
        )
    return traces
