"""Where does the step's time go? Parts, each from where the last one ends, up to the step time; and every stage.

The first part, computation, is in two where it can be: what the model's FLOP take at the peak, and what kernels need
more.
Wide bars are the mean over ranks; thin ones below them are the critical path, whose parts sum to the step time, too.
"""

from collections.abc import Iterator
from html import escape
from itertools import accumulate
from typing import Final

from clustersim.common.units import Seconds, format_seconds, format_step_time
from clustersim.report.draw.charts import PlotlyDict, bar_figure, bar_trace, stacked_bar_figure, wrapped_tick_labels
from clustersim.report.figure import Figure, axis_layout, bar_marker, format_share, time_scale
from clustersim.report.html_document import Panel, figure_panel, render_panel, render_text
from clustersim.report.legend_markup import category_markup
from clustersim.report.row_selection import merge_bars
from clustersim.report.step_breakdown import StepBreakdown
from clustersim.report.theme import TIME_CATEGORY_STYLES, CategoryStyle
from clustersim.report.timeline_data import PipelineTimeline
from clustersim.results.simulation_result import SimulationResult
from clustersim.results.time_categories import TIME_CATEGORIES
from clustersim.results.time_losses import BELOW_PEAK

CRITICAL_PATH_LEGEND: Final = "thin: the critical path"
IDEAL_LABEL: Final = "ideal: model FLOP at the peak"
_BAR_WIDTH: Final = 0.62  # of a row
_PATH_BAR_WIDTH: Final = 0.12


def breakdown_panel(result: SimulationResult, breakdown: StepBreakdown) -> Panel:
    """Where the time goes, drawn and in numbers; what is called ideal, or why there is none."""
    return render_panel(
        "parts.html",
        figure=waterfall_figure(breakdown),
        result=result,
        times=breakdown,
        ideal=IDEAL_LABEL,
        below_peak=BELOW_PEAK,
        part_name=category_markup,
    )


def stages_panel(breakdown: StepBreakdown, timeline: PipelineTimeline) -> Panel:
    """The whole step of every row: neighbours that are alike share a bar."""
    rows, scale = timeline.rows, time_scale(breakdown.step_seconds)
    merged_bars = merge_bars(
        [row.title for row in rows], [row.short for row in rows], breakdown.row_seconds, breakdown.step_seconds
    )
    figure = stacked_bar_figure(
        "stages", merged_bars, {category.index: (category.value, TIME_CATEGORY_STYLES[category]) for category in breakdown.nonzero_categories},
        axis_layout(f"time [{scale.unit}]", range=[0, breakdown.step_seconds / scale.unit_size or 1]), unit_size=scale.unit_size, format_value=format_seconds,
    )  # fmt: skip
    lead = render_text("stages", row=timeline.row_type) + merged_bars.merge_note("the step")
    return figure_panel(f"Each {timeline.row_type}", figure, lead=lead, caption=timeline.row_note)


WaterfallRow = tuple[str, CategoryStyle, Seconds, Seconds]
"""A row of the waterfall: name, look, seconds, and seconds on the critical path."""


def waterfall_rows(breakdown: StepBreakdown) -> Iterator[WaterfallRow]:
    """The rows of the waterfall, which sum to the step time; so do those of the critical path."""
    for category in breakdown.nonzero_categories:
        style, seconds, path_seconds = (
            TIME_CATEGORY_STYLES[category],
            float(breakdown.mean_seconds[category.index]),
            float(breakdown.critical_path_seconds[category.index]),
        )
        if category is TIME_CATEGORIES[0] and breakdown.ideal_seconds:
            yield IDEAL_LABEL, style, breakdown.ideal_seconds, 0.0  # on the critical path it is not told apart
            yield BELOW_PEAK, style, seconds - breakdown.ideal_seconds, path_seconds
        else:
            yield category.value, style, seconds, path_seconds


def waterfall_figure(breakdown: StepBreakdown) -> Figure:
    """For each part a bar and a thin one, each starting where the last one ended; the last bar is the whole step."""
    rows, step_seconds, scale = (
        list(waterfall_rows(breakdown)),
        breakdown.step_seconds,
        time_scale(breakdown.step_seconds),
    )
    starts = accumulate((seconds for _, _, seconds, _ in rows), initial=0.0)
    mean_bars = [_mean_bar(row, start, step_seconds, scale.unit_size) for row, start in zip(rows, starts, strict=False)]
    starts = accumulate((path_seconds for *_, path_seconds in rows), initial=0.0)
    path_rows = zip(rows, starts, strict=False)
    path_bars = [_path_bar(row, start, scale.unit_size) for row, start in path_rows if row[0] != IDEAL_LABEL]
    if path_bars:
        path_bars[0] |= {"name": CRITICAL_PATH_LEGEND, "showlegend": True}
    step_bar = bar_trace(
        "step", ["<b>step</b>"], [step_seconds / scale.unit_size], {"color": "@ink"}, hoverinfo="skip", showlegend=False,
        text=[f"<b>{format_step_time(step_seconds)}</b>"], textposition="outside",
    )  # fmt: skip
    axis_end = step_seconds / scale.unit_size
    positions, names = list(range(len(rows) + 1)), [name for name, *_ in rows]
    narrow_ticks = wrapped_tick_labels(positions[:-1], names, tickfont={"size": 10})
    narrow = {**narrow_ticks, "tickvals": positions, "ticktext": [*narrow_ticks["ticktext"], "<b>step</b>"]}
    return bar_figure(
        "waterfall", [*mean_bars, *path_bars, step_bar], axis_layout(f"time [{scale.unit}]", range=[0, axis_end * 1.3 if axis_end else 1]),
        height=70 + 34 * (len(rows) + 1),
        narrow={"font": {"size": 10}, "xaxis": {"range": [0, axis_end * 1.9 if axis_end else 1]}, "yaxis": narrow},
        showlegend=True, bargap=0.28,
    )  # fmt: skip


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
    name = "computation" if label == BELOW_PEAK else escape(label)
    return bar_trace(
        f"{name} on the critical path", [escape(label)], [seconds / unit_size], {"color": "@ink", "opacity": 0.55},
        base=[start / unit_size], width=_PATH_BAR_WIDTH, offset=_BAR_WIDTH - 0.4 + 0.03, legendgroup="path", showlegend=False,
        hovertemplate=f"<b>{name}</b> on the critical path<br>{format_seconds(seconds)}<extra></extra>",
    )  # fmt: skip
