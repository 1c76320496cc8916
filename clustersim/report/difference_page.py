"""How are two answers looked at? The difference, what was changed, from which parts it comes, both timelines.

The waterfall begins at A's step time; each part begins where the one before it ends, and the last ends at B's step
time. Both timelines have one axis, which is zoomed in both at once (`assets/difference.js`).
"""

from collections.abc import Sequence
from dataclasses import replace
from html import escape
from pathlib import Path
from typing import Any, Final

import numpy as np

from clustersim.analysis.parts import PARTS, Part
from clustersim.arrays import FloatArray
from clustersim.report.answer_table import PART_LOOKS
from clustersim.report.difference import Difference, headline, lines, words_of
from clustersim.report.document import Card, document, figure_card, section, slot
from clustersim.report.figure import (
    Figure,
    Scale,
    axis,
    layout,
    legend,
    marker,
    short_labels,
    time_scale,
    typed,
    wrapped,
)
from clustersim.report.files import write_text_atomically
from clustersim.report.keys import Cells, named, signed, table
from clustersim.report.rows import height_of, shown_rows
from clustersim.report.timeline import timeline_caption, timeline_figure
from clustersim.report.timeline_arrays import MOST_BYTES, drawing
from clustersim.report.view import Timeline
from clustersim.units import Seconds, format_step_time

NAMES: Final = ("A", "B")
_WATERFALL_LEAD: Final = (
    "From A's step time to B's. Each part begins where the one before it ends: to the right what takes longer in B, to "
    "the left what takes less; the mean over all ranks."
)
_CUT: Final = "The axis does not begin at zero."
_STAGES_LEAD: Final = (
    "By how much each part is longer (to the right) or shorter in B. Every row sums to the difference of the step "
    "times, since all wait for each other: what one computes longer, the others wait."
)
_LANES_LEAD: Final = (
    "On one time axis: drag to zoom in both, double-click to see the whole step, point at a box for its contents and "
    "its cause. Thin lanes are communication, the outline is the critical path."
)


def write_difference(difference: Difference, timelines: Sequence[Timeline], path: str | Path) -> None:
    """Write the page, wholly or not at all; raise OutputError if it cannot be written."""
    write_text_atomically(path, difference_page(difference, timelines))


def difference_page(difference: Difference, timelines: Sequence[Timeline]) -> str:
    """The page as HTML text. timelines: A's and B's."""
    cards = [_verdict_card(difference), _inputs_card(difference)]
    if difference.different:
        cards.append(_waterfall_card(difference))
    if len(difference.row_labels) > 1 and difference.different:
        cards.append(figure_card(f"Each {_row_word(difference)}", stages_figure(difference), lead=_STAGES_LEAD))
    title = f"{difference.titles[0]} and {difference.titles[1]}"
    return document(title, [*cards, _lanes_card(difference, timelines)], scripts=("difference",))


def _verdict_card(difference: Difference) -> Card:
    subjects = "<br>".join(
        f"<b>{name}</b>: {escape(title)}" for name, title in zip(NAMES, difference.titles, strict=True)
    )
    notes = "".join(f"<li>{escape(note)}</li>" for note in difference.notes)
    notes = f'<ul class="alerts">{notes}</ul>' if notes else ""
    rows = (Cells((line.name, line.first, line.second, line.change)) for line in lines(difference))
    numbers = table(("", *NAMES, "change"), rows)
    return Card(
        f'<section class="card verdict" aria-label="difference"><h1>{escape(headline(difference))}</h1>'
        f'<p class="subject">{subjects}</p>{numbers}{notes}</section>'
    )


def _inputs_card(difference: Difference) -> Card:
    if not difference.inputs:
        return Card(section("What was changed", "<p>No key of the input differs.</p>"))
    rows = (Cells((each.key, words_of(each.first), words_of(each.second))) for each in difference.inputs)
    return Card(section("What was changed", table(("input", *NAMES), rows, words=(1, 2))))


def _waterfall_card(difference: Difference) -> Card:
    figure = difference_waterfall(difference)
    cut = _CUT if figure.layout["xaxis"]["range"][0] > 0.0 else ""
    body = f'<div class="two wide-left">{slot(figure)}{_parts_table(difference)}</div>'
    return Card(section("Where the difference comes from", body, lead=_WATERFALL_LEAD, caption=cut), (figure,))


def difference_waterfall(difference: Difference) -> Figure:
    """A's step, a bar for every part that differs, each from where the last one ended, B's step."""
    parts = difference.different
    deltas = [float(difference.deltas[part.place]) for part in parts]
    first, second = map(float, difference.step_times)
    ends = first + np.cumsum([0.0, *deltas])
    scale = time_scale(max(first, second))
    size = scale.size
    whole = [("A", first, "@muted"), ("B", second, "@ink")]
    traces = [
        _whole_bar(*whole[0], size),
        *(
            _part_bar(part, delta, start, scale)
            for part, delta, start in zip(parts, deltas, ends[:-1].tolist(), strict=True)
        ),
        _whole_bar(*whole[1], size),
    ]
    labels = ["<b>A</b>", *(part.value for part in parts), "<b>B</b>"]
    return Figure(
        name="difference-parts",
        traces=traces,
        layout=layout(
            xaxis=axis(f"step time [{scale.unit}]", range=_range(ends, size, 0.25), fixedrange=True),
            yaxis=axis("", autorange="reversed", fixedrange=True, type="category", ticksuffix="  "),
            dragmode=False,
            bargap=0.28,
        ),
        height=70 + 34 * len(labels),
        narrow={
            "font": {"size": 10},
            "xaxis": {"range": _range(ends, size, 0.9)},
            "yaxis": {"tickmode": "array", "tickvals": labels, "ticktext": [_short(label) for label in labels]},
        },
    )


def _range(ends: FloatArray, size: float, room: float) -> list[float]:
    """Of the axis: where the running sum goes, with room for words; not from zero where parts would be too small."""
    low, high = float(ends.min()) / size, float(ends.max()) / size
    span = high - low
    begin = low - max(0.35, room) * span
    return [max(0.0, begin), high + room * span] if begin > 0.0 else [0.0, high * (1.0 + room)]


def _short(label: str) -> str:
    return label if label.startswith("<b>") else wrapped(label)


def _part_bar(part: Part, delta: Seconds, start: Seconds, scale: Scale) -> dict[str, Any]:
    return {
        "type": "bar", "orientation": "h", "name": part.value, "y": [part.value], "x": [delta / scale.size],
        "base": [start / scale.size], "text": [signed(delta)], "textposition": "outside", "cliponaxis": False,
        "hovertemplate": f"<b>{part.value}</b><br>{signed(delta)} in B<extra></extra>",
        "marker": marker(PART_LOOKS[part]),
    }  # fmt: skip


def _whole_bar(name: str, seconds: Seconds, colour: str, size: float) -> dict[str, Any]:
    return {
        "type": "bar", "orientation": "h", "name": f"step of {name}", "y": [f"<b>{name}</b>"], "x": [seconds / size],
        "text": [f"<b>{format_step_time(seconds)}</b>"], "textposition": "outside", "cliponaxis": False,
        "hoverinfo": "skip", "marker": {"color": colour},
    }  # fmt: skip


def _parts_table(difference: Difference) -> str:
    steps = map(format_step_time, difference.step_times.tolist())
    step = Cells(("step", *steps, difference.words(difference.longer)), "sum")
    rows = (_part_row(difference, part) for part in difference.present)
    return table(("part", *NAMES, "longer by"), [*rows, step])


def _part_row(difference: Difference, part: Part) -> Cells:
    first, second = difference.parts[:, part.place].tolist()
    times = (difference.amount(first), difference.amount(second), difference.words(second - first))
    return Cells((named(PART_LOOKS[part], part.value), *times))


def stages_figure(difference: Difference) -> Figure:
    """For each pipeline rank a bar to each side: by how much parts are longer and shorter in B."""
    shown = shown_rows(len(difference.row_labels))
    changes = difference.stage_deltas[shown]
    labels = [difference.row_labels[row] for row in shown]
    scale = time_scale(float(np.abs(changes).max()))
    return Figure(
        name="difference-stages",
        traces=part_changes(labels, changes, scale),
        layout=layout(
            barmode="relative",
            showlegend=True,
            legend=legend(traceorder="normal"),
            xaxis=axis(f"longer in B by [{scale.unit}]", fixedrange=True, zeroline=True),
            yaxis=axis("", autorange="reversed", fixedrange=True, type="category", ticksuffix="  "),
            dragmode=False,
            bargap=0.3,
        ),
        height=height_of(len(labels)),
        narrow=short_labels(labels, [str(row) for row in shown]),
    )


def _row_word(difference: Difference) -> str:
    """What a row is called: its label without the number."""
    return difference.row_labels[0].rpartition(" ")[0]


def part_changes(labels: list[str], changes: FloatArray, scale: Scale) -> list[dict[str, Any]]:
    """Bars of parts for each label. changes: [labels, parts] seconds."""
    most = np.abs(changes).max(axis=0, initial=0.0)
    return [
        {
            "type": "bar", "orientation": "h", "name": part.value, "y": labels,
            "x": typed(changes[:, part.place] / scale.size), "marker": marker(PART_LOOKS[part]),
            "customdata": [signed(value) for value in changes[:, part.place].tolist()],
            "hovertemplate": f"<b>%{{y}}</b><br>{part.value}: %{{customdata}}<extra></extra>",
        }
        for part in PARTS
        if most[part.place] > 1e-3 * most.max()
    ]  # fmt: skip


def _lanes_card(difference: Difference, timelines: Sequence[Timeline]) -> Card:
    """Both timelines, one above the other, on the axis of the longer one; each may take half of a page's bytes."""
    whole = max(float(timeline.spans.end.max(initial=0.0)) for timeline in timelines)
    drawings = [drawing(timeline, MOST_BYTES // 2) for timeline in timelines]
    figures = tuple(
        _aligned(timeline_figure(drawn, name=f"timeline-{name.lower()}"), whole)
        for drawn, name in zip(drawings, NAMES, strict=True)
    )
    body = ""
    for place, name in enumerate(NAMES):
        caption = timeline_caption(drawings[place])
        body += f"<h3>{name}: {escape(difference.titles[place])}</h3>{slot(figures[place])}"
        body += f'<p class="caption">{escape(caption)}</p>' if caption else ""
    return Card(section("Both timelines", body, lead=_LANES_LEAD), figures)


def _aligned(figure: Figure, whole: Seconds) -> Figure:
    """A timeline with an axis of so many seconds."""
    scale = time_scale(whole)
    reach = whole / scale.size or 1.0
    common = axis(f"time [{scale.unit}]", range=[0, reach], maxallowed=reach)
    drawn = {**figure.layout, "xaxis": {**figure.layout["xaxis"], **common}}
    return replace(figure, layout=drawn, facts={**figure.facts, "size": scale.size})
