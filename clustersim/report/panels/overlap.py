"""How much communication is hidden behind computation? A bar for each stage and mesh axis, and the totals.

Each bar covers the time in which the rank computes or the axis communicates: computation without
communication of the axis, overlapped, exposed communication, and communication during other idle time.
Hatched segments do not add to the step time.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape
from typing import Final

import numpy as np

from clustersim.common.arrays import FloatArray
from clustersim.common.units import format_seconds
from clustersim.parallel.mesh import COMM_AXES
from clustersim.report.draw.charts import PlotlyDict, bar_trace, text_trace, tick_labels, xy_figure
from clustersim.report.figure import (
    MUTED,
    SURFACE,
    Figure,
    axis_layout,
    bar_marker,
    encode_floats,
    legend_layout,
    time_scale,
)
from clustersim.report.html_document import Panel, render_panel
from clustersim.report.labels import PipelineRowLabels, pipeline_row_labels
from clustersim.report.legend_markup import axis_markup, non_breaking
from clustersim.report.row_selection import MergedBars, merge_bars, narrow_height
from clustersim.report.theme import AXIS_STYLES, CategoryStyle
from clustersim.results.comm_overlap import AxisOverlap, compute_overlap
from clustersim.results.simulation_result import SimulationResult

_COMPUTE_ONLY: Final = "compute only"
_ROUNDING: Final = 1e-9  # relative to the step time
_ROW_FILL: Final = 0.84  # share of a row that its bars fill


@dataclass(frozen=True, slots=True)
class StageOverlapView:
    """Overlap of stages, the mean over the ranks of each. total: [1, axes] mean over all ranks."""

    overlap: AxisOverlap
    total: AxisOverlap
    names: PipelineRowLabels

    @property
    def active_axes(self) -> list[int]:
        """Indices into COMM_AXES of the axes that communicate."""
        active: list[int] = np.flatnonzero(self.overlap.transfer_time.max(axis=0) > 0).tolist()
        return active

    @property
    def merged_bars(self) -> MergedBars:
        """Seconds of every stage, axis and kind; rows within tolerance are merged."""
        overlap = self.overlap
        seconds = np.concatenate((overlap.no_overlap, overlap.hidden, overlap.exposed, overlap.during_idle), axis=1)
        return merge_bars(self.names.labels, self.names.short, seconds, overlap.step_time)


def build_overlap(result: SimulationResult) -> StageOverlapView | None:
    """Overlap of communication with computation on every stage; None without communication."""
    by_rank = compute_overlap(result.trace_table, result.cost.time_segment, result.breakdown)
    if by_rank.transfer_time.max(initial=0.0) <= 0:
        return None
    program_index = result.program.program_index[result.trace_table.ranks]
    mean, total = (
        by_rank.group_mean(program_index, result.trace_table.weights),
        by_rank.group_mean(np.zeros_like(program_index), result.trace_table.weights),
    )
    return StageOverlapView(mean, total, pipeline_row_labels(result.scenario, len(mean.no_overlap)))


def overlap_panel(stages: StageOverlapView) -> Panel:
    """Panel of the bars, and for each axis its communication time and hidden share, the mean over ranks."""
    return render_panel(
        "overlap.html",
        figure=overlap_figure(stages),
        stages=stages,
        bars=stages.merged_bars,
        axes=COMM_AXES,
        axis_name=axis_markup,
        unbroken=non_breaking,
    )


def overlap_figure(stages: StageOverlapView) -> Figure:
    """Stacked bars, one for each axis of each stage or of several merged stages."""
    bars, axes = stages.merged_bars, stages.active_axes
    row_count = len(bars.labels)
    seconds = bars.values.reshape(row_count, 4, -1)[:, :, axes]
    ends = seconds[:, 0] + seconds[:, 1:].sum(axis=1)
    axis_end = float(ends.max(initial=0.0))
    scale = time_scale(axis_end)
    seconds = np.where(seconds > _ROUNDING * stages.overlap.step_time, seconds, 0.0)
    traces = [*_overlap_bars(bars.labels, axes, seconds, scale.unit_size), _axis_labels(axes, ends / scale.unit_size)]
    row_pixels = max(12 * len(axes), min(14 + 12 * len(axes), 1200 // max(1, row_count)))
    height = 130 + row_pixels * row_count
    row_ticks = tick_labels(
        list(range(row_count)), [escape(label) + "  " for label in bars.labels], range=[row_count - 0.5, -0.5]
    )
    x = axis_layout(f"time [{scale.unit}]", range=[0, 1.04 * axis_end / scale.unit_size or 1], fixedrange=True)
    y, legend_options = (
        axis_layout("", fixedrange=True, showgrid=False, **row_ticks),
        legend_layout(traceorder="normal"),
    )
    narrow = {
        "height": narrow_height(height, sum(trace.get("showlegend", True) for trace in traces)),
        "legend": {"font": {"size": 9}},
        "yaxis": {"ticktext": [f"{label} " for label in bars.wrapped_labels]},
    }
    return xy_figure("overlap", traces, x, y, height=height, narrow=narrow, legend=legend_options, dragmode=False)


def _overlap_bars(
    labels: Sequence[str], axes: list[int], seconds_by_kind: FloatArray, unit_size: float
) -> Iterator[PlotlyDict]:
    """Traces of each axis and kind with nonzero time.

    axes: indices into COMM_AXES; seconds_by_kind: [rows, kinds, axes] seconds; unit_size: size of the axis's
    unit.
    """
    starts = np.cumsum(np.insert(seconds_by_kind, 0, 0.0, axis=1), axis=1)
    for axis_index, axis_id in enumerate(axes):
        for kind, (name, marker) in enumerate(_overlap_styles(axis_id)):
            seconds = seconds_by_kind[:, kind, axis_index]
            hover = [
                f"<b>{escape(label)}</b>, {COMM_AXES[axis_id].name}<br>{name}: {format_seconds(duration)}"
                for label, duration in zip(labels, seconds.tolist(), strict=True)
            ]
            if seconds.any():
                yield bar_trace(
                    name,
                    encode_floats(_bar_centres(len(labels), axes)[axis_index]),
                    encode_floats(seconds / unit_size),
                    marker,
                    base=encode_floats(starts[:, kind, axis_index] / unit_size),
                    legendgroup=name,
                    showlegend=axis_index == 0 or name != _COMPUTE_ONLY,
                    width=0.9 * _ROW_FILL / len(axes),
                    hovertext=hover,
                    hovertemplate="%{hovertext}<extra></extra>",
                )


def _bar_centres(row_count: int, axes: list[int]) -> FloatArray:
    """Positions of the axes' bars: [axes, rows]."""
    offsets: FloatArray = _ROW_FILL * ((np.arange(len(axes)) + 0.5) / len(axes) - 0.5)
    return np.arange(row_count) + offsets[:, None]


def _axis_labels(axes: list[int], ends: FloatArray) -> PlotlyDict:
    """Name of the axis at the end of each bar."""
    names = [COMM_AXES[axis_id].name for axis_id in axes for _ in ends]
    options = {"textfont": {"size": 9, "color": MUTED}, "cliponaxis": False, "showlegend": False}
    return text_trace(
        encode_floats(ends.T.ravel()), encode_floats(_bar_centres(len(ends), axes).ravel()), names, **options
    )


def _overlap_styles(axis_id: int) -> Iterator[tuple[str, PlotlyDict]]:
    """Name and marker of each kind of time; computation only has one legend entry for all axes."""
    name, style = COMM_AXES[axis_id].name, AXIS_STYLES[COMM_AXES[axis_id]]
    yield _COMPUTE_ONLY, bar_marker(CategoryStyle.COMPUTE)
    yield f"{name} hidden", _patterned_marker(style, "/")
    yield f"{name} exposed", bar_marker(style)
    yield f"{name} during idle", _patterned_marker(style, ".")


def _patterned_marker(style: CategoryStyle, shape: str) -> PlotlyDict:
    """An axis's bar marker with a pattern that marks the kind of overlap."""
    pattern = {"shape": shape, "size": 6, "solidity": 0.35, "fgcolor": SURFACE, "bgcolor": style.colour}
    return {**bar_marker(style), "pattern": pattern}
