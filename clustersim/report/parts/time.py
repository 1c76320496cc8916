"""Where does the step's time go? Parts, each from where the last one ends, up to the step time; and every stage.

The first part, computation, is in two where it can be: what the model's FLOP take at the peak, and what kernels need
more.
Wide bars are the mean over ranks; thin ones below them are the critical path, whose parts sum to the step time, too.
"""

from dataclasses import dataclass
from html import escape
from typing import Final

from clustersim.analysis.losses import BELOW_PEAK
from clustersim.analysis.parts import PARTS
from clustersim.answer import Answer
from clustersim.report.document import Card, card, drawn, prose
from clustersim.report.draw.bars import Drawn, bar, chart, in_lines, stacked
from clustersim.report.figure import Figure, axis, legend, marker, share_words, time_scale
from clustersim.report.keys import part_name
from clustersim.report.rows import bars
from clustersim.report.theme import PART_LOOKS, Category
from clustersim.report.times import Times
from clustersim.report.view import Timeline
from clustersim.units import Seconds, format_seconds, format_step_time

THIN: Final = "thin: the critical path"
IDEAL: Final = "ideal: model FLOP at the peak"
_WIDE: Final = 0.62  # of a row
_THIN: Final = 0.12


def parts_card(result: Answer, times: Times) -> Card:
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


@dataclass(frozen=True, slots=True)
class Fall:
    """One row of the waterfall. path: seconds on the critical path, from path_start; None: not told apart there."""

    name: str
    look: Category
    start: Seconds
    seconds: Seconds
    path_start: Seconds
    path: Seconds | None


def falls(times: Times) -> list[Fall]:
    """The rows of the waterfall, which sum to the step time; so do those of the critical path."""
    rows: list[Fall] = []
    start = path = 0.0
    for part in times.present:
        seconds, on_path = float(times.step[part.place]), float(times.path[part.place])
        name, look = part.value, PART_LOOKS[part]
        if part is PARTS[0] and times.ideal:
            rows.append(Fall(IDEAL, look, 0.0, times.ideal, 0.0, None))
            start, seconds, name = times.ideal, seconds - times.ideal, BELOW_PEAK
        rows.append(Fall(name, look, start, seconds, path, on_path))
        start, path = start + seconds, path + on_path
    return rows


def waterfall(times: Times) -> Figure:
    """For each part a bar and a thin one, each starting where the last one ended; the last bar is the whole step."""
    rows, total, scale = falls(times), times.whole, time_scale(times.whole)
    wide = [_part_bar(row, total, scale.size) for row in rows]
    paths = [_path_bar(row, row.path, scale.size) for row in rows if row.path is not None]
    if paths:
        paths[0] |= {"name": THIN, "showlegend": True}
    end = bar(
        "step", ["<b>step</b>"], [total / scale.size], {"color": "@ink"}, hoverinfo="skip", showlegend=False,
        text=[f"<b>{format_step_time(total)}</b>"], textposition="outside",
    )  # fmt: skip
    reach = total / scale.size
    places, names = list(range(len(rows) + 1)), [row.name for row in rows]
    short = in_lines(places[:-1], names, tickfont={"size": 10})
    narrow = {**short, "tickvals": places, "ticktext": [*short["ticktext"], "<b>step</b>"]}
    return chart(
        "waterfall", [*wide, *paths, end], axis(f"time [{scale.unit}]", range=[0, reach * 1.3 if reach else 1]),
        height=70 + 34 * (len(rows) + 1),
        narrow={"font": {"size": 10}, "xaxis": {"range": [0, reach * 1.9 if reach else 1]}, "yaxis": narrow},
        showlegend=True, legend=legend(), bargap=0.28,
    )  # fmt: skip


def _part_bar(row: Fall, total: Seconds, size: float) -> Drawn:
    share, name = row.seconds / total, escape(row.name)
    return bar(
        name, [name], [row.seconds / size], marker(row.look), base=[row.start / size],
        text=[f"{format_seconds(row.seconds)} · {share_words(share)}"], textposition="outside", cliponaxis=False,
        hovertemplate=f"<b>{name}</b><br>{format_seconds(row.seconds)}, {share:.2%} of the step<extra></extra>",
        showlegend=False, width=_WIDE, offset=-0.4,
    )  # fmt: skip


def _path_bar(row: Fall, seconds: Seconds, size: float) -> Drawn:
    name = "computation" if row.name == BELOW_PEAK else escape(row.name)
    return bar(
        f"{name} on the critical path", [escape(row.name)], [seconds / size], {"color": "@ink", "opacity": 0.55},
        base=[row.path_start / size], width=_THIN, offset=_WIDE - 0.4 + 0.03, legendgroup="path", showlegend=False,
        hovertemplate=f"<b>{name}</b> on the critical path<br>{format_seconds(seconds)}<extra></extra>",
    )  # fmt: skip
