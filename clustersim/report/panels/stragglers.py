"""Which ranks wait, and for which stragglers? Waiting times within every pipeline rank, and its stragglers.

Waiting is what the breakdown calls bubble and wait: the rank could work, but others are not ready. The rank
of a stage with the shortest wait is the one that the others wait for. Bubbles are common to all ranks of a
stage and far longer than the delay by one straggler, so waits are drawn relative to the stage's shortest.
"""

from html import escape
from typing import Final

import numpy as np

from clustersim.common.arrays import IntArray
from clustersim.common.units import format_seconds
from clustersim.report.draw.charts import bar_figure, bar_trace, diamond_marker, marker_trace
from clustersim.report.figure import Figure, Traces, axis_layout, encode_floats, narrow_labels, time_scale
from clustersim.report.html_document import Panel, render_panel
from clustersim.report.row_selection import sample_rows
from clustersim.report.step_breakdown import ROUNDING_TOLERANCE
from clustersim.report.straggler_labels import (
    describe_no_stragglers,
    describe_slowness,
    describe_straggler,
    slow_work,
    wait_row_labels,
)
from clustersim.results.simulation_result import SimulationResult

SHARED_DELAY_NOTE: Final = "A slow way delays all members of the groups that use it: the slowest rank stands first."


def stragglers_panel(result: SimulationResult) -> Panel:
    """Panel of waits and stragglers; a sentence if there are no stragglers."""
    waits_differ = result.wait_times.max_range >= ROUNDING_TOLERANCE * result.step_time
    return render_panel(
        "waiting.html",
        figure=waiting_figure(result) if waits_differ else None,
        report=result.stragglers,
        names=wait_row_labels(result),
        nobody=describe_no_stragglers(result),
        describe=describe_straggler,
        slow=slow_work,
        shared=SHARED_DELAY_NOTE,
    )


def waiting_figure(result: SimulationResult) -> Figure:
    """For every pipeline rank the excess of its ranks' waits over the shortest, and stragglers."""
    names = wait_row_labels(result)
    rows = sample_rows(len(names.labels))
    scale = time_scale(result.wait_times.max_range)
    max_wait = result.wait_times.max_range / scale.unit_size
    return bar_figure(
        "waiting",
        [*_wait_traces(result, rows, scale.unit_size), *_straggler_traces(result, rows, scale.unit_size)],
        axis_layout(f"extra wait [{scale.unit}]", range=[-0.02 * max_wait, 1.06 * max_wait]),  # stragglers are at zero
        height=110 + max(18, min(28, 1400 // max(1, len(rows)))) * len(rows),
        narrow=narrow_labels(
            *([escape(row_labels[row]) for row in rows] for row_labels in (names.labels, names.short))
        ),
        barmode="overlay",
        bargap=0.5,
    )


def _wait_traces(result: SimulationResult, rows: IntArray, unit_size: float) -> Traces:
    row_labels, waits = wait_row_labels(result), result.wait_times
    labels = [escape(row_labels.labels[row]) for row in rows]
    min_waits, mean_waits, max_waits = (column[rows] for column in (waits.minimum, waits.mean, waits.maximum))
    hover_texts = [
        "{} to {}, mean {}".format(*map(format_seconds, times))
        for times in np.stack((min_waits, max_waits, mean_waits), 1).tolist()
    ]
    mean_marker = {"symbol": "circle", "size": 8, "color": "@ink", "line": {"width": 1.5, "color": "@surface"}}
    return [
        bar_trace(
            "the one that waits most",
            labels,
            encode_floats((max_waits - min_waits) / unit_size),
            {"color": "@muted", "opacity": 0.4},
            customdata=hover_texts,
            hovertemplate="<b>%{y}</b><br>waits %{customdata}<extra></extra>",
        ),
        marker_trace(
            "mean", encode_floats((mean_waits - min_waits) / unit_size), labels, mean_marker, hoverinfo="skip"
        ),
    ]


def _straggler_traces(result: SimulationResult, rows: IntArray, unit_size: float) -> Traces:
    row_labels, stragglers = (
        wait_row_labels(result),
        [straggler for straggler in result.stragglers.slowest if straggler.program_index in rows],
    )
    if not stragglers:
        return []
    extra_waits = np.array(
        [straggler.wait_seconds - result.wait_times.minimum[straggler.program_index] for straggler in stragglers]
    )
    hover_texts = [
        f"{escape(describe_straggler(row_labels, straggler))}<br>{describe_slowness(straggler)} longer, waits "
        f"{format_seconds(straggler.wait_seconds)}"
        for straggler in stragglers
    ]
    labels = [escape(row_labels.labels[straggler.program_index]) for straggler in stragglers]
    return [
        marker_trace(
            "straggler",
            encode_floats(extra_waits / unit_size),
            labels,
            diamond_marker("@alarm", 1),
            hovertext=hover_texts,
            hoverinfo="text",
        )
    ]
