"""Which page compares several results? Each against the first, and one of them in detail."""

from collections.abc import Mapping
from html import escape
from typing import TYPE_CHECKING

import numpy as np

from clustersim.common.units import format_signed_seconds
from clustersim.report import labels
from clustersim.report.draw.charts import bar_figure, diamond_marker, marker_trace, wrapped_tick_labels
from clustersim.report.draw.timeline_figure import timeline_panel
from clustersim.report.figure import Figure, axis_layout, encode_floats, time_scale
from clustersim.report.html_document import html_document, render_panel
from clustersim.report.panels.difference_bars import category_change_traces
from clustersim.report.panels.stragglers import stragglers_panel
from clustersim.report.panels.time_breakdown import stages_panel
from clustersim.report.panels.verdict import confidence_panel
from clustersim.report.result_timeline import build_timeline
from clustersim.report.row_selection import select_ranks
from clustersim.report.step_breakdown import step_breakdown
from clustersim.report.straggler_labels import has_straggler_content

if TYPE_CHECKING:
    from clustersim.results.simulation_result import SimulationResult


def comparison_page(results: "Mapping[str, SimulationResult]", title: str, detailed: str) -> str:
    """The page as HTML. detailed: name of the result that is shown in detail."""
    detailed_result = results[detailed]
    timeline = build_timeline(detailed_result, ranks := select_ranks(detailed_result))
    panels = [
        render_panel(
            "comparison.html", title=title, results=results, close=detailed_result, shown=detailed, wording=labels,
            figure=difference_figure(results),
        ),
        *([stragglers_panel(detailed_result)] if has_straggler_content(detailed_result) else []),
        stages_panel(step_breakdown(detailed_result, ranks), timeline),
        timeline_panel(timeline),
        confidence_panel(detailed_result),
    ]  # fmt: skip
    return html_document(title, panels)


def difference_figure(results: "Mapping[str, SimulationResult]") -> Figure:
    """Diverging bars of each result but the first: time categories longer and shorter than the first's."""
    base_seconds, *other_seconds = (step_breakdown(result).mean_seconds for result in results.values())
    changes = np.array([array - base_seconds for array in other_seconds]).reshape(len(other_seconds), -1)
    base_name, *names = results
    labels, step_changes = [escape(name) for name in names], changes.sum(axis=1)
    scale = time_scale(float(np.abs(step_changes).max(initial=0.0)))
    net = marker_trace(
        "step", encode_floats(step_changes / scale.unit_size), labels, diamond_marker("@ink", 1.5),
        customdata=[format_signed_seconds(value) for value in step_changes.tolist()],
        hovertemplate="<b>%{y}</b><br>step: %{customdata}<extra></extra>",
    )  # fmt: skip
    return bar_figure(
        "difference",
        [*category_change_traces(labels, changes, scale), net],
        axis_layout(f"longer than {escape(base_name)} by [{scale.unit}]", zeroline=True),
        height=130 + 44 * len(other_seconds),
        narrow={
            "height": 300 + 52 * len(other_seconds),
            "legend": {"font": {"size": 9}},
            "yaxis": wrapped_tick_labels(labels, names),
        },
        barmode="relative",
        bargap=0.4,
    )
