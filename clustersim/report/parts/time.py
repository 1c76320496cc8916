"""Where does the step's time go? Parts, each from where the last one ends, up to the step time; and every stage.

The first part, computation, is in two where it can be: what the model's FLOP take at the peak, and what kernels need
more.
Wide bars are the mean over ranks; thin ones below them are the critical path, whose parts sum to the step time, too.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape
from typing import Final

from clustersim.analysis.losses import BELOW_PEAK
from clustersim.analysis.parts import PARTS, Part
from clustersim.answer import Answer
from clustersim.report.document import Card, card, prose
from clustersim.report.draw.bars import Drawn, bar, chart, in_lines, in_parts
from clustersim.report.figure import Figure, axis, legend, marker, share_words, short_labels, time_scale
from clustersim.report.keys import Cells, part_name, table
from clustersim.report.rows import bars, height_of, narrow_height
from clustersim.report.theme import PART_LOOKS, Category
from clustersim.report.times import Times
from clustersim.report.view import Timeline
from clustersim.units import Seconds, format_flops, format_seconds, format_step_time

THIN: Final = "thin: the critical path"
IDEAL: Final = "ideal: model FLOP at the peak"
_WIDE: Final = 0.62  # of a row
_THIN: Final = 0.12


def parts_card(result: Answer, times: Times) -> Card:
    """Where the time goes, drawn and in numbers; what is called ideal, or why there is none."""
    peak = format_flops(result.flops.model / result.step_time / result.ranks / result.mfu()) if times.ideal else ""
    caption = prose("ideal", seconds=format_step_time(times.ideal), peak=peak) if times.ideal else prose("no_ideal")
    return card(
        "Where the time goes", waterfall(times), parts_table(times), lead=prose("parts"), caption=caption, beside=True
    )


def stages_card(times: Times, timeline: Timeline) -> Card:
    """The whole step of every row: neighbours that are alike share a bar."""
    rows = timeline.rows
    drawn = bars([row.title for row in rows], [row.short for row in rows], times.stages, times.whole)
    scale, labels = time_scale(times.whole), [escape(label) for label in drawn.labels]
    values = drawn.values[:, [part.place for part in times.present]]
    traces = in_parts(
        labels, [(part.value, PART_LOOKS[part]) for part in times.present], values, scale.size,
        [map(format_seconds, column) for column in values.T.tolist()],
    )  # fmt: skip
    height = height_of(len(labels))
    figure = chart(
        "stages", traces, axis(f"time [{scale.unit}]", range=[0, times.whole / scale.size or 1]), height=height,
        narrow={**short_labels(labels, drawn.lines), "height": narrow_height(height, len(traces))},
        stacked="stack", bargap=0.22,
    )  # fmt: skip
    lead = prose("stages", row=timeline.row_word) + drawn.note("the step")
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
        name, look, seconds, on_path = part.value, PART_LOOKS[part], *_seconds(times, part)
        if part is PARTS[0] and times.ideal:
            rows.append(Fall(IDEAL, look, 0.0, times.ideal, 0.0, None))
            start, seconds, name = times.ideal, seconds - times.ideal, BELOW_PEAK
        rows.append(Fall(name, look, start, seconds, path, on_path))
        start, path = start + seconds, path + on_path
    return rows


def _seconds(times: Times, part: Part) -> tuple[Seconds, Seconds]:
    """A part's mean, and its time on the critical path."""
    return float(times.step[part.place]), float(times.path[part.place])


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


def parts_table(times: Times) -> str:
    """The parts in numbers, and their sum."""
    step = format_step_time(times.whole), "100.0%", format_step_time(float(times.path.sum()))
    rows = [*_part_rows(times), Cells(("step", *step), "sum")]
    return table(("part", "mean", "share", "critical path"), rows)


def _part_rows(times: Times) -> Iterator[Cells]:
    """A part's name, its mean and share, and its time on the critical path; of computation what of it is ideal."""

    def cells(seconds: Seconds) -> Sequence[str]:
        return format_seconds(seconds), share_words(seconds / times.whole)

    for part in times.present:
        mean, path = _seconds(times, part)
        yield Cells((part_name(part), *cells(mean), format_seconds(path)))
        if part is PARTS[0] and times.ideal:
            for words, seconds in ((IDEAL, times.ideal), (BELOW_PEAK, mean - times.ideal)):
                yield Cells((words, *cells(seconds), ""), "of")
