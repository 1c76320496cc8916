"""How are two answers looked at? The difference, what was changed, from which parts it comes, both timelines.

The waterfall begins at A's step time; each part begins where the one before it ends, and the last ends at B's step
time. Both timelines have one axis, which is zoomed in both at once (`assets/difference.js`).
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from clustersim.common.arrays import FloatArray
from clustersim.common.units import Seconds, format_signed_seconds, format_step_time
from clustersim.report import result_difference as said
from clustersim.report.draw.charts import Drawn, bar, chart, in_lines, ticks
from clustersim.report.draw.timeline_figure import timeline_caption, timeline_figure
from clustersim.report.figure import Figure, axis, marker, short_labels, time_scale
from clustersim.report.html_document import document, drawn
from clustersim.report.legend_markup import part_name
from clustersim.report.panels.difference_bars import changed_parts
from clustersim.report.result_difference import Difference
from clustersim.report.result_timeline import timeline_of
from clustersim.report.row_selection import height_of, shown_ranks, shown_rows
from clustersim.report.theme import PART_LOOKS
from clustersim.report.timeline_arrays import MOST_BYTES, drawing
from clustersim.report.timeline_data import Timeline

if TYPE_CHECKING:
    from clustersim.results.simulation_result import SimulationResult


def difference_page(difference: Difference, results: "Sequence[SimulationResult]") -> str:
    """The page as HTML text."""
    waterfall = difference_waterfall(difference) if difference.different else None
    stages = stages_figure(difference) if waterfall and len(difference.row_labels) > 1 else None
    lanes = list(_lanes([timeline_of(result, shown_ranks(result)) for result in results]))
    page = drawn(
        "difference.html", *filter(None, (waterfall, stages, *(figure for figure, _ in lanes))), waterfall=waterfall,
        stages=stages, lanes=lanes, difference=difference, said=said, part_name=part_name,
    )  # fmt: skip
    return document(f"{difference.titles[0]} and {difference.titles[1]}", [page], scripts=("difference",))


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
            text=[format_signed_seconds(delta)], textposition="outside", cliponaxis=False,
            hovertemplate=f"<b>{part.value}</b><br>{format_signed_seconds(delta)} in B<extra></extra>",
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


def stages_figure(difference: Difference) -> Figure:
    """For each pipeline rank a bar to each side: by how much parts are longer and shorter in B."""
    shown = shown_rows(len(difference.row_labels))
    labels, narrow = [difference.row_labels[row] for row in shown], [str(row) for row in shown]
    return changed_parts(
        "difference-stages",
        labels,
        difference.stage_deltas[shown],
        "longer in B by",
        height=height_of(len(labels)),
        narrow=short_labels(labels, narrow),
    )


def _lanes(timelines: Sequence[Timeline]) -> Iterator[tuple[Figure, str]]:
    """Both on the axis of the longer one, with what must be said of each; each may take half of a page's bytes."""
    whole = max(float(timeline.spans.end.max(initial=0.0)) for timeline in timelines)
    for name, timeline in zip(("timeline-a", "timeline-b"), timelines, strict=True):
        each = drawing(timeline, MOST_BYTES // 2)
        yield _aligned(timeline_figure(each, name=name), whole), timeline_caption(each)


def _aligned(figure: Figure, whole: Seconds) -> Figure:
    """A timeline with an axis of so many seconds."""
    scale = time_scale(whole)
    reach = whole / scale.size or 1.0
    common = axis(f"time [{scale.unit}]", range=[0, reach], maxallowed=reach)
    drawn = {**figure.layout, "xaxis": {**figure.layout["xaxis"], **common}}
    return replace(figure, layout=drawn, facts={**figure.facts, "size": scale.size})
