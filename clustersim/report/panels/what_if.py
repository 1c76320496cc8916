"""What would change the step, and by how much? A bar for every change that was simulated, and a line for every other.

Bars are seconds for the work of the present step, so that one with twice the tokens is not worse for being longer: to
the left (plain) faster, to the right (hatched) slower.
"""

from html import escape
from typing import Final

from clustersim.common.units import format_bytes, format_signed_seconds, format_step_time
from clustersim.report import legend_markup
from clustersim.report.draw.charts import bar, chart, in_lines, reach
from clustersim.report.figure import SURFACE, Figure, axis, time_scale, typed
from clustersim.report.html_document import Card, drawn
from clustersim.results.what_if import Outcome, WhatIfs

_PERCENT: Final = 5e-5  # of the step: what is less is shown as no change
_ROOM, _NARROW_ROOM = 0.25, 0.9  # of the longest bar: beside it, for its words


def what_if_card(what_ifs: WhatIfs) -> Card:
    """The strip; without bars where nothing could be tried."""
    figure = what_if_figure(what_ifs) if what_ifs.tried else None
    return drawn("what_if.html", figure=figure, what_ifs=what_ifs, keys=legend_markup)


def what_if_figure(what_ifs: WhatIfs) -> Figure:
    """A bar for each change to either side of no change, in the order of the table."""
    names, outcomes = [case.words for case, _ in what_ifs.tried], [outcome for _, outcome in what_ifs.tried]
    scale, words = time_scale(max(abs(outcome.longer) for outcome in outcomes)), [escape(name) for name in names]
    ends = [outcome.longer / scale.size for outcome in outcomes]
    colours, patterns = zip(*map(_look, outcomes), strict=True)
    look = {
        "color": list(colours),
        "line": {"width": 0.6, "color": SURFACE},
        "pattern": {"shape": list(patterns), "size": 6, "fgcolor": SURFACE},
    }
    bars = bar(
        "change", words, typed(ends), look, text=[_bar_words(outcome) for outcome in outcomes], textposition="outside",
        cliponaxis=False, customdata=[_hover(outcome) for outcome in outcomes],
        hovertemplate="<b>%{y}</b><br>%{customdata}<extra></extra>",
    )  # fmt: skip
    return chart(
        "what-if",
        [bars],
        axis(f"the same work takes longer by [{scale.unit}]", range=reach(ends, _ROOM), zeroline=True),
        height=70 + 34 * len(words),
        narrow={
            "height": 70 + 56 * len(words),
            "font": {"size": 10},
            "xaxis": {"range": reach(ends, _NARROW_ROOM)},
            "yaxis": in_lines(words, names, tickfont={"size": 10}),
        },
        bargap=0.35,
    )


def side(outcome: Outcome) -> int:
    """Whether the work takes longer (1), shorter (-1), or neither."""
    return 0 if abs(outcome.part) < _PERCENT else (1 if outcome.longer > 0.0 else -1)


def _look(outcome: Outcome) -> tuple[str, str]:
    """Colour and pattern of a bar."""
    if not outcome.fits:
        return "@muted", "x"
    return ("@alarm", "/") if side(outcome) > 0 else ("@good", "")


def _bar_words(outcome: Outcome) -> str:
    mark = "" if outcome.fits else " ✕"
    return f"{outcome.part:+.1%}{mark}" if side(outcome) else f"no change{mark}"


def _hover(outcome: Outcome) -> str:
    more = "" if outcome.tokens == 1.0 else f" with {outcome.tokens:g} times the tokens"
    return (
        f"step {format_step_time(outcome.step_time)} ({format_signed_seconds(outcome.delta)}){more}<br>"
        f"tokens/s per GPU {outcome.faster:+.2%}<br>{format_bytes(outcome.peak_memory)} on the fullest GPU: "
        f"{'fits' if outcome.fits else 'does not fit'}"
    )
