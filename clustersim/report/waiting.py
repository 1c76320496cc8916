"""Who waits for whom? For every pipeline rank, how long its ranks wait, and the ranks that they wait for.

Waiting is what the breakdown calls bubble and wait: the rank could work, but others are not ready. The rank of a stage
that waits least is the one that the others wait for.
"""

from html import escape
from typing import Final

import numpy as np

from clustersim.analysis.stragglers import LEAST, Straggler
from clustersim.hardware.disturbance import in_ranges
from clustersim.report.figure import Figure, Traces, axis, layout, legend, short_labels, time_scale, typed
from clustersim.report.rows import shown_rows
from clustersim.report.view import FloatArray, Waiting
from clustersim.units import Seconds, format_seconds

NO_STRAGGLERS: Final = (
    f"No rank's kernels take {100 * LEAST:g} % longer than is usual on its stage, so none is a straggler: the ranks "
    "wait for whoever comes last each time."
)


def waiting_figure(waiting: Waiting, step_time: Seconds) -> Figure:
    """For every pipeline rank a bar from who waits least to who waits most, their mean, and stragglers."""
    shown = shown_rows(len(waiting.labels))
    labels = [escape(waiting.labels[row]) for row in shown]
    most = float(waiting.waits.most.max(initial=0.0))
    scale = time_scale(step_time)
    return Figure(
        name="waiting",
        traces=[*_spread(waiting, labels, scale.size), *_stragglers(waiting, set(shown.tolist()), scale.size)],
        layout=layout(
            showlegend=True,
            legend=legend(traceorder="normal"),
            xaxis=axis(f"waiting for others [{scale.unit}]", range=[0, 1.06 * most / scale.size or 1], fixedrange=True),
            yaxis=axis("", autorange="reversed", fixedrange=True, type="category", ticksuffix=" "),
            dragmode=False,
            bargap=0.5,
        ),
        height=110 + max(18, min(28, 1400 // max(1, len(shown)))) * len(shown),
        narrow=short_labels(labels, [escape(waiting.short[row]) for row in shown]),
    )


def stragglers_table(waiting: Waiting) -> str:
    """The slowest ranks in numbers, or a sentence that there are none, as HTML."""
    found = waiting.stragglers
    if not found.slowest:
        return f"<p>{escape(NO_STRAGGLERS)}</p>"
    rows = "".join(_row(waiting, straggler) for straggler in found.slowest)
    head = "<thead><tr><th>stragglers</th><th>kernels</th><th>longer by</th><th>waits</th></tr></thead>"
    return f'<table class="parts">{head}<tbody>{rows}</tbody></table>{_more(waiting)}'


def straggler_words(waiting: Waiting, straggler: Straggler) -> str:
    """A straggler in a sentence's beginning."""
    return f"{in_ranges(np.array(straggler.ranks), 'rank')} ({waiting.labels[straggler.kind]})"


def _row(waiting: Waiting, straggler: Straggler) -> str:
    return (
        f'<tr><th scope="row">{escape(straggler_words(waiting, straggler))}</th>'
        f"<td>{format_seconds(straggler.kernels)}</td><td>{straggler.excess:.1%}</td>"
        f"<td>{format_seconds(straggler.waits)}</td></tr>"
    )


def _more(waiting: Waiting) -> str:
    found = waiting.stragglers
    more = found.ranks - sum(len(each.ranks) for each in found.slowest)
    return f'<p class="caption">and {more:,} more ranks</p>' if more else ""


def _spread(waiting: Waiting, labels: list[str], size: float) -> Traces:
    shown = shown_rows(len(waiting.labels))
    least, mean, most = (each[shown] for each in (waiting.waits.least, waiting.waits.mean, waiting.waits.most))
    words = [
        f"{format_seconds(low)} to {format_seconds(high)}, mean {format_seconds(middle)}"
        for low, middle, high in zip(least.tolist(), mean.tolist(), most.tolist(), strict=True)
    ]
    bar = {
        "type": "bar",
        "orientation": "h",
        "name": "from least to most",
        "y": labels,
        "base": typed(least / size),
        "x": typed((most - least) / size),
        "customdata": words,
        "hovertemplate": "<b>%{y}</b><br>waits %{customdata}<extra></extra>",
        "marker": {"color": "@muted", "opacity": 0.4},
    }
    dot = {"symbol": "circle", "size": 8, "color": "@ink", "line": {"width": 1.5, "color": "@surface"}}
    return [bar, _points("mean", labels, mean / size, dot)]


def _stragglers(waiting: Waiting, shown: set[int], size: float) -> Traces:
    found = [each for each in waiting.stragglers.slowest if each.kind in shown]
    if not found:
        return []
    diamond = {"symbol": "diamond", "size": 11, "color": "@alarm", "line": {"width": 1, "color": "@surface"}}
    points = _points(
        "straggler",
        [escape(waiting.labels[each.kind]) for each in found],
        np.array([each.waits for each in found]) / size,
        diamond,
    )
    words = [
        f"{escape(straggler_words(waiting, each))}<br>kernels take {each.excess:.1%} longer, waits "
        f"{format_seconds(each.waits)}"
        for each in found
    ]
    return [{**points, "hovertext": words, "hoverinfo": "text"}]


def _points(name: str, labels: list[str], values: FloatArray, look: dict[str, object]) -> dict[str, object]:
    return {
        "type": "scatter",
        "mode": "markers",
        "name": name,
        "x": typed(values),
        "y": labels,
        "hoverinfo": "skip",
        "marker": look,
    }
