"""How long does each of several steps take? One point a step, and the line of their mean."""

from collections.abc import Mapping

import numpy as np

from clustersim.arrays import FloatArray, IntArray
from clustersim.report.figure import Figure, axis, layout, time_scale, typed
from clustersim.report.view import Steps
from clustersim.units import Seconds, format_step_time

_NAMES: Mapping[str, str] = {"p50": "median"}
_MOST_MARKERS = 100
_MOST_TICKS = 12
_MOST_RUNS = 500


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
    ends = {each for run in runs for each in (int(run[times[run].argmin()]), int(run[times[run].argmax()]))}
    return np.array(sorted(ends))


def steps_figure(steps: Steps) -> Figure:
    """Step times in order. The axis does not begin at zero: steps differ by little."""
    mean = float(steps.times.mean())
    scale = time_scale(mean)
    shown = shown_steps(steps.times)
    times = steps.times[shown] / scale.size
    ticks = {"dtick": 1} if len(steps.times) <= _MOST_TICKS else {"nticks": _MOST_TICKS}
    margin = max(0.15 * float(np.ptp(times)), 1e-3 * mean / scale.size)
    return Figure(
        name="steps",
        traces=[
            {
                "type": "scatter",
                "mode": "lines+markers" if len(times) <= _MOST_MARKERS else "lines",
                "name": "step time",
                "x": typed(shown + 1),
                "y": typed(times),
                "customdata": [format_step_time(seconds) for seconds in steps.times[shown].tolist()],
                "hovertemplate": "<b>step %{x}</b><br>%{customdata}<extra></extra>",
                "line": {"width": 1.5, "color": "@accent"},
                "marker": {"size": 7, "color": "@accent"},
            }
        ],
        layout=layout(
            xaxis=axis("step", range=[0.5, len(steps.times) + 0.5], fixedrange=True, tickformat="d", **ticks),
            yaxis=axis(
                f"step time [{scale.unit}]",
                range=[float(times.min()) - margin, float(times.max()) + margin],
                fixedrange=True,
            ),
            shapes=[_mean_line(mean / scale.size)],
            annotations=[_mean_words(mean, scale.size)],
            dragmode=False,
        ),
        height=220,
        narrow={"font": {"size": 10}},
    )


def _mean_line(at: float) -> dict[str, object]:
    line = {"color": "@muted", "width": 1, "dash": "dash"}
    return {"type": "line", "x0": 0, "x1": 1, "xref": "paper", "y0": at, "y1": at, "line": line, "layer": "below"}


def _mean_words(mean: Seconds, size: float) -> dict[str, object]:
    return {
        "x": 1,
        "xref": "paper",
        "xanchor": "right",
        "y": mean / size,
        "yanchor": "bottom",
        "text": f"mean {format_step_time(mean)}",
        "showarrow": False,
        "font": {"size": 11, "color": "@muted"},
    }
