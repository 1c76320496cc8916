"""How long does each of several steps take? One point a step, and the line of their mean."""

from collections.abc import Mapping

import numpy as np

from clustersim.common.arrays import FloatArray, IntArray
from clustersim.common.units import Seconds, format_step_time
from clustersim.report.draw.charts import level, note, plot
from clustersim.report.figure import Figure, axis, time_scale, typed
from clustersim.report.html_document import Card, card
from clustersim.results.simulation_result import SimulationResult

_NAMES: Mapping[str, str] = {"p50": "median"}
_MOST_MARKERS = 100
_MOST_TICKS = 12
_MOST_RUNS = 500


def steps_card(result: SimulationResult) -> Card:
    """The times of all steps."""
    times = result.step_times
    lead = f"{len(times):,} successive steps. What the page says of a step is their mean."
    if len(shown_steps(times)) < len(times):
        lead += " Of every few neighbours the shortest and the longest are drawn."
    return card("Step times", steps_figure(times), lead=lead)


def spread_words(spread: Mapping[str, Seconds]) -> str:
    """The distribution in one line.

    >>> spread_words({"min": 1.0, "p50": 1.5, "max": 2.0})
    'min 1.000 s · median 1.500 s · max 2.000 s'
    """
    return " · ".join(f"{_NAMES.get(name, name)} {format_step_time(seconds)}" for name, seconds in spread.items())


def shown_steps(times: FloatArray) -> IntArray:
    """Which steps are drawn: all, or of each of many runs of steps the shortest and the longest, so none is lost."""
    if len(times) <= 2 * _MOST_RUNS:
        return np.arange(len(times))
    runs = np.array_split(np.arange(len(times)), _MOST_RUNS)
    ends = {item for run in runs for item in (int(run[times[run].argmin()]), int(run[times[run].argmax()]))}
    return np.array(sorted(ends))


def steps_figure(every: FloatArray) -> Figure:
    """Step times in order. The axis does not begin at zero: steps differ by little."""
    mean = float(every.mean())
    scale = time_scale(mean)
    shown = shown_steps(every)
    times = every[shown] / scale.size
    ticks = {"dtick": 1} if len(every) <= _MOST_TICKS else {"nticks": _MOST_TICKS}
    margin = max(0.15 * float(np.ptp(times)), 1e-3 * mean / scale.size)
    ends = [float(times.min()) - margin, float(times.max()) + margin]
    trace = {
        "type": "scatter", "mode": "lines+markers" if len(times) <= _MOST_MARKERS else "lines", "name": "step time",
        "x": typed(shown + 1), "y": typed(times),
        "customdata": [format_step_time(seconds) for seconds in every[shown].tolist()],
        "hovertemplate": "<b>step %{x}</b><br>%{customdata}<extra></extra>",
        "line": {"width": 1.5, "color": "@accent"}, "marker": {"size": 7, "color": "@accent"},
    }  # fmt: skip
    line = level("y", mean / scale.size, {"color": "@muted", "width": 1, "dash": "dash"}, layer="below")
    words = note(
        f"mean {format_step_time(mean)}", 1, mean / scale.size, xref="paper", xanchor="right", yanchor="bottom"
    )
    x = axis("step", range=[0.5, len(every) + 0.5], fixedrange=True, tickformat="d", **ticks)
    y = axis(f"step time [{scale.unit}]", range=ends, fixedrange=True)
    drawn = {"showlegend": False, "shapes": [line], "annotations": [words], "dragmode": False}
    return plot("steps", [trace], x, y, height=220, narrow={"font": {"size": 10}}, **drawn)
