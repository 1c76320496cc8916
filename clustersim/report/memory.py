"""What does each stage hold, and when is it most? Peaks of all stages, and one stage over time, with the capacity."""

from html import escape
from typing import Any

import numpy as np
from numpy.typing import NDArray

from clustersim.arrays import FloatArray, IntArray
from clustersim.report.figure import (
    Figure,
    Traces,
    axis,
    layout,
    legend,
    marker,
    packed,
    short_labels,
    time_scale,
    typed,
)
from clustersim.report.keys import Cells, table
from clustersim.report.rows import Bars, bars, height_of, narrow_height, shown_rows
from clustersim.report.view import Memory, StageMemory
from clustersim.units import Bytes, format_bytes

_GIB = 2.0**30
_MOST_MOMENTS = 1500


def peak_figure(memory: Memory) -> Figure:
    """What every pipeline rank holds at its own peak, by category, and the capacity line."""
    drawn = peak_bars(memory)
    labels, peaks = [escape(label) for label in drawn.labels], drawn.values
    most = max(memory.capacity, float(peaks.sum(axis=1).max(initial=0.0))) / _GIB
    traces, height = _peak_traces(memory, labels, peaks), height_of(len(labels))
    return Figure(
        name="peaks",
        traces=traces,
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
        height=height,
        narrow={**short_labels(labels, drawn.lines), "height": narrow_height(height, len(traces))},
    )


def peak_bars(memory: Memory) -> Bars:
    """What every pipeline rank holds at its own peak: neighbours that are alike share a bar."""
    peaks = np.array([stage.held[:, stage.peak] for stage in memory.stages])
    labels, short = [stage.label for stage in memory.stages], [stage.short for stage in memory.stages]
    return bars(labels, short, peaks, memory.capacity)


def experts_table(memory: Memory) -> str:
    """What experts take and all other weights, of every pipeline rank; empty where there are no experts."""
    rows = [
        Cells((each.label, *_weights(each.experts), *_weights(each.others)))
        for each in memory.stages
        if each.experts is not None
    ]
    heads = ("parameters, gradients and states", "of experts", "take", "of all else", "take")
    return table(heads, rows) if rows else ""


def _weights(held: tuple[float, Bytes]) -> tuple[str, str]:
    count, size = held
    return f"{count / 1e9:,.3f} billion", format_bytes(size)


def memory_figure(memory: Memory, step_time: float) -> Figure:
    """One stage over time, stacked by category; the reader chooses the stage, the fullest comes first."""
    scale = time_scale(step_time)
    most = max([memory.capacity, *(float(stage.held.sum(axis=0).max()) for stage in memory.stages)]) / _GIB
    stages = [memory.stages[stage] for stage in stages_by_peak(memory)]
    times, held, facts = _columns(stages)
    return Figure(
        name="memory",
        traces=[],
        choices=tuple((stage.label, []) for stage in stages),
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
        behaviour="memory",
        arrays={"time": packed(times), "held": packed(held)},
        facts={"stages": facts, "looks": _looks(memory), "end": step_time, "size": scale.size, "gib": _GIB},
    )


def _columns(stages: list[StageMemory]) -> tuple[NDArray[np.float32], NDArray[np.float32], list[dict[str, Any]]]:
    """Moments and bytes of all stages, one after the other, and for each stage where they are.

    Of a category that holds the same at all times only the amount is kept.
    """
    times: list[FloatArray] = [np.zeros(0)]
    held: list[FloatArray] = [np.zeros(0)]
    facts, first, at = [], 0, 0
    for stage in stages:
        moments = _moments(stage)
        amounts: list[float | dict[str, int]] = []
        for row in stage.held[:, moments]:
            if np.ptp(row) == 0:
                amounts.append(float(row[0]))
                continue
            amounts.append({"first": at})
            held.append(row)
            at += len(row)
        facts.append({"first": first, "moments": len(moments), "held": amounts})
        times.append(stage.times[moments])
        first += len(moments)
    return np.concatenate(times).astype(np.float32), np.concatenate(held).astype(np.float32), facts


def _looks(memory: Memory) -> list[dict[str, str]]:
    return [
        {"label": escape(label), "colour": category.colour, "pattern": category.pattern}
        for label, category in zip(memory.labels, memory.categories, strict=True)
    ]


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


def _moments(stage: StageMemory) -> IntArray:
    """Moments to draw: all, or in each of many bins the fullest, so that no peak is lost."""
    if len(stage.times) <= _MOST_MOMENTS:
        return np.arange(len(stage.times))
    first = np.linspace(0, len(stage.times), _MOST_MOMENTS, endpoint=False).astype(np.int64)
    total = stage.held.sum(axis=0)
    ends = np.append(first[1:], len(total))
    return np.array([low + int(total[low:high].argmax()) for low, high in zip(first, ends, strict=True)])
