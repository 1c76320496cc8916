"""Which page compares two results in detail? Key numbers, changed inputs, time categories, and both timelines.

The waterfall begins at A's step time and ends at B's; each category's bar begins where the previous one
ends. Both timelines share one time axis and zoom together (`assets/difference.js`).
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from clustersim.common.arrays import FloatArray
from clustersim.common.units import Seconds, format_signed_seconds, format_step_time
from clustersim.report import result_difference as labels
from clustersim.report.draw.charts import PlotlyDict, bar_figure, bar_trace, tick_labels, wrapped_tick_labels
from clustersim.report.draw.timeline_figure import timeline_caption, timeline_figure
from clustersim.report.figure import Figure, axis_layout, bar_marker, narrow_labels, time_scale
from clustersim.report.html_document import html_document, render_panel
from clustersim.report.legend_markup import category_markup
from clustersim.report.panels.difference_bars import category_change_figure
from clustersim.report.panels.what_if import what_if_panel
from clustersim.report.result_difference import ResultDifference
from clustersim.report.result_timeline import build_timeline
from clustersim.report.row_selection import bar_chart_height, sample_rows, select_ranks
from clustersim.report.theme import TIME_CATEGORY_STYLES
from clustersim.report.timeline_arrays import MAX_ARRAY_BYTES, build_drawing
from clustersim.report.timeline_data import PipelineTimeline

if TYPE_CHECKING:
    from clustersim.results.simulation_result import SimulationResult
    from clustersim.results.what_if import WhatIfReport


def difference_page(
    difference: ResultDifference, results: "Sequence[SimulationResult]", what_ifs: "WhatIfReport | None" = None
) -> str:
    """The page as HTML. what_ifs: simulated changes of B."""
    waterfall = difference_waterfall(difference) if difference.changed_categories else None
    stages = stages_figure(difference) if waterfall and len(difference.row_labels) > 1 else None
    timelines = list(_aligned_timelines([build_timeline(result, select_ranks(result)) for result in results]))
    panel = render_panel(
        "difference.html",
        *filter(None, (waterfall, stages, *(figure for figure, _ in timelines))),
        waterfall=waterfall,
        stages=stages,
        lanes=timelines,
        difference=difference,
        labels=labels,
        part_name=category_markup,
    )
    panels = [panel] if what_ifs is None else [panel, what_if_panel(what_ifs, "B")]
    return html_document(f"{difference.titles[0]} and {difference.titles[1]}", panels, scripts=("difference",))


def difference_waterfall(difference: ResultDifference) -> Figure:
    """A's step, a bar for every category that differs, each starting where the previous one ended, and B's step."""
    categories = difference.changed_categories
    deltas = [float(difference.mean_deltas[category.index]) for category in categories]
    first, second = map(float, difference.step_times)
    ends = first + np.cumsum([0.0, *deltas])
    scale = time_scale(max(first, second))
    bars = [
        bar_trace(
            category.value,
            [category.value],
            [delta / scale.unit_size],
            bar_marker(TIME_CATEGORY_STYLES[category]),
            base=[start / scale.unit_size],
            text=[format_signed_seconds(delta)],
            textposition="outside",
            cliponaxis=False,
            hovertemplate=f"<b>{category.value}</b><br>{format_signed_seconds(delta)} in B<extra></extra>",
        )
        for category, delta, start in zip(categories, deltas, ends[:-1].tolist(), strict=True)
    ]
    labels = ["<b>A</b>", *(category.value for category in categories), "<b>B</b>"]
    narrow_labels = wrapped_tick_labels(labels[1:-1], labels[1:-1])["ticktext"]
    return bar_figure(
        "difference-parts",
        [_step_bar("A", first, "@muted", scale.unit_size), *bars, _step_bar("B", second, "@ink", scale.unit_size)],
        axis_layout(f"step time [{scale.unit}]", range=_value_range(ends, scale.unit_size, 0.25)),
        height=70 + 34 * len(labels),
        narrow={
            "font": {"size": 10},
            "xaxis": {"range": _value_range(ends, scale.unit_size, 0.9)},
            "yaxis": tick_labels(labels, [labels[0], *narrow_labels, labels[-1]]),
        },
        bargap=0.28,
    )


def _value_range(ends: FloatArray, unit_size: float, margin_fraction: float) -> list[float]:
    """Axis range: the running sum with a margin for labels; not from zero if bars would be too small."""
    low, high = float(ends.min()) / unit_size, float(ends.max()) / unit_size
    span = high - low
    lower = low - max(0.35, margin_fraction) * span
    return [max(0.0, lower), high + margin_fraction * span] if lower > 0.0 else [0.0, high * (1.0 + margin_fraction)]


def _step_bar(name: str, seconds: Seconds, colour: str, unit_size: float) -> PlotlyDict:
    return bar_trace(
        f"step of {name}", [f"<b>{name}</b>"], [seconds / unit_size], {"color": colour}, hoverinfo="skip",
        text=[f"<b>{format_step_time(seconds)}</b>"], textposition="outside", cliponaxis=False,
    )  # fmt: skip


def stages_figure(difference: ResultDifference) -> Figure:
    """For each pipeline rank a bar in each direction: time categories that are longer and shorter in B."""
    shown_indices = sample_rows(len(difference.row_labels))
    labels, short = [difference.row_labels[row] for row in shown_indices], [str(row) for row in shown_indices]
    return category_change_figure(
        "difference-stages",
        labels,
        difference.row_deltas[shown_indices],
        "B - A",
        height=bar_chart_height(len(labels)),
        narrow=narrow_labels(labels, short),
    )


def _aligned_timelines(timelines: Sequence[PipelineTimeline]) -> Iterator[tuple[Figure, str]]:
    """Both timelines on the axis of the longer one, with captions; each may take half of a page's array bytes."""
    end_seconds = max(float(timeline.spans.end.max(initial=0.0)) for timeline in timelines)
    for name, timeline in zip(("timeline-a", "timeline-b"), timelines, strict=True):
        drawing = build_drawing(timeline, MAX_ARRAY_BYTES // 2)
        yield _with_time_axis(timeline_figure(drawing, name=name), end_seconds), timeline_caption(drawing)


def _with_time_axis(figure: Figure, end_seconds: Seconds) -> Figure:
    """A timeline figure with a time axis of `end_seconds`."""
    scale = time_scale(end_seconds)
    axis_end = end_seconds / scale.unit_size or 1.0
    axis_options = axis_layout(f"time [{scale.unit}]", range=[0, axis_end], maxallowed=axis_end)
    layout = {**figure.layout, "xaxis": {**figure.layout["xaxis"], **axis_options}}
    return replace(figure, layout=layout, script_data={**figure.script_data, "size": scale.unit_size})
