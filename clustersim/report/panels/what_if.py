"""What would change the step time, and by how much?

A bar for every simulated change, and a line for every skipped one.

Bars are seconds for the same work as the present step, so that a change that doubles the tokens is not
worse for its longer step: to the left (plain) faster, to the right (hatched) slower.
"""

from html import escape
from typing import Final

from clustersim.common.units import format_bytes, format_signed_seconds, format_step_time
from clustersim.report import legend_markup
from clustersim.report.draw.charts import bar_figure, bar_trace, padded_range, wrapped_row_pixels, wrapped_tick_labels
from clustersim.report.figure import SURFACE, Figure, axis_layout, encode_floats, time_scale
from clustersim.report.html_document import Panel, render_panel
from clustersim.results.what_if import WhatIfOutcome, WhatIfReport
from clustersim.uncertainty.memory_error import fits_surely

_MIN_CHANGE: Final = 5e-5  # relative to the step: smaller changes are shown as no change
_MARGIN, _NARROW_MARGIN = 0.25, 0.9  # relative to the longest bar, for its label


def what_if_panel(what_ifs: WhatIfReport, changed: str = "") -> Panel:
    """Panel of the changes; without a figure if no change could be simulated.

    changed: what they are changes of, where no verdict says what helps: the panel then begins with that.
    """
    figure = what_if_figure(what_ifs) if what_ifs.simulated else None
    return render_panel(
        "what_if.html", figure=figure, what_ifs=what_ifs, changed=changed, keys=legend_markup, fits_surely=fits_surely
    )


def what_if_figure(what_ifs: WhatIfReport) -> Figure:
    """Diverging bars of the changes, in the order of the table."""
    names, outcomes = (
        [what_if.description for what_if, _ in what_ifs.simulated],
        [outcome for _, outcome in what_ifs.simulated],
    )
    scale, labels = (
        time_scale(max(abs(outcome.slowdown_seconds) for outcome in outcomes)),
        [escape(name) for name in names],
    )
    ends = [outcome.slowdown_seconds / scale.unit_size for outcome in outcomes]
    colours, patterns = zip(*map(_bar_style, outcomes), strict=True)
    marker = {
        "color": list(colours),
        "line": {"width": 0.6, "color": SURFACE},
        "pattern": {"shape": list(patterns), "size": 6, "fgcolor": SURFACE},
    }
    trace = bar_trace(
        "change",
        labels,
        encode_floats(ends),
        marker,
        text=[_bar_label(outcome) for outcome in outcomes],
        textposition="outside",
        cliponaxis=False,
        customdata=[_hover_text(outcome) for outcome in outcomes],
        hovertemplate="<b>%{y}</b><br>%{customdata}<extra></extra>",
    )
    return bar_figure(
        "what-if",
        [trace],
        axis_layout(
            f"change of the time for the same work [{scale.unit}]", range=padded_range(ends, _MARGIN), zeroline=True
        ),
        height=70 + 34 * len(labels),
        narrow={
            "height": 70 + wrapped_row_pixels(names) * len(labels),
            "font": {"size": 10},
            "xaxis": {"range": padded_range(ends, _NARROW_MARGIN)},
            "yaxis": wrapped_tick_labels(labels, names, tickfont={"size": 10}),
        },
        bargap=0.35,
    )


def change_sign(outcome: WhatIfOutcome) -> int:
    """1 if the same work takes longer, -1 if shorter, 0 if neither."""
    return 0 if abs(outcome.slowdown_ratio) < _MIN_CHANGE else (1 if outcome.slowdown_seconds > 0.0 else -1)


def _bar_style(outcome: WhatIfOutcome) -> tuple[str, str]:
    """Colour and pattern of a bar."""
    if not outcome.fits_in_memory:
        return "@muted", "x"
    return ("@alarm", "/") if change_sign(outcome) > 0 else ("@good", "")


def _bar_label(outcome: WhatIfOutcome) -> str:
    mark = "" if outcome.fits_in_memory else " ✕"
    return f"{outcome.slowdown_ratio:+.1%}{mark}" if change_sign(outcome) else f"no change{mark}"


def _hover_text(outcome: WhatIfOutcome) -> str:
    token_note = "" if outcome.token_ratio == 1.0 else f" with {outcome.token_ratio:g} times the tokens"
    return (
        f"step {format_step_time(outcome.step_time)} "
        f"({format_signed_seconds(outcome.step_time_difference)}){token_note}<br>"
        f"tokens/s per GPU {outcome.speedup:+.2%}<br>{format_bytes(outcome.peak_memory)} on the peak-memory GPU: "
        f"{'fits' if outcome.fits_in_memory else 'does not fit'}"
    )
