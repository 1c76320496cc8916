"""How does the step time scale? Figures of the steps that were simulated beforehand for the explorer page."""

from collections.abc import Callable, Iterable, Sequence
from html import escape
from math import log10
from typing import Final

from clustersim.common.units import format_bytes, format_number, format_step_time
from clustersim.report.draw.charts import PlotlyDict, bar_figure, bar_trace, xy_figure
from clustersim.report.figure import Figure, axis_layout, time_scale
from clustersim.results.explorer_tables import ScalingPoint, ScalingStudy

_LINE_STYLES: Final = {
    "weak": ("#0072B2", "circle", "solid", "bottom"),
    "strong": ("#D55E00", "square", "dash", "top"),
}
_LABEL_MARGIN: Final = 1.6  # axis length relative to the longest bar, for its label
_POINT_MARGIN: Final = 0.15  # next to the outer points, relative to their distance
_NARROW_PIXELS: Final = 230  # length of the axis on a small screen
_LETTER_PIXELS: Final = 6  # of a label there
_MIN_BAR_SHARE: Final = 0.2  # of the axis, for the longest bar


def step_figures(studies: Sequence[ScalingStudy]) -> dict[str, Figure]:
    """Weak and strong scaling as lines, layouts and ZeRO stages as bars, by title; empty without studies."""
    if not studies:
        return {}
    scaling = [study for study in studies if study.name in _LINE_STYLES]
    scale = time_scale(max((point.step_time for study in scaling for point in _simulated_points(study)), default=1.0))
    rate, time = "Tokens per second and GPU", f"step time [{scale.unit}]"
    bar_figures = {
        f"{rate}, by {study.title}": _rate_bars(study) for study in studies if study.name not in _LINE_STYLES
    }
    return {
        rate: _scaling_figure("explorer-rates", scaling, "tokens/s/GPU", lambda point: point.tokens_per_gpu),
        "Step time": _scaling_figure("explorer-times", scaling, time, lambda point: point.step_time / scale.unit_size),
        **bar_figures,
    }


def _simulated_points(study: ScalingStudy) -> list[ScalingPoint]:
    return [point for point in study.points if not point.missing_reason]


def _scaling_figure(
    name: str, studies: Sequence[ScalingStudy], axis_title: str, value: Callable[[ScalingPoint], float]
) -> Figure:
    sizes = sorted({point.gpus for study in studies for point in _simulated_points(study)})
    ticks = {"tickvals": sizes, "ticktext": [f"{size:,}" for size in sizes]}
    x = axis_layout("GPUs", type="log", fixedrange=True, range=_padded_log_range(sizes), **ticks)
    y, narrow = axis_layout(axis_title, rangemode="tozero", fixedrange=True), {"legend": {"font": {"size": 10}}}
    return xy_figure(
        name, [_scaling_trace(study, value) for study in studies], x, y, height=300, narrow=narrow, dragmode=False
    )


def _padded_log_range(sizes: Sequence[int]) -> list[float]:
    """Range of a logarithmic axis with space next to the outer points, for their labels."""
    first, last = (log10(size) for size in (sizes[0], sizes[-1]))
    margin = _POINT_MARGIN * (last - first) or 1.0
    return [first - margin, last + margin]


def _scaling_trace(study: ScalingStudy, value: Callable[[ScalingPoint], float]) -> PlotlyDict:
    """Scaling study over GPU count; open crosses are steps that exceed memory."""
    colour, symbol, dash, label_side = _LINE_STYLES[study.name]
    points = _simulated_points(study)
    return {
        "type": "scatter", "mode": "lines+markers+text", "name": study.title,
        "x": [point.gpus for point in points], "y": [value(point) for point in points],
        "text": ["" if point.fits else "does not fit" for point in points], "textposition": f"{label_side} center",
        "textfont": {"size": 10, "color": "@alarm"}, "cliponaxis": False,
        "line": {"color": colour, "width": 2, "dash": dash},
        "marker": {"size": 9, "color": colour, "symbol": [symbol if point.fits else "x-open" for point in points]},
        "customdata": [_hover_text(point) for point in points], "hovertemplate": "%{customdata}<extra></extra>",
    }  # fmt: skip


def _hover_text(point: ScalingPoint) -> str:
    fits = "fits" if point.fits else "does not fit"
    return (
        f"<b>{point.gpus:,} GPUs, {escape(point.label)}</b><br>{format_step_time(point.step_time)} a step, "
        f"{format_number(point.tokens_per_gpu)} tokens/s/GPU<br>{format_bytes(point.peak_memory)}: {fits}"
    )


def _rate_bars(study: ScalingStudy) -> Figure:
    """Tokens per second and GPU of each point; hatched if it exceeds memory."""
    points = _simulated_points(study)
    marker = {
        "color": ["#0072B2" if point.fits else "#BFC6CD" for point in points],
        "line": {"width": 1, "color": "@muted"},
        "pattern": {"shape": ["" if point.fits else "/" for point in points], "size": 7, "solidity": 0.2},
    }
    trace = bar_trace(
        "", [escape(point.label) for point in points], [point.tokens_per_gpu for point in points], marker,
        text=[_bar_label(point) for point in points], textposition="outside", cliponaxis=False,
        customdata=[_hover_text(point) for point in points], hovertemplate="%{customdata}<extra></extra>",
    )  # fmt: skip
    max_rate = max(point.tokens_per_gpu for point in points)
    return bar_figure(
        f"explorer-{study.name}",
        [trace],
        axis_layout("tokens/s/GPU", range=[0, _LABEL_MARGIN * max_rate]),
        height=70 + 28 * max(4, len(points)),
        narrow={
            "font": {"size": 10},
            "xaxis": {"nticks": 4, "range": [0, max_rate * _narrow_length(map(_bar_label, points))]},
            "yaxis": {"tickfont": {"size": 10}},
        },
        bargap=0.25,
    )


def _narrow_length(labels: Iterable[str]) -> float:
    """Length of a small screen's axis relative to the longest bar, so that all labels have space next to it."""
    return 1.0 / max(_MIN_BAR_SHARE, 1.0 - max(map(len, labels)) * _LETTER_PIXELS / _NARROW_PIXELS)


def _bar_label(point: ScalingPoint) -> str:
    labels = (
        format_number(point.tokens_per_gpu),
        *["the scenario"] * point.is_baseline,
        *["does not fit"] * (not point.fits),
    )
    return ", ".join(labels)
