"""When does each stage do what? The pipeline figure that people know, with true durations, down to one kernel.

One row for each stage: a tall lane of computation (blue forward, green backward, lighter for later model chunks, the
microbatch's number in the box) and a thin lane for each kind of communication. The critical path is outlined and its
pieces are joined by a line. What is drawn depends on what the reader looks at, so the browser draws it
(`assets/timeline.js`) from what `timeline_arrays` packs.
"""

from dataclasses import asdict, replace
from html import escape
from typing import Any, Final

from clustersim.report.draw.charts import plot, ticks
from clustersim.report.figure import Figure, axis, time_scale
from clustersim.report.html_document import Card, card, prose
from clustersim.report.theme import CATEGORIES, Category, chunk_shade, text_colour
from clustersim.report.timeline_arrays import Drawing, drawing
from clustersim.report.timeline_data import Row, Timeline

_COMPUTE_TOP: Final = -0.42
_COMPUTE_HEIGHT: Final = 0.56
_LANES_HEIGHT: Final = 0.26
_FEW_ROWS: Final = 110  # pixels of each of one or two rows
_TITLES: Final = ("Timeline", "Pipeline timeline")


def timeline_card(timeline: Timeline) -> Card:
    """When each row does what."""
    drawn, several = drawing(timeline), len(timeline.rows) > 1
    slow = any(row.told for row in timeline.rows)
    lead = prose("timeline", row=timeline.row_word, several=several, slow=slow, ends=timeline.ends)
    return card(_TITLES[several], timeline_figure(drawn), lead=lead, caption=timeline_caption(drawn))


def timeline_figure(drawn: Drawing, *, name: str = "timeline") -> Figure:
    """The figure of a drawing; figures of one page have different names."""
    rows, scale = drawn.rows, time_scale(drawn.whole)
    middles = [place + _COMPUTE_TOP + _COMPUTE_HEIGHT / 2 for place in range(len(rows))]
    each = _FEW_ROWS if len(rows) <= 2 else max(20, min(52, 1000 // len(rows)))
    top, bottom, end = -0.55, len(rows) - 0.5, drawn.whole / scale.size or 1
    titles, short = [escape(row.title) + "  " for row in rows], [escape(row.short) + " " for row in rows]
    x = axis(f"time [{scale.unit}]", range=[0, end], minallowed=0, maxallowed=end)
    y = axis("", range=[bottom, top], minallowed=top, maxallowed=bottom, showgrid=False, **ticks(middles, titles))
    narrow = {"yaxis": {"ticktext": short}, "legend": {"font": {"size": 9}}}
    figure = plot(name, [], x, y, height=120 + each * len(rows), narrow=narrow, uirevision=name)
    return replace(figure, behaviour="timeline", arrays=drawn.arrays, facts=_facts(drawn, scale.size))


def _facts(drawn: Drawing, size: float) -> dict[str, Any]:
    """What the browser must know beside the arrays."""
    timeline = drawn.timeline
    return {
        "rows": [_row(row) for row in drawn.rows],
        "lanes": list(timeline.lanes),
        "bands": lane_bands(len(timeline.lanes)),
        "looks": [_look(category, drawn.chunks) for category in CATEGORIES],
        "present": drawn.looks,
        "texts": list(timeline.spans.texts),
        "labels": [asdict(label) for label in drawn.kernels.labels],
        "tick": drawn.tick,
        "size": size,
        "whole": drawn.whole,
        "perStep": timeline.spans.per_step,
        "microbatches": timeline.spans.per_step or int(timeline.spans.microbatch.max(initial=0)) + 1,
        "several": bool(timeline.spans.microbatch.max(initial=0) > 0 and not drawn.boxes.bin),
        "boxWord": "spans" if drawn.boxes.bin else "passes or messages",
    }


def lane_bands(lanes: int) -> list[tuple[float, float]]:
    """Centre (relative to the row) and height of every lane: computation above, the others share what is below it."""
    each = _LANES_HEIGHT / max(1, lanes - 1)
    thin = [(_COMPUTE_TOP + _COMPUTE_HEIGHT + 0.03 + each * (lane - 0.5), each) for lane in range(1, lanes)]
    return [(_COMPUTE_TOP + _COMPUTE_HEIGHT / 2, _COMPUTE_HEIGHT), *thin]


def _row(row: Row) -> dict[str, Any]:
    words = f"{row.label} · {row.told or f'rank {row.rank}'}"
    words += f", for {row.stands_for:,} ranks" if row.stands_for > 1 else ""
    return {"title": row.title, "words": words, "rank": row.rank}


def _look(category: Category, chunks: int) -> dict[str, Any]:
    """A category's colours, one for each model chunk, and the ink that is read best on them."""
    shades = [chunk_shade(category.colour, chunk, chunks) for chunk in range(chunks)]
    return {
        "label": category.label, "colour": category.colour, "pattern": category.pattern,
        "shades": shades, "inks": [text_colour(shade) for shade in shades],
    }  # fmt: skip


def timeline_caption(drawn: Drawing) -> str:
    """What the reader must know about the rows and how the figure was reduced; empty if nothing."""
    return prose("timeline_caption", drawn=drawn).strip()
