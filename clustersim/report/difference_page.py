"""How are two answers looked at? The difference, what was changed, from which parts it comes, both timelines.

The waterfall begins at A's step time; each part begins where the one before it ends, and the last ends at B's step
time. Both timelines have one axis, which is zoomed in both at once (`assets/difference.js`).
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Final

import numpy as np

from clustersim.arrays import FloatArray
from clustersim.report.answer_timeline import timeline_of
from clustersim.report.difference import Difference, headline, lines, words_of
from clustersim.report.document import Card, card, document, drawn, prose
from clustersim.report.draw.bars import Drawn, bar, chart, in_lines, ticks
from clustersim.report.draw.timeline import timeline_caption, timeline_figure
from clustersim.report.figure import Figure, axis, marker, short_labels, time_scale
from clustersim.report.keys import Cells, part_name, signed, table
from clustersim.report.parts.difference import part_changes
from clustersim.report.rows import height_of, shown_ranks, shown_rows
from clustersim.report.theme import PART_LOOKS
from clustersim.report.timeline_arrays import MOST_BYTES, drawing
from clustersim.report.view import Timeline
from clustersim.units import Seconds, format_step_time

if TYPE_CHECKING:
    from clustersim.answer import Answer

NAMES: Final = ("A", "B")
_CUT: Final = "The axis does not begin at zero."


def difference_page(difference: Difference, results: "Sequence[Answer]") -> str:
    """The page as HTML text."""
    cards = [_verdict_card(difference), _inputs_card(difference)]
    if difference.different:
        cards.append(_waterfall_card(difference))
    if len(difference.row_labels) > 1 and difference.different:
        word = difference.row_labels[0].rpartition(" ")[0]
        cards.append(card(f"Each {word}", stages_figure(difference), lead=prose("different_stages")))
    timelines = [timeline_of(result, shown_ranks(result)) for result in results]
    title = f"{difference.titles[0]} and {difference.titles[1]}"
    return document(title, [*cards, _lanes_card(difference, timelines)], scripts=("difference",))


def _verdict_card(difference: Difference) -> Card:
    rows = (Cells((line.name, line.first, line.second, line.change)) for line in lines(difference))
    return drawn(
        "difference.html",
        answer=headline(difference),
        titles=list(zip(NAMES, difference.titles, strict=True)),
        numbers=table(("", *NAMES, "change"), rows),
        notes=difference.notes,
    )


def _inputs_card(difference: Difference) -> Card:
    title = "What was changed"
    if not difference.inputs:
        return card(title, "No key of the input differs.")
    rows = (Cells((each.key, words_of(each.first), words_of(each.second))) for each in difference.inputs)
    return card(title, table(("input", *NAMES), rows, words=(1, 2)))


def _waterfall_card(difference: Difference) -> Card:
    figure = difference_waterfall(difference)
    cut = _CUT if figure.layout["xaxis"]["range"][0] > 0.0 else ""
    title, numbers = "Where the difference comes from", _parts_table(difference)
    return card(title, figure, numbers, lead=prose("difference"), caption=cut, beside=True)


def difference_waterfall(difference: Difference) -> Figure:
    """A's step, a bar for every part that differs, each from where the last one ended, B's step."""
    parts = difference.different
    deltas = [float(difference.deltas[part.place]) for part in parts]
    first, second = map(float, difference.step_times)
    ends = first + np.cumsum([0.0, *deltas])
    scale = time_scale(max(first, second))
    bars = [
        bar(
            part.value, [part.value], [delta / scale.size], marker(PART_LOOKS[part]), base=[start / scale.size],
            text=[signed(delta)], textposition="outside", cliponaxis=False,
            hovertemplate=f"<b>{part.value}</b><br>{signed(delta)} in B<extra></extra>",
        )
        for part, delta, start in zip(parts, deltas, ends[:-1].tolist(), strict=True)
    ]  # fmt: skip
    labels = ["<b>A</b>", *(part.value for part in parts), "<b>B</b>"]
    short = in_lines(labels[1:-1], labels[1:-1])["ticktext"]
    return chart(
        "difference-parts",
        [_whole_bar("A", first, "@muted", scale.size), *bars, _whole_bar("B", second, "@ink", scale.size)],
        axis(f"step time [{scale.unit}]", range=_range(ends, scale.size, 0.25)),
        height=70 + 34 * len(labels),
        narrow={
            "font": {"size": 10},
            "xaxis": {"range": _range(ends, scale.size, 0.9)},
            "yaxis": ticks(labels, [labels[0], *short, labels[-1]]),
        },
        bargap=0.28,
    )


def _range(ends: FloatArray, size: float, room: float) -> list[float]:
    """Of the axis: where the running sum goes, with room for words; not from zero where parts would be too small."""
    low, high = float(ends.min()) / size, float(ends.max()) / size
    span = high - low
    begin = low - max(0.35, room) * span
    return [max(0.0, begin), high + room * span] if begin > 0.0 else [0.0, high * (1.0 + room)]


def _whole_bar(name: str, seconds: Seconds, colour: str, size: float) -> Drawn:
    return bar(
        f"step of {name}", [f"<b>{name}</b>"], [seconds / size], {"color": colour}, hoverinfo="skip",
        text=[f"<b>{format_step_time(seconds)}</b>"], textposition="outside", cliponaxis=False,
    )  # fmt: skip


def _parts_table(difference: Difference) -> str:
    steps = map(format_step_time, difference.step_times.tolist())
    step = Cells(("step", *steps, difference.words(difference.longer)), "sum")
    rows = (Cells((part_name(part), *difference.amounts(part))) for part in difference.present)
    return table(("part", *NAMES, "longer by"), [*rows, step])


def stages_figure(difference: Difference) -> Figure:
    """For each pipeline rank a bar to each side: by how much parts are longer and shorter in B."""
    shown = shown_rows(len(difference.row_labels))
    changes, labels = difference.stage_deltas[shown], [difference.row_labels[row] for row in shown]
    scale = time_scale(float(np.abs(changes).max()))
    return chart(
        "difference-stages",
        part_changes(labels, changes, scale),
        axis(f"longer in B by [{scale.unit}]", zeroline=True),
        height=height_of(len(labels)),
        narrow=short_labels(labels, [str(row) for row in shown]),
        stacked="relative",
        bargap=0.3,
    )


def _lanes_card(difference: Difference, timelines: Sequence[Timeline]) -> Card:
    """Both timelines, one above the other, on the axis of the longer one; each may take half of a page's bytes."""
    whole = max(float(timeline.spans.end.max(initial=0.0)) for timeline in timelines)
    drawings = [drawing(timeline, MOST_BYTES // 2) for timeline in timelines]
    figures = [
        _aligned(timeline_figure(each, name=f"timeline-{name.lower()}"), whole)
        for each, name in zip(drawings, NAMES, strict=True)
    ]
    lanes = list(zip(NAMES, difference.titles, figures, map(timeline_caption, drawings), strict=True))
    return drawn("lanes.html", *figures, lanes=lanes, lead=prose("lanes"))


def _aligned(figure: Figure, whole: Seconds) -> Figure:
    """A timeline with an axis of so many seconds."""
    scale = time_scale(whole)
    reach = whole / scale.size or 1.0
    common = axis(f"time [{scale.unit}]", range=[0, reach], maxallowed=reach)
    drawn = {**figure.layout, "xaxis": {**figure.layout["xaxis"], **common}}
    return replace(figure, layout=drawn, facts={**figure.facts, "size": scale.size})
