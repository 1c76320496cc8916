"""What does each stage hold, and when is it most? Peaks of all stages, and one stage over time, with the capacity."""

from html import escape

import numpy as np

from clustersim.report.figure import (
    Figure,
    Traces,
    axis,
    hatching,
    layout,
    legend,
    marker,
    short_labels,
    time_scale,
    typed,
)
from clustersim.report.rows import shown_rows
from clustersim.report.view import FloatArray, IntArray, Memory, StageMemory
from clustersim.units import format_bytes

_GIB = 2.0**30
_MOST_MOMENTS = 1500


def peak_figure(memory: Memory) -> Figure:
    """What every pipeline rank holds at its own peak, by category, and the capacity line."""
    shown = shown_rows(len(memory.stages))
    labels = [escape(memory.stages[row].label) for row in shown]
    peaks = np.array([memory.stages[row].held[:, memory.stages[row].peak] for row in shown])
    most = max(memory.capacity, float(peaks.sum(axis=1).max(initial=0.0))) / _GIB
    return Figure(
        name="peaks",
        traces=_peak_traces(memory, labels, peaks),
        layout=layout(
            barmode="stack",
            showlegend=True,
            legend=legend(traceorder="normal"),
            xaxis=axis("memory at the peak [GiB]", range=[0, most * 1.04], fixedrange=True),
            yaxis=axis("", autorange="reversed", fixedrange=True, type="category", ticksuffix=" "),
            shapes=[_capacity_line(memory, axis_of_bytes="x")],
            dragmode=False,
            bargap=0.22,
        ),
        height=130 + max(18, min(28, 1400 // max(1, len(shown)))) * len(shown),
        narrow=short_labels(labels, [escape(memory.stages[row].short) for row in shown]),
    )


def memory_figure(memory: Memory, step_time: float) -> Figure:
    """One stage over time, stacked by category; the reader chooses the stage, the fullest comes first."""
    scale = time_scale(step_time)
    chosen = stages_by_peak(memory)
    most = max([memory.capacity, *(float(stage.held.sum(axis=0).max()) for stage in memory.stages)]) / _GIB
    return Figure(
        name="memory",
        traces=[],
        choices=tuple(
            (memory.stages[stage].label, _stage_traces(memory, memory.stages[stage], step_time, scale.size))
            for stage in chosen
        ),
        layout=layout(
            showlegend=True,
            legend=legend(traceorder="normal"),
            hovermode="x unified",
            xaxis=axis(f"time [{scale.unit}]", range=[0, step_time / scale.size or 1], minallowed=0),
            yaxis=axis("memory held [GiB]", range=[0, most * 1.08], fixedrange=True),
            shapes=[_capacity_line(memory, axis_of_bytes="y")],
            annotations=[_capacity_words(memory)],
        ),
        height=400,
        narrow={"legend": {"font": {"size": 9}}},
    )


def stages_by_peak(memory: Memory) -> list[int]:
    """The shown stages in order, but the fullest first."""
    if not memory.stages:
        return []
    peaks = [float(stage.held[:, stage.peak].sum()) for stage in memory.stages]
    fullest = int(np.argmax(peaks))
    return [fullest, *(int(row) for row in shown_rows(len(memory.stages)) if row != fullest)]


def _capacity_line(memory: Memory, *, axis_of_bytes: str) -> dict[str, object]:
    other = "y" if axis_of_bytes == "x" else "x"
    at = memory.capacity / _GIB
    return {
        "type": "line",
        f"{axis_of_bytes}0": at,
        f"{axis_of_bytes}1": at,
        f"{axis_of_bytes}ref": axis_of_bytes,
        f"{other}0": 0,
        f"{other}1": 1,
        f"{other}ref": "paper",
        "line": {"color": "@alarm", "width": 2, "dash": "dash"},
    }


def _capacity_words(memory: Memory) -> dict[str, object]:
    return {
        "x": 1,
        "xref": "paper",
        "xanchor": "right",
        "y": memory.capacity / _GIB,
        "yanchor": "bottom",
        "text": f"capacity {format_bytes(memory.capacity)}",
        "showarrow": False,
        "font": {"size": 11, "color": "@alarm"},
    }


def _peak_traces(memory: Memory, labels: list[str], peaks: FloatArray) -> Traces:
    return [
        {
            "type": "bar",
            "orientation": "h",
            "name": escape(memory.labels[index]),
            "x": typed(peaks[:, index] / _GIB),
            "y": labels,
            "customdata": [format_bytes(float(value)) for value in peaks[:, index]],
            "hovertemplate": f"<b>%{{y}}</b><br>{escape(memory.labels[index])}: %{{customdata}}<extra></extra>",
            "marker": marker(category),
        }
        for index, category in enumerate(memory.categories)
        if len(peaks) and np.any(peaks[:, index])
    ]


def _stage_traces(memory: Memory, stage: StageMemory, step_time: float, size: float) -> Traces:
    moments = _moments(stage)
    times = np.append(stage.times[moments], max(step_time, float(stage.times[-1]))) / size
    traces: Traces = []
    for index, category in enumerate(memory.categories):
        held = stage.held[index, moments]
        if not np.any(held):
            continue
        traces.append(
            {
                "type": "scatter",
                "mode": "lines",
                "stackgroup": "held",
                "name": escape(memory.labels[index]),
                "x": typed(times),
                "y": typed(np.append(held, held[-1]) / _GIB),
                "line": {"shape": "hv", "width": 0.8, "color": category.colour},
                "fillcolor": category.colour,
                "fillpattern": {**hatching(category), "bgcolor": category.colour},
                "hovertemplate": "%{y:.2f} GiB",
            }
        )
    return traces


def _moments(stage: StageMemory) -> IntArray:
    """Moments to draw: all, or in each of many bins the fullest, so that no peak is lost."""
    if len(stage.times) <= _MOST_MOMENTS:
        return np.arange(len(stage.times))
    first = np.linspace(0, len(stage.times), _MOST_MOMENTS, endpoint=False).astype(np.int64)
    total = stage.held.sum(axis=0)
    ends = np.append(first[1:], len(total))
    return np.array([low + int(total[low:high].argmax()) for low, high in zip(first, ends, strict=True)])
