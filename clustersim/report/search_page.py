"""Which page shows a layout search?

The best layout, its rivals, Pareto front, effect of each degree, reasons, and robustness.

Times are simulated; a cell or line that was not simulated is marked as a bound.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from html import escape
from itertools import combinations
from pathlib import Path
from typing import Final

import numpy as np

from clustersim.common.units import format_step_time
from clustersim.report.draw.charts import (
    PlotlyDict,
    annotation,
    line_trace,
    marker_trace,
    tick_labels,
    wrapped_tick_labels,
    xy_figure,
)
from clustersim.report.figure import SURFACE, Figure, Traces, axis_layout, time_scale, wrap_label
from clustersim.report.html_document import html_document, render_panel
from clustersim.report.labels import format_mfu
from clustersim.report.panels.difference_bars import category_change_figure
from clustersim.report.panels.what_if import what_if_panel
from clustersim.report.row_selection import group_by, narrow_height
from clustersim.report.terminal import search as labels
from clustersim.report.terminal.search import format_pair, layout_label, shown_keys, simplify_value
from clustersim.report.theme import SERIES_COLOURS
from clustersim.results.search_result import BoundedLayout, LayoutResult, SearchResult
from clustersim.results.time_categories import TIME_CATEGORIES
from clustersim.results.what_if import WhatIfReport

_KEY_ORDER: Final = (
    "layout.tp", "layout.pp", "schedule", "layout.data", "training.microbatch", "layout.ep", "layout.cp",
    "training.recompute",
)  # fmt: skip
_MAX_HEATMAP_KEYS: Final = 6  # maximum number of keys whose pairs are drawn
_SHADES: Final = ("#00415F", "#0072B2", "#4A9CCB", "#8FC1DE", "#C3CCD4", "#DDE2E6")  # line colours, fastest first
_MAX_LINES: Final = 400
_KEY_PIXELS: Final = 52  # row height of parallel coordinates
_VALUE_MARGIN: Final = 0.06  # next to the outer values, relative to their distance: half a box
_NARROW_VALUE_MARGIN: Final = 0.16
_NARROW_VALUE_LETTERS: Final = 11


def search_page(result: SearchResult, file: Path, what_ifs: WhatIfReport | None = None) -> str:
    """The page as HTML. what_ifs: simulated changes of the recommended layout."""
    rivals = {"the next": result.runner_up, "the file's own layout": result.first_guess} if result.simulated else {}
    named_rivals = {name: other for name, other in rivals.items() if other is not None}
    figures = {
        **(_figures(result) if result.simulated else {}),
        "why": breakdown_figure(result, named_rivals) if named_rivals else None,
    }
    panel = render_panel(
        "search.html", labels=labels, mfu_words=format_mfu, result=result, file=file, others=named_rivals, **figures
    )
    panels = [panel] if what_ifs is None else [panel, what_if_panel(what_ifs, "the best layout")]
    return html_document(f"Best layouts of {file.name}", panels)


def _figures(result: SearchResult) -> dict[str, Figure | None]:
    """Figures over all candidates; None if layouts differ in too few keys."""
    candidates: list[LayoutResult | BoundedLayout] = [*result.simulated, *result.bounded]
    same_job = [candidate for candidate in candidates if candidate.job == result.recommended.job]
    shown = result.simulated[:_MAX_LINES]
    heatmap_keys, line_keys = _varying_keys(result, same_job), _varying_keys(result, shown)
    return {
        "pareto": pareto_figure(result),
        "heat": best_by_pair_figure(result, heatmap_keys) if len(heatmap_keys) > 1 else None,
        "lines": parallel_coordinates(result, shown, line_keys) if len(line_keys) > 1 else None,
    }


def _varying_keys(result: SearchResult, layouts: Sequence[LayoutResult | BoundedLayout]) -> dict[str, list[str]]:
    """Keys in which layouts differ, with their values in order; the most asked-for keys first."""
    values: dict[str, set[str]] = {}
    for layout in layouts:
        for key, value in shown_keys(layout, result).items():
            values.setdefault(key, set()).add(value)
    ordered_keys = [*(key for key in _KEY_ORDER if key in values), *sorted(values.keys() - {*_KEY_ORDER})]
    return {key: sorted(values[key], key=_numeric_sort_key) for key in ordered_keys if len(values[key]) > 1}


def _numeric_sort_key(value: str) -> tuple[int, float, str]:
    """Sort key that puts numbers first, in numeric order."""
    return (0, float(value), "") if value.isdecimal() else (1, 0.0, value)


def pareto_figure(result: SearchResult) -> Figure:
    """Step time against memory headroom, one trace for each GPU count and cluster, with the Pareto front as a line."""
    scale = time_scale(max(layout_result.step_time for layout_result in result.simulated))
    by_job, pareto_by_job = (
        group_by(layouts, lambda layout: (layout.gpus, layout.cluster))
        for layouts in (result.simulated, result.pareto_front)
    )
    traces: Traces = []
    for index, ((gpus, cluster), job_layouts) in enumerate(sorted(by_job.items(), key=lambda job: job[0])):
        front = pareto_by_job.get((gpus, cluster), [])
        traces += [
            _layout_markers(
                result,
                job_layouts,
                f"{gpus:,} GPUs of {cluster}",
                SERIES_COLOURS[index % len(SERIES_COLOURS)],
                scale.unit_size,
            ),
            line_trace(*_time_and_headroom(front, scale.unit_size), {"color": "@muted", "width": 1, "dash": "dot"}),
        ]
    chosen_trace = _layout_markers(result, [result.recommended], "to take", "@ink", scale.unit_size)
    chosen_trace["marker"] |= {"symbol": "star", "size": 14}
    x, y = (
        axis_layout(f"step time [{scale.unit}]"),
        axis_layout("memory headroom of the peak-memory GPU [GiB]", rangemode="tozero"),
    )
    return xy_figure("pareto", [*traces, chosen_trace], x, y, height=380, narrow={"legend": {"font": {"size": 9}}})


def _layout_markers(
    result: SearchResult, layouts: Sequence[LayoutResult], name: str, colour: str, unit_size: float
) -> PlotlyDict:
    return marker_trace(
        name, *_time_and_headroom(layouts, unit_size), {"color": colour, "size": 8, "opacity": 0.75},
        customdata=[[escape(layout_label(layout, result)), format_step_time(layout.step_time)] for layout in layouts],
        hovertemplate="<b>%{customdata[1]}</b>, %{y:.1f} GiB left<br>%{customdata[0]}<extra></extra>",
    )  # fmt: skip


def _time_and_headroom(layouts: Sequence[LayoutResult], unit_size: float) -> tuple[list[float], list[float]]:
    """Step times in the axis's unit, and memory headroom in GiB."""
    return [layout.step_time / unit_size for layout in layouts], [
        layout_result.headroom / 2**30 for layout_result in layouts
    ]


def best_by_pair_figure(result: SearchResult, axes: Mapping[str, list[str]]) -> Figure:
    """Heatmap of the best score for each pair of values of two keys, selectable by pair of keys."""
    keys = [*axes][:_MAX_HEATMAP_KEYS]
    choices = tuple(
        (f"{_short_key(one)} and {_short_key(two)}", [_pair_heatmap(result, one, two)])
        for one, two in combinations(keys, 2)
    )
    max_values = max(len(axes[key]) for key in keys)
    x, y = (
        axis_layout("", type="category", fixedrange=True),
        axis_layout("", type="category", fixedrange=True, ticksuffix="  "),
    )
    options = {"showlegend": False, "dragmode": False}
    figure = xy_figure("heat", [], x, y, height=110 + 34 * max_values, narrow={"font": {"size": 9}}, **options)
    return replace(figure, choices=choices)


def _pair_heatmap(result: SearchResult, one: str, two: str) -> PlotlyDict:
    """For the chosen layout's job: the best score of each pair of values, and whether it is only a bound."""
    best: dict[tuple[str, str], tuple[bool, float]] = {}
    scores: list[tuple[LayoutResult | BoundedLayout, tuple[bool, float]]]
    scores = [(layout_result, (False, layout_result.score)) for layout_result in result.simulated]
    for layout, score in (
        *scores,
        *((bounded_layout, (True, bounded_layout.bound)) for bounded_layout in result.bounded),
    ):
        keys = shown_keys(layout, result)
        if layout.job == result.recommended.job and one in keys and two in keys:
            pair = keys[one], keys[two]
            best[pair] = min(best.get(pair, score), score)
    rows, columns = (sorted({pair[index] for pair in best}, key=_numeric_sort_key) for index in (0, 1))
    cells = [[best.get((row, column)) for column in columns] for row in rows]
    bound_sign = "≤ " if result.shows_inverse_score else "≥ "
    return {
        "type": "heatmap",
        "x": [format_pair(two, column) for column in columns],
        "y": [format_pair(one, row) for row in rows],
        "z": [[cell and cell[1] for cell in row] for row in cells],
        "text": [
            [f"{bound_sign * cell[0]}{result.format_score(cell[1])}" if cell else "" for cell in row] for row in cells
        ],
        "texttemplate": "%{text}",
        "hovertemplate": "%{y}, %{x}: %{text}<extra></extra>",
        "colorscale": [[0, "#8FC1DE"], [1, "#EEF3F8"]],
        "showscale": False,
        "xgap": 2,
        "ygap": 2,
    }


def _short_key(key: str) -> str:
    return key.rpartition(".")[2].replace("_", " ")


def parallel_coordinates(
    result: SearchResult, layouts: Sequence[LayoutResult], axes: Mapping[str, list[str]]
) -> Figure:
    """Parallel coordinates: one row for each key, one line for each layout, the darker the faster.

    Values are in boxes above the lines, so that no line crosses a label.
    """
    scores = [layout.score for layout in layouts]
    low, span = min(scores), max(scores) - min(scores) or 1.0
    groups = group_by(layouts, lambda layout: int((layout.score - low) / span * (len(_SHADES) - 1)))
    traces = [_layout_lines(result, groups[shade], shade, axes) for shade in sorted(groups, reverse=True)]
    rows, names = [*range(len(axes))], [*map(_short_key, axes)]
    x = axis_layout("", visible=False, fixedrange=True, range=[-_VALUE_MARGIN, 1.0 + _VALUE_MARGIN])
    y = axis_layout("", fixedrange=True, range=[len(axes) - 0.5, -0.5], **tick_labels(rows, names, ticksuffix="  "))
    narrow = {
        "xaxis": {"range": [-_NARROW_VALUE_MARGIN, 1.0 + _NARROW_VALUE_MARGIN]},
        "yaxis": wrapped_tick_labels(rows, names, tickfont={"size": 10}),
        "annotations": _value_boxes(axes, 9, _NARROW_VALUE_LETTERS),
    }
    options = {"showlegend": False, "dragmode": False, "annotations": _value_boxes(axes, 11)}
    return xy_figure("lines", traces, x, y, height=40 + _KEY_PIXELS * len(axes), narrow=narrow, **options)


def _value_position(key: str, value: str, axes: Mapping[str, list[str]]) -> float:
    """Position of a value in the row of its key, from 0 to 1."""
    return axes[key].index(value) / (len(axes[key]) - 1)


def _layout_lines(
    result: SearchResult, layouts: Sequence[LayoutResult], shade: int, axes: Mapping[str, list[str]]
) -> PlotlyDict:
    """Line of the layouts of one shade, with gaps between layouts and where a layout lacks a key."""
    positions: list[float | None] = []
    rows: list[float | None] = []
    hover_data: list[list[str]] = []
    for layout in layouts:
        keys = shown_keys(layout, result)
        positions += [_value_position(key, keys[key], axes) if key in keys else None for key in axes] + [None]
        rows += [*range(len(axes)), None]
        hover_data += [[format_step_time(layout.step_time), escape(layout_label(layout, result))]] * (len(axes) + 1)
    return {
        "type": "scatter", "mode": "lines+markers", "x": positions, "y": rows, "customdata": hover_data,
        "hovertemplate": "<b>%{customdata[0]}</b><br>%{customdata[1]}<extra></extra>",
        "line": {"color": _SHADES[shade], "width": 1 if shade else 2.5}, "marker": {"size": 6},
    }  # fmt: skip


def _value_boxes(axes: Mapping[str, list[str]], font_size: int, max_letters: int | None = None) -> list[PlotlyDict]:
    """The values of each key in its row, in opaque boxes. max_letters: of a line, if values are wrapped."""
    style: PlotlyDict = {
        "bgcolor": SURFACE,
        "bordercolor": "@edge",
        "borderwidth": 1,
        "borderpad": 2,
        "captureevents": False,
    }
    return [
        annotation(
            escape(label) if max_letters is None else wrap_label(label.replace("_", " "), max_letters),
            _value_position(key, value, axes), row, **style, font={"size": font_size, "color": "@ink"},
        )
        for row, key in enumerate(axes)
        for value in axes[key]
        for label in (simplify_value(value),)
    ]  # fmt: skip


def breakdown_figure(result: SearchResult, rivals: Mapping[str, LayoutResult]) -> Figure:
    """For each rival a bar of the time categories that differ from the chosen layout."""
    deltas_by_rival = [result.category_differences(other) for other in rivals.values()]
    changes = np.array(
        [[deltas.get(category.value, 0.0) for category in TIME_CATEGORIES] for deltas in deltas_by_rival]
    )
    height = 110 + 50 * len(rivals)
    narrow = {
        "legend": {"font": {"size": 9}},
        "height": narrow_height(height, int(np.any(changes, axis=0).sum())),
        "bargap": 0.6,
    }
    return category_change_figure("why", [*rivals], changes, "difference", height=height, narrow=narrow)
