"""Where does the step's time go? Parts, each from where the last one ends, up to the step time; and every stage.

The first part, computation, is in two where it can be: what the model's FLOP take at the peak, and what kernels need
more.
Wide bars are the mean over ranks; thin ones below them are the critical path, whose parts sum to the step time, too.
"""

from collections.abc import Iterator
from html import escape
from itertools import accumulate
from typing import Final

from clustersim.common.units import Seconds, format_seconds, format_step_time
from clustersim.report.draw.charts import Drawn, bar, chart, in_lines, stacked
from clustersim.report.figure import Figure, axis, marker, share_words, time_scale
from clustersim.report.html_document import Card, card, drawn, prose
from clustersim.report.legend_markup import part_name
from clustersim.report.row_selection import bars
from clustersim.report.step_breakdown import Times
from clustersim.report.theme import PART_LOOKS, Category
from clustersim.report.timeline_data import Timeline
from clustersim.results.simulation_result import SimulationResult
from clustersim.results.time_categories import PARTS
from clustersim.results.time_losses import BELOW_PEAK

THIN: Final = "thin: the critical path"
IDEAL: Final = "ideal: model FLOP at the peak"
_WIDE: Final = 0.62  # of a row
_THIN: Final = 0.12


def parts_card(result: SimulationResult, times: Times) -> Card:
    """Where the time goes, drawn and in numbers; what is called ideal, or why there is none."""
    return drawn(
        "parts.html",
        figure=waterfall(times),
        result=result,
        times=times,
        ideal=IDEAL,
        below_peak=BELOW_PEAK,
        part_name=part_name,
    )


def stages_card(times: Times, timeline: Timeline) -> Card:
    """The whole step of every row: neighbours that are alike share a bar."""
    rows, scale = timeline.rows, time_scale(times.whole)
    alike = bars([row.title for row in rows], [row.short for row in rows], times.stages, times.whole)
    figure = stacked(
        "stages", alike, {part.place: (part.value, PART_LOOKS[part]) for part in times.present},
        axis(f"time [{scale.unit}]", range=[0, times.whole / scale.size or 1]), size=scale.size, told=format_seconds,
    )  # fmt: skip
    lead = prose("stages", row=timeline.row_word) + alike.note("the step")
    return card(f"Each {timeline.row_word}", figure, lead=lead, caption=timeline.row_note)


Fall = tuple[str, Category, Seconds, Seconds]
"""A row of the waterfall: name, look, seconds, and seconds on the critical path."""


def falls(times: Times) -> Iterator[Fall]:
    """The rows of the waterfall, which sum to the step time; so do those of the critical path."""
    for part in times.present:
        look, seconds, path = PART_LOOKS[part], float(times.step[part.place]), float(times.path[part.place])
        if part is PARTS[0] and times.ideal:
            yield IDEAL, look, times.ideal, 0.0  # on the critical path it is not told apart
            yield BELOW_PEAK, look, seconds - times.ideal, path
        else:
            yield part.value, look, seconds, path


def waterfall(times: Times) -> Figure:
    """For each part a bar and a thin one, each starting where the last one ended; the last bar is the whole step."""
    rows, total, scale = list(falls(times)), times.whole, time_scale(times.whole)
    starts = accumulate((seconds for _, _, seconds, _ in rows), initial=0.0)
    wide = [_part_bar(row, start, total, scale.size) for row, start in zip(rows, starts, strict=False)]
    starts = accumulate((path for *_, path in rows), initial=0.0)
    on_path = zip(rows, starts, strict=False)
    paths = [_path_bar(row, start, scale.size) for row, start in on_path if row[0] != IDEAL]
    if paths:
        paths[0] |= {"name": THIN, "showlegend": True}
    end = bar(
        "step", ["<b>step</b>"], [total / scale.size], {"color": "@ink"}, hoverinfo="skip", showlegend=False,
        text=[f"<b>{format_step_time(total)}</b>"], textposition="outside",
    )  # fmt: skip
    reach = total / scale.size
    places, names = list(range(len(rows) + 1)), [name for name, *_ in rows]
    short = in_lines(places[:-1], names, tickfont={"size": 10})
    narrow = {**short, "tickvals": places, "ticktext": [*short["ticktext"], "<b>step</b>"]}
    return chart(
        "waterfall", [*wide, *paths, end], axis(f"time [{scale.unit}]", range=[0, reach * 1.3 if reach else 1]),
        height=70 + 34 * (len(rows) + 1),
        narrow={"font": {"size": 10}, "xaxis": {"range": [0, reach * 1.9 if reach else 1]}, "yaxis": narrow},
        showlegend=True, bargap=0.28,
    )  # fmt: skip


def _part_bar(row: Fall, start: Seconds, total: Seconds, size: float) -> Drawn:
    (part, look, seconds, _), share = row, row[2] / total
    name = escape(part)
    return bar(
        name, [name], [seconds / size], marker(look), base=[start / size],
        text=[f"{format_seconds(seconds)} · {share_words(share)}"], textposition="outside", cliponaxis=False,
        hovertemplate=f"<b>{name}</b><br>{format_seconds(seconds)}, {share:.2%} of the step<extra></extra>",
        showlegend=False, width=_WIDE, offset=-0.4,
    )  # fmt: skip


def _path_bar(row: Fall, start: Seconds, size: float) -> Drawn:
    part, _, _, seconds = row
    name = "computation" if part == BELOW_PEAK else escape(part)
    return bar(
        f"{name} on the critical path", [escape(part)], [seconds / size], {"color": "@ink", "opacity": 0.55},
        base=[start / size], width=_THIN, offset=_WIDE - 0.4 + 0.03, legendgroup="path", showlegend=False,
        hovertemplate=f"<b>{name}</b> on the critical path<br>{format_seconds(seconds)}<extra></extra>",
    )  # fmt: skip
