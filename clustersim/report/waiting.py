"""Who waits for whom? For every pipeline rank, how long its ranks wait, and the ranks that they wait for.

Waiting is what the breakdown calls bubble and wait: the rank could work, but others are not ready. The rank of a stage
that waits least is the one that the others wait for. Bubbles are common to all of a stage and far longer than what one
slow rank costs, so waits are drawn from the least one of the stage on.
"""

from html import escape
from typing import Final

import numpy as np

from clustersim.analysis.stragglers import LEAST, Straggler
from clustersim.arrays import FloatArray
from clustersim.hardware.disturbance import in_ranges
from clustersim.report.figure import Figure, Traces, axis, layout, legend, short_labels, time_scale, typed
from clustersim.report.keys import Cells, stacked, table
from clustersim.report.rows import shown_rows
from clustersim.report.view import Waiting
from clustersim.units import format_seconds

SHARED_DELAY: Final = "A slow way delays all members of the groups that use it: the slowest rank stands first."
_LONGER: Final = f"{100 * LEAST:g} %"


def nobody_slow(disturbed: str, *, jittered: bool) -> str:
    """What to say where no rank is a straggler. disturbed: what is, in words, empty if nothing."""
    if not disturbed:
        return (
            f"No rank's kernels take {_LONGER} longer than is usual on its stage, so none is called a straggler; "
            "where GPUs differ, the faster ones wait."
        )
    evens_out = " Jitter evens out over a rank's kernels: the ranks wait for whoever comes last each time."
    return (
        f"What is disturbed, {disturbed}, is not visible as kernel or communication time of single ranks: no rank's "
        f"kernels take {_LONGER} longer than is usual on its stage, no rank's communication {_LONGER} of the step."
        + evens_out
        * jittered
    )


def waiting_figure(waiting: Waiting) -> Figure:
    """For every pipeline rank by how much its ranks wait longer than the one that waits least, and stragglers."""
    shown = shown_rows(len(waiting.labels))
    labels = [escape(waiting.labels[row]) for row in shown]
    scale = time_scale(waiting.spread)
    return Figure(
        name="waiting",
        traces=[*_spread(waiting, labels, scale.size), *_stragglers(waiting, set(shown.tolist()), scale.size)],
        layout=layout(
            showlegend=True,
            legend=legend(traceorder="normal"),
            xaxis=axis(f"waits longer by [{scale.unit}]", range=_range(waiting.spread / scale.size), fixedrange=True),
            yaxis=axis("", autorange="reversed", fixedrange=True, type="category", ticksuffix=" "),
            dragmode=False,
            bargap=0.5,
        ),
        height=110 + max(18, min(28, 1400 // max(1, len(shown)))) * len(shown),
        narrow=short_labels(labels, [escape(waiting.short[row]) for row in shown]),
    )


def _range(most: float) -> list[float]:
    """From a little before zero, where stragglers stand."""
    return [-0.02 * most, 1.06 * most]


def stragglers_table(waiting: Waiting) -> str:
    """The slowest ranks in numbers, or a sentence that there are none, as HTML."""
    found = waiting.stragglers
    if not found.slowest:
        return f"<p>{escape(waiting.otherwise)}</p>"
    rows = [_row(waiting, straggler) for straggler in found.slowest]
    numbers = table(("stragglers", "slow", "longer by", "waits"), rows)
    return f"<div>{numbers}{_more(waiting)}{_shared(waiting)}</div>"


def straggler_words(waiting: Waiting, straggler: Straggler) -> str:
    """A straggler in a sentence's beginning."""
    return f"{in_ranges(np.array(straggler.ranks), 'rank')} ({waiting.labels[straggler.kind]})"


def slowness(straggler: Straggler) -> str:
    """What takes longer, and by how much."""
    return " and ".join(f"{what} take{'s' * (what != 'kernels')} {longer}" for what, longer in _slow(straggler))


def _slow(straggler: Straggler) -> list[tuple[str, str]]:
    """Each kind of work that takes longer, and by how much."""
    kernels = [("kernels", f"{straggler.excess:.1%}")] if straggler.computes_slowly else []
    return kernels + ([("communication", format_seconds(straggler.delay))] if straggler.delay else [])


def _row(waiting: Waiting, straggler: Straggler) -> Cells:
    slow = _slow(straggler)
    what, longer = stacked(what for what, _ in slow), stacked(longer for _, longer in slow)
    return Cells((straggler_words(waiting, straggler), what, longer, format_seconds(straggler.waits)))


def _more(waiting: Waiting) -> str:
    found = waiting.stragglers
    more = found.ranks - sum(len(each.ranks) for each in found.slowest)
    return f'<p class="caption">and {more:,} more ranks</p>' if more else ""


def _shared(waiting: Waiting) -> str:
    """What must be said of communication that takes longer."""
    delayed = any(each.delay for each in waiting.stragglers.slowest)
    return f'<p class="caption">{SHARED_DELAY}</p>' if delayed else ""


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
        "name": "the one that waits most",
        "y": labels,
        "x": typed((most - least) / size),
        "customdata": words,
        "hovertemplate": "<b>%{y}</b><br>waits %{customdata}<extra></extra>",
        "marker": {"color": "@muted", "opacity": 0.4},
    }
    dot = {"symbol": "circle", "size": 8, "color": "@ink", "line": {"width": 1.5, "color": "@surface"}}
    return [bar, _points("mean", labels, (mean - least) / size, dot)]


def _stragglers(waiting: Waiting, shown: set[int], size: float) -> Traces:
    found = [each for each in waiting.stragglers.slowest if each.kind in shown]
    if not found:
        return []
    diamond = {"symbol": "diamond", "size": 11, "color": "@alarm", "line": {"width": 1, "color": "@surface"}}
    points = _points(
        "straggler",
        [escape(waiting.labels[each.kind]) for each in found],
        np.array([each.waits - waiting.waits.least[each.kind] for each in found]) / size,
        diamond,
    )
    words = [
        f"{escape(straggler_words(waiting, each))}<br>{slowness(each)} longer, waits {format_seconds(each.waits)}"
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
