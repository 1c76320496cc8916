"""Who waits for whom? For every pipeline rank, how long its ranks wait, and the ranks that they wait for.

Waiting is what the breakdown calls bubble and wait: the rank could work, but others are not ready. The rank of a stage
that waits least is the one that the others wait for. Bubbles are common to all of a stage and far longer than what one
slow rank costs, so waits are drawn from the least one of the stage on.
"""

from collections.abc import Iterator
from html import escape
from typing import Final

import numpy as np

from clustersim.common.arrays import IntArray
from clustersim.common.units import format_seconds
from clustersim.hardware.degradation import format_id_ranges
from clustersim.report.draw.charts import bar, chart, diamond, points
from clustersim.report.figure import Figure, Traces, axis, short_labels, time_scale, typed
from clustersim.report.html_document import Card, drawn
from clustersim.report.labels import RowNames, disturbed_line, row_names
from clustersim.report.row_selection import shown_rows
from clustersim.report.step_breakdown import ROUNDING
from clustersim.results.simulation_result import SimulationResult
from clustersim.results.stragglers import LEAST, Straggler

SHARED_DELAY: Final = "A slow way delays all members of the groups that use it: the slowest rank stands first."
_VISIBLE: Final = 1e-3  # of the step: the least difference of waiting that is shown
_LONGER: Final = f"{100 * LEAST:g} %"


def is_told(result: SimulationResult) -> bool:
    """Whether there is anything to say: something is disturbed, or ranks of one pipeline rank wait differently."""
    differ = result.wait_times.spread >= _VISIBLE * result.step_time
    return bool(disturbed_line(result.scenario) or result.stragglers.ranks or differ)


def waiting_card(result: SimulationResult) -> Card:
    """Who waits for whom; a sentence where nobody in particular."""
    differ = result.wait_times.spread >= ROUNDING * result.step_time
    return drawn(
        "waiting.html",
        figure=waiting_figure(result) if differ else None,
        found=result.stragglers,
        names=names_of(result),
        nobody=nobody_slow(result),
        words=straggler_words,
        slow=slow,
        shared=SHARED_DELAY,
    )


def nobody_slow(result: SimulationResult) -> str:
    """What to say where no rank is a straggler."""
    disturbed = disturbed_line(result.scenario)
    if not disturbed:
        return (
            f"No rank's kernels take {_LONGER} longer than is usual on its stage, so none is called a straggler; "
            "where GPUs differ, the faster ones wait."
        )
    jittered = result.scenario.jitter is not None
    evens_out = " Jitter evens out over a rank's kernels: the ranks wait for whoever comes last each time."
    return (
        f"What is disturbed, {disturbed}, is not visible as kernel or communication time of single ranks: no rank's "
        f"kernels take {_LONGER} longer than is usual on its stage, no rank's communication {_LONGER} of the step."
        + evens_out
        * jittered
    )


def waiting_figure(result: SimulationResult) -> Figure:
    """For every pipeline rank by how much its ranks wait longer than the one that waits least, and stragglers."""
    names = names_of(result)
    shown = shown_rows(len(names.labels))
    scale = time_scale(result.wait_times.spread)
    longest = result.wait_times.spread / scale.size
    return chart(
        "waiting",
        [*_waits(result, shown, scale.size), *_stragglers(result, shown, scale.size)],
        axis(f"waits longer by [{scale.unit}]", range=[-0.02 * longest, 1.06 * longest]),  # stragglers stand at zero
        height=110 + max(18, min(28, 1400 // max(1, len(shown)))) * len(shown),
        narrow=short_labels(*([escape(words[row]) for row in shown] for words in (names.labels, names.short))),
        stacked="overlay",
        bargap=0.5,
    )


def names_of(result: SimulationResult) -> RowNames:
    """What those are called that wait."""
    return row_names(result.scenario, len(result.wait_times.mean))


def straggler_words(names: RowNames, straggler: Straggler) -> str:
    """A straggler in a sentence's beginning."""
    return f"{format_id_ranges(np.array(straggler.ranks), 'rank')} ({names.labels[straggler.kind]})"


def slowness(straggler: Straggler) -> str:
    """What takes longer, and by how much."""
    return " and ".join(f"{what} take{'s' * (what != 'kernels')} {longer}" for what, longer in slow(straggler))


def slow(straggler: Straggler) -> Iterator[tuple[str, str]]:
    """Each kind of work that takes longer, and by how much."""
    if straggler.computes_slowly:
        yield "kernels", f"{straggler.excess:.1%}"
    if straggler.delay:
        yield "communication", format_seconds(straggler.delay)


def _waits(result: SimulationResult, shown: IntArray, size: float) -> Traces:
    names, waits = names_of(result), result.wait_times
    labels = [escape(names.labels[row]) for row in shown]
    least, mean, most = (array[shown] for array in (waits.least, waits.mean, waits.most))
    words = [
        "{} to {}, mean {}".format(*map(format_seconds, times)) for times in np.stack((least, most, mean), 1).tolist()
    ]
    dot = {"symbol": "circle", "size": 8, "color": "@ink", "line": {"width": 1.5, "color": "@surface"}}
    return [
        bar(
            "the one that waits most", labels, typed((most - least) / size), {"color": "@muted", "opacity": 0.4},
            customdata=words, hovertemplate="<b>%{y}</b><br>waits %{customdata}<extra></extra>",
        ),
        points("mean", typed((mean - least) / size), labels, dot, hoverinfo="skip"),
    ]  # fmt: skip


def _stragglers(result: SimulationResult, shown: IntArray, size: float) -> Traces:
    names, found = names_of(result), [straggler for straggler in result.stragglers.slowest if straggler.kind in shown]
    if not found:
        return []
    longer = np.array([item.waits - result.wait_times.least[item.kind] for item in found])
    words = [
        f"{escape(straggler_words(names, element))}<br>{slowness(element)} longer, waits {format_seconds(element.waits)}"
        for element in found
    ]
    labels = [escape(names.labels[entry.kind]) for entry in found]
    return [points("straggler", typed(longer / size), labels, diamond("@alarm", 1), hovertext=words, hoverinfo="text")]
