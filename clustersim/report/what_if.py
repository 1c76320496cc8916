"""What would change the step, and by how much? A bar for every change that was simulated, and a line for every other.

Bars are seconds for the work of the present step, so that one with twice the tokens is not worse for being longer: to
the left (plain) faster, to the right (hatched) slower.
"""

from html import escape
from typing import Any, Final

from clustersim.analysis.what_if import Outcome, WhatIf, WhatIfs
from clustersim.report.document import Card, section, slot
from clustersim.report.figure import SURFACE, Figure, axis, layout, time_scale, typed, wrapped
from clustersim.report.keys import Cells, signed, table, unbroken
from clustersim.units import format_bytes, format_number, format_step_time

TITLE: Final = "What if"
_LEAD: Final = (
    "One thing changed at a time, and simulated again. Bars show by how much longer (to the right, hatched) or shorter "
    "the work of the present step takes; grey and ✕: then it does not fit into memory."
)
_PERCENT: Final = 5e-5  # of the step: what is less is shown as no change
_ROOM, _NARROW_ROOM = 0.25, 0.9  # of the longest bar: beside it, for its words


def what_if_card(what_ifs: WhatIfs) -> Card:
    """The strip; without bars where nothing could be tried."""
    untried = _untried(what_ifs.untried)
    if not what_ifs.tried:
        return Card(section(TITLE, untried, lead="No change was simulated."))
    figure = what_if_figure(what_ifs)
    body = slot(figure) + what_if_table(what_ifs) + untried
    return Card(section(TITLE, body, lead=_LEAD, caption=" ".join(_notes(what_ifs))), (figure,))


def what_if_figure(what_ifs: WhatIfs) -> Figure:
    """A bar for each change to either side of no change, in the order of the table."""
    words = [escape(case.words) for case, _ in what_ifs.tried]
    outcomes = [outcome for _, outcome in what_ifs.tried]
    most = max(abs(outcome.longer) for outcome in outcomes)
    scale = time_scale(most)
    return Figure(
        name="what-if",
        traces=[_bars(words, outcomes, scale.size)],
        layout=layout(
            xaxis=axis(
                f"the same work takes longer by [{scale.unit}]",
                range=_range(outcomes, scale.size, _ROOM),
                fixedrange=True,
                zeroline=True,
            ),
            yaxis=axis("", autorange="reversed", fixedrange=True, type="category", ticksuffix="  "),
            dragmode=False,
            bargap=0.35,
        ),
        height=70 + 34 * len(words),
        narrow={
            "height": 70 + 56 * len(words),
            "font": {"size": 10},
            "xaxis": {"range": _range(outcomes, scale.size, _NARROW_ROOM)},
            "yaxis": {
                "tickmode": "array",
                "tickvals": words,
                "ticktext": [wrapped(case.words) for case, _ in what_ifs.tried],
                "tickfont": {"size": 10},
            },
        },
    )


def what_if_table(what_ifs: WhatIfs) -> str:
    """The step as it is and with each change: its time, the rate, and whether it fits."""
    rate, fits = what_ifs.tokens_per_s_per_gpu, _fits(what_ifs.fits)
    now = (unbroken(format_step_time(what_ifs.step_time)), "", format_number(rate), fits)
    tried = (Cells((case.words, *_cells(outcome))) for case, outcome in what_ifs.tried)
    heads = ("change", "step", "same work longer by", "tokens/s per GPU", "memory")
    return table(heads, [Cells(("as it is", *now), "sum"), *tried])


def _range(outcomes: list[Outcome], size: float, room: float) -> list[float]:
    """Of the axis: from the longest bar to the left to the longest to the right, with room for words beside both."""
    ends = [outcome.longer / size for outcome in outcomes]
    beside = room * max(map(abs, ends)) or 1.0
    return [min(0.0, *ends) - beside, max(0.0, *ends) + beside]


def side(outcome: Outcome) -> int:
    """Whether the work takes longer (1), shorter (-1), or neither."""
    return 0 if abs(outcome.part) < _PERCENT else (1 if outcome.longer > 0.0 else -1)


def _bars(words: list[str], outcomes: list[Outcome], size: float) -> dict[str, Any]:
    looks = [_look(outcome) for outcome in outcomes]
    return {
        "type": "bar",
        "orientation": "h",
        "name": "change",
        "y": words,
        "x": typed([outcome.longer / size for outcome in outcomes]),
        "text": [_bar_words(outcome) for outcome in outcomes],
        "textposition": "outside",
        "cliponaxis": False,
        "customdata": [_hover(outcome) for outcome in outcomes],
        "hovertemplate": "<b>%{y}</b><br>%{customdata}<extra></extra>",
        "marker": {
            "color": [colour for colour, _ in looks],
            "line": {"width": 0.6, "color": SURFACE},
            "pattern": {"shape": [pattern for _, pattern in looks], "size": 6, "fgcolor": SURFACE},
        },
    }


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
        f"step {format_step_time(outcome.step_time)} ({signed(outcome.delta)}){more}<br>"
        f"tokens/s per GPU {outcome.faster:+.2%}<br>{format_bytes(outcome.peak_memory)} on the fullest GPU: "
        f"{'fits' if outcome.fits else 'does not fit'}"
    )


def _cells(outcome: Outcome) -> tuple[str, ...]:
    step = unbroken(format_step_time(outcome.step_time))
    rate = format_number(outcome.tokens_per_s_per_gpu)
    return step, f"{signed(outcome.longer)} ({outcome.part:+.1%})", rate, _fits(outcome.fits)


def _fits(fits: bool) -> str:
    return "✓ fits" if fits else "✕ does not fit"


def _notes(what_ifs: WhatIfs) -> list[str]:
    """What must be known of outcomes, each note once with the changes that it is about."""
    notes = dict.fromkeys(case.note for case, _ in what_ifs.tried if case.note)
    about = {note: [case.words for case, _ in what_ifs.tried if case.note == note] for note in notes}
    return [f"{', '.join(words)}: {note}." for note, words in about.items()]


def _untried(cases: tuple[WhatIf, ...]) -> str:
    """What was not simulated, in a line for each reason."""
    reasons = dict.fromkeys(case.note for case in cases)
    lines = [(", ".join(case.words for case in cases if case.note == reason), reason) for reason in reasons]
    items = "".join(f"<li>{escape(words)}: {escape(reason)}</li>" for words, reason in lines)
    return f'<h3 style="margin-top:16px">Not simulated</h3><ul>{items}</ul>' if items else ""
