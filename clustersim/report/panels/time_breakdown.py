"""Where does the step time go? A waterfall of time categories up to the step time, and every stage.

Computation, the first category, is split in three: the time of the model's FLOP at peak, the excess of matmuls and
attention over it, and memory-bound kernels.
Wide bars are the mean over ranks; thin ones below them are the critical path, whose categories also sum to
the step time.
"""

from collections.abc import Iterator
from html import escape
from itertools import accumulate
from typing import Final

from clustersim.common.units import Seconds, format_seconds, format_step_time
from clustersim.report.draw.charts import (
    PlotlyDict,
    bar_figure,
    bar_trace,
    stacked_bar_figure,
    wrapped_row_pixels,
    wrapped_tick_labels,
)
from clustersim.report.figure import Figure, axis_layout, bar_marker, format_share, time_scale
from clustersim.report.html_document import Panel, figure_panel, render_panel, render_text
from clustersim.report.legend_markup import category_markup
from clustersim.report.row_selection import merge_bars
from clustersim.report.step_breakdown import StepBreakdown
from clustersim.report.theme import TIME_CATEGORY_STYLES, CategoryStyle
from clustersim.report.timeline_data import PipelineTimeline
from clustersim.results.simulation_result import SimulationResult
from clustersim.results.time_categories import TIME_CATEGORIES
from clustersim.results.time_losses import COMPUTE_LOSSES

CRITICAL_PATH_LEGEND: Final = "thin: the critical path"
_BAR_WIDTH: Final = 0.62  # relative to the row height
_PATH_BAR_WIDTH: Final = 0.12


def breakdown_panel(result: SimulationResult, breakdown: StepBreakdown) -> Panel:
    """Panel of the time breakdown, as figure and table, with the definition of the ideal step."""
    return render_panel(
        "parts.html",
        figure=waterfall_figure(breakdown),
        result=result,
        times=breakdown,
        part_name=category_markup,
    )


def stages_panel(breakdown: StepBreakdown, timeline: PipelineTimeline) -> Panel:
    """Panel of the whole step of every row; rows within tolerance share a bar."""
    rows, scale = timeline.rows, time_scale(breakdown.step_seconds)
    merged_bars = merge_bars(
        [row.title for row in rows], [row.short for row in rows], breakdown.row_seconds, breakdown.step_seconds
    )
    figure = stacked_bar_figure(
        "stages",
        merged_bars,
        {category.index: (category.value, TIME_CATEGORY_STYLES[category]) for category in breakdown.nonzero_categories},
        axis_layout(f"time [{scale.unit}]", range=[0, breakdown.step_seconds / scale.unit_size or 1]),
        unit_size=scale.unit_size,
        format_value=format_seconds,
    )
    lead = render_text("stages", row=timeline.row_type) + merged_bars.merge_note("the step")
    return figure_panel(f"Each {timeline.row_type}", figure, lead=lead, caption=timeline.row_note)


WaterfallRow = tuple[str, CategoryStyle, Seconds, Seconds]
"""Row of the waterfall: label, style, mean seconds, and seconds on the critical path."""


def waterfall_rows(breakdown: StepBreakdown) -> Iterator[WaterfallRow]:
    """Rows of the waterfall; both their means and their critical-path seconds sum to the step time."""
    for category in breakdown.nonzero_categories:
        style, seconds, path_seconds = (
            TIME_CATEGORY_STYLES[category],
            float(breakdown.mean_seconds[category.index]),
            float(breakdown.critical_path_seconds[category.index]),
        )
        if category is TIME_CATEGORIES[0] and breakdown.compute_parts:
            *first_parts, (last_name, last_seconds) = breakdown.compute_parts.items()
            yield from ((name, style, part_seconds, 0.0) for name, part_seconds in first_parts)
            yield last_name, style, last_seconds, path_seconds  # the critical path does not distinguish parts
        else:
            yield category.value, style, seconds, path_seconds


def waterfall_figure(breakdown: StepBreakdown) -> Figure:
    """For each row a wide and a thin bar, each starting where the previous one ended; the last bar is the step time."""
    rows, step_seconds, scale = (
        list(waterfall_rows(breakdown)),
        breakdown.step_seconds,
        time_scale(breakdown.step_seconds),
    )
    starts = accumulate((seconds for _, _, seconds, _ in rows), initial=0.0)
    mean_bars = [_mean_bar(row, start, step_seconds, scale.unit_size) for row, start in zip(rows, starts, strict=False)]
    starts = accumulate((path_seconds for *_, path_seconds in rows), initial=0.0)
    path_rows = zip(rows, starts, strict=False)
    undistinguished = list(breakdown.compute_parts)[:-1]
    path_bars = [_path_bar(row, start, scale.unit_size) for row, start in path_rows if row[0] not in undistinguished]
    if path_bars:
        path_bars[0] |= {"name": CRITICAL_PATH_LEGEND, "showlegend": True}
    step_bar = bar_trace(
        "step",
        ["<b>step</b>"],
        [step_seconds / scale.unit_size],
        {"color": "@ink"},
        hoverinfo="skip",
        showlegend=False,
        text=[f"<b>{format_step_time(step_seconds)}</b>"],
        textposition="outside",
    )
    axis_end = step_seconds / scale.unit_size
    positions, names = list(range(len(rows) + 1)), [name for name, *_ in rows]
    narrow_ticks = wrapped_tick_labels(positions[:-1], names, tickfont={"size": 10})
    narrow = {**narrow_ticks, "tickvals": positions, "ticktext": [*narrow_ticks["ticktext"], "<b>step</b>"]}
    return bar_figure(
        "waterfall",
        [*mean_bars, *path_bars, step_bar],
        axis_layout(f"time [{scale.unit}]", range=[0, axis_end * 1.3 if axis_end else 1]),
        height=70 + 34 * (len(rows) + 1),
        narrow={
            "height": 70 + wrapped_row_pixels(names) * (len(rows) + 1),
            "font": {"size": 10},
            "xaxis": {"range": [0, axis_end * 1.9 if axis_end else 1]},
            "yaxis": narrow,
        },
        showlegend=True,
        bargap=0.28,
    )


def _mean_bar(row: WaterfallRow, start: Seconds, total: Seconds, unit_size: float) -> PlotlyDict:
    (label, style, seconds, _), share = row, row[2] / total
    name = escape(label)
    return bar_trace(
        name, [name], [seconds / unit_size], bar_marker(style), base=[start / unit_size],
        text=[f"{format_seconds(seconds)} · {format_share(share)}"], textposition="outside", cliponaxis=False,
        hovertemplate=f"<b>{name}</b><br>{format_seconds(seconds)}, {share:.2%} of the step<extra></extra>",
        showlegend=False, width=_BAR_WIDTH, offset=-0.4,
    )  # fmt: skip


def _path_bar(row: WaterfallRow, start: Seconds, unit_size: float) -> PlotlyDict:
    label, _, _, seconds = row
    name = "computation" if label == COMPUTE_LOSSES[-1].value else escape(label)
    return bar_trace(
        f"{name} on the critical path",
        [escape(label)],
        [seconds / unit_size],
        {"color": "@ink", "opacity": 0.55},
        base=[start / unit_size],
        width=_PATH_BAR_WIDTH,
        offset=_BAR_WIDTH - 0.4 + 0.03,
        legendgroup="path",
        showlegend=False,
        hovertemplate=f"<b>{name}</b> on the critical path<br>{format_seconds(seconds)}<extra></extra>",
    )
