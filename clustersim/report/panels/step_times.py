"""How long does each of several steps take, one after the other or with other documents?

One point for each step, and the line of their mean.
"""

import numpy as np

from clustersim.common.arrays import FloatArray, IntArray
from clustersim.common.units import format_step_time
from clustersim.report.draw.charts import annotation, reference_line, xy_figure
from clustersim.report.figure import Figure, axis_layout, encode_floats, time_scale
from clustersim.report.html_document import Panel, figure_panel
from clustersim.report.result_labels import format_percentiles
from clustersim.results.simulation_result import SimulationResult

_MAX_MARKERS = 100
_MAX_TICKS = 12
_MAX_BINS = 500


def steps_panel(result: SimulationResult) -> Panel:
    """Panel of the times of all steps."""
    times = result.step_times
    lead = f"{len(times):,} successive steps. What the page says of a step is their mean."
    if len(sample_steps(times)) < len(times):
        lead += " Of every few neighbours the shortest and the longest are drawn."
    return figure_panel("Step times", steps_figure(times), lead=lead)


def drawn_steps_panel(result: SimulationResult) -> Panel:
    """Panel of the times of steps with different documents."""
    times = np.array(result.drawn_step_times)
    spread = format_percentiles(result.drawn_step_time_percentiles)
    lead = f"{len(times):,} steps whose documents were drawn one after the other; the page shows the first. {spread}."
    return figure_panel("Steps with other documents", steps_figure(times, "drawn-steps", "draw"), lead=lead)


def sample_steps(times: FloatArray) -> IntArray:
    """Indices of the steps drawn: all, or the shortest and the longest of each bin, so that no extreme is lost."""
    if len(times) <= 2 * _MAX_BINS:
        return np.arange(len(times))
    bins = np.array_split(np.arange(len(times)), _MAX_BINS)
    extremes = {
        step
        for step_bin in bins
        for step in (int(step_bin[times[step_bin].argmin()]), int(step_bin[times[step_bin].argmax()]))
    }
    return np.array(sorted(extremes))


def steps_figure(step_times: FloatArray, name: str = "steps", noun: str = "step") -> Figure:
    """Step times in order. name: of the figure; noun: what its points are.

    The axis does not begin at zero, since steps differ by little.
    """
    mean = float(step_times.mean())
    scale = time_scale(mean)
    samples = sample_steps(step_times)
    times = step_times[samples] / scale.unit_size
    tick_options = {"dtick": 1} if len(step_times) <= _MAX_TICKS else {"nticks": _MAX_TICKS}
    margin = max(0.15 * float(np.ptp(times)), 1e-3 * mean / scale.unit_size)
    axis_range = [float(times.min()) - margin, float(times.max()) + margin]
    trace = {
        "type": "scatter", "mode": "lines+markers" if len(times) <= _MAX_MARKERS else "lines", "name": "step time",
        "x": encode_floats(samples + 1), "y": encode_floats(times),
        "customdata": [format_step_time(seconds) for seconds in step_times[samples].tolist()],
        "hovertemplate": f"<b>{noun} %{{x}}</b><br>%{{customdata}}<extra></extra>",
        "line": {"width": 1.5, "color": "@accent"}, "marker": {"size": 7, "color": "@accent"},
    }  # fmt: skip
    line = reference_line("y", mean / scale.unit_size, {"color": "@muted", "width": 1, "dash": "dash"}, layer="below")
    mean_label = annotation(
        f"mean {format_step_time(mean)}", 1, mean / scale.unit_size, xref="paper", xanchor="right", yanchor="bottom"
    )
    x = axis_layout(noun, range=[0.5, len(step_times) + 0.5], fixedrange=True, tickformat="d", **tick_options)
    y = axis_layout(f"step time [{scale.unit}]", range=axis_range, fixedrange=True)
    layout_options = {"showlegend": False, "shapes": [line], "annotations": [mean_label], "dragmode": False}
    return xy_figure(name, [trace], x, y, height=220, narrow={"font": {"size": 10}}, **layout_options)
