"""What does the critical path consist of?

A bar from 0 to the end, its longest segments, and its time categories by stage.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape
from typing import Final

import numpy as np

from clustersim.common.arrays import FloatArray
from clustersim.common.units import format_seconds
from clustersim.report import legend_markup
from clustersim.report.draw.charts import interval_bars, tick_labels, xy_figure
from clustersim.report.figure import Figure, Traces, axis_layout, bar_marker, time_scale
from clustersim.report.html_document import Panel, render_panel
from clustersim.report.labels import CRITICAL_PATH_NOTE, PipelineRowLabels, pipeline_row_labels
from clustersim.report.theme import TIME_CATEGORY_STYLES
from clustersim.results.critical_path_segments import CriticalPathSections, PathSection, split_critical_path
from clustersim.results.simulation_result import SimulationResult
from clustersim.results.time_categories import TIME_CATEGORIES

_MAX_SEGMENT_ROWS: Final = 12  # maximum rows of the table of segments
_MAX_STAGE_ROWS: Final = 16  # maximum rows of the table of stages
_BIN_COUNT: Final = 250  # of the category bar: one pixel each on a small screen, plotly's minimum bar width
_MAX_STAGE_INTERVALS: Final = 1000  # of the stage bar
_MIN_SHARE: Final = 0.01  # relative to the step: minimum duration of a segment with its own row
_ROUNDING: Final = 1e-9


@dataclass(frozen=True, slots=True, eq=False)
class CriticalPathView:
    """The critical path over all steps. names: of pipeline ranks, by program; microbatches_per_step: of one step."""

    path: CriticalPathSections
    names: PipelineRowLabels
    microbatches_per_step: int
    steps: int = 1


def build_critical_path(result: SimulationResult) -> CriticalPathView | None:
    """Segments and time categories of the path; None if nothing takes time."""
    if result.trace.makespan <= 0:
        return None
    scenario = result.scenario
    path = split_critical_path(result.trace_table, result.critical_path, result.cost.time_segment)
    return CriticalPathView(
        path, pipeline_row_labels(scenario, len(path.category_seconds)), scenario.microbatch_count, scenario.steps
    )


def critical_path_panel(path: CriticalPathView) -> Panel:
    """Panel with the bar, the longest segments in order of time, and seconds of one step by stage and category."""
    seconds_per_step = path.path.category_seconds / path.steps
    nonzero_categories = np.flatnonzero(seconds_per_step.sum(axis=0) > _ROUNDING * seconds_per_step.sum()).tolist()
    stage_rows = _stage_rows(path, seconds_per_step)
    return render_panel(
        "critical_path.html",
        figure=path_figure(path),
        path=path,
        legend=legend_markup.category_legend(path.path.intervals.categories_over_time(_BIN_COUNT)[0]),
        lines=_segment_rows(path.path.sections) if len(path.path.sections) > 1 else (),
        stages=stage_rows if len(stage_rows) > 1 else (),
        total=seconds_per_step.sum(axis=0),
        present=nonzero_categories,
        heads=(
            path.names.singular,
            *(legend_markup.category_markup(TIME_CATEGORIES[index]) for index in nonzero_categories),
            "sum",
        ),
        rounding=_ROUNDING,
        critical_path=CRITICAL_PATH_NOTE,
        keys=legend_markup,
    )


def path_figure(path: CriticalPathView) -> Figure:
    """Two bars from 0 to the end: the dominant category, and the stage."""
    scale, row_type = time_scale(path.path.seconds), path.names.singular
    row_count = 2 if len(path.names.labels) > 1 else 1
    row_ticks = tick_labels(
        [0, 1][:row_count], ["part ", f"{escape(row_type)} "][:row_count], range=[row_count - 0.5, -0.5]
    )
    x = axis_layout(f"time [{scale.unit}]", range=[0, path.path.seconds / scale.unit_size], fixedrange=True)
    y = axis_layout("", fixedrange=True, showgrid=False, **row_ticks)
    traces = [*_category_bars(path, scale.unit_size), *(_stage_bars(path, scale.unit_size) if row_count > 1 else [])]
    narrow = {"yaxis": {"ticktext": ["part ", f"{escape(row_type.split()[-1])} "][:row_count]}}
    options = {"showlegend": False, "dragmode": False, "uniformtext": {"mode": "hide", "minsize": 9}}
    return xy_figure("critical-path", traces, x, y, height=76 + 34 * row_count, narrow=narrow, **options)


def _stage_rows(path: CriticalPathView, seconds: FloatArray) -> list[tuple[str, FloatArray]]:
    """Stages on the path, and seconds by category; of many those with the longest share, and the others summed."""
    touched = np.flatnonzero(path.path.category_seconds.sum(axis=1) > _ROUNDING * path.path.seconds).tolist()
    shown = sorted(sorted(touched, key=lambda stage: -seconds[stage].sum())[:_MAX_STAGE_ROWS])
    rows = [(path.names.labels[stage], seconds[stage]) for stage in shown]
    if omitted := sorted(set(touched) - set(shown)):
        rows.append((f"{len(omitted):,} more", seconds[omitted].sum(axis=0)))
    return rows


_SegmentAndPredecessor = tuple[PathSection, PathSection | None]
"""A segment, and its predecessor on the path."""


def _segment_rows(segments: Sequence[PathSection]) -> list[tuple[_SegmentAndPredecessor, ...]]:
    """Rows of the table: the longest segments separately, as the row limit allows, the others merged."""
    min_seconds = _MIN_SHARE * segments[-1].end
    with_predecessors = [
        segment_and_previous
        for segment_and_previous in zip(segments, (None, *segments), strict=False)
        if segment_and_previous[0].seconds > _ROUNDING * segments[-1].end
    ]
    long_indices = [index for index, (segment, _) in enumerate(with_predecessors) if segment.seconds >= min_seconds]
    long_indices.sort(key=lambda index: -with_predecessors[index][0].seconds)
    for separate_count in range(min(len(long_indices), _MAX_SEGMENT_ROWS), 0, -1):
        rows = list(_group_segments(with_predecessors, frozenset(long_indices[:separate_count])))
        if len(rows) <= _MAX_SEGMENT_ROWS:
            return rows
    return list(_group_segments(with_predecessors, frozenset()))


def _group_segments(
    with_predecessors: Sequence[_SegmentAndPredecessor], separate: frozenset[int]
) -> Iterator[tuple[_SegmentAndPredecessor, ...]]:
    starts = [
        index for index in range(len(with_predecessors)) if index == 0 or index in separate or index - 1 in separate
    ]
    for first, after in zip(starts, [*starts[1:], len(with_predecessors)], strict=True):
        yield tuple(with_predecessors[first:after])


def _category_bars(path: CriticalPathView, unit_size: float) -> Traces:
    """One trace for each category that is dominant in some interval."""
    categories, start, end = path.path.intervals.categories_over_time(_BIN_COUNT)
    traces = []
    for category in np.unique(categories).tolist():
        selection, name = np.flatnonzero(categories == category), TIME_CATEGORIES[category].value
        hover_texts = [
            f"<b>mostly {name}</b><br>{format_seconds(first)} to {format_seconds(last)}"
            for first, last in zip(start[selection].tolist(), end[selection].tolist(), strict=True)
        ]
        marker = {**bar_marker(TIME_CATEGORY_STYLES[TIME_CATEGORIES[category]]), "line": {"width": 0}}
        traces.append(
            interval_bars(
                name,
                0.0,
                start[selection] / unit_size,
                end[selection] / unit_size,
                marker,
                hovertext=hover_texts,
                width=0.8,
            )
        )
    return traces


def _stage_bars(path: CriticalPathView, unit_size: float) -> Traces:
    """Stage that the path is on, with its index if there is space."""
    program_indices, start, end = path.path.intervals.programs_over_time(_MAX_STAGE_INTERVALS)
    marker = {"color": "@track", "line": {"width": 0.5, "color": "@muted"}}
    return [
        interval_bars(
            path.names.singular,
            1.0,
            start / unit_size,
            end / unit_size,
            marker,
            width=0.8,
            text=[escape(path.names.short[program_index]) for program_index in program_indices],
            textposition="inside",
            insidetextanchor="middle",
            textangle=0,
            textfont={"color": "@ink", "size": 11},
            hovertext=[escape(path.names.labels[program_index]) for program_index in program_indices],
        )
    ]
