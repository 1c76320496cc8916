"""When does each stage do what? The pipeline figure that people know, with true durations.

One row for each stage: a tall lane of computation (blue forward, green backward, lighter for later model chunks, the
microbatch's number in the box) and a thin lane for each kind of communication. The critical path is outlined and its
pieces are joined by a line. Boxes of one category are one plotly bar trace.
"""

from dataclasses import dataclass
from html import escape
from typing import Any, Final

import numpy as np

from clustersim.report.detail import BoolArray, Boxes, boxes
from clustersim.report.figure import Figure, Scale, Traces, axis, layout, legend, marker, time_scale, typed
from clustersim.report.hover import box_text, number_of
from clustersim.report.rows import shown_rows
from clustersim.report.theme import CATEGORIES, Category, chunk_shade, text_colour
from clustersim.report.view import FloatArray, IntArray, Path, Timeline
from clustersim.units import format_seconds

_COMPUTE_TOP: Final = -0.42
_COMPUTE_HEIGHT: Final = 0.56
_LANES_HEIGHT: Final = 0.26
_MOST_PATH_PIECES: Final = 2000
_PIXELS: Final = 1000  # about the width of the plot on a large screen


@dataclass(frozen=True, slots=True)
class Drawing:
    """A timeline made ready to draw. rows: the rows shown; place: [all rows] where each is drawn (NaN: not shown)."""

    timeline: Timeline
    boxes: Boxes
    rows: IntArray
    place: FloatArray
    scale: Scale

    @property
    def whole(self) -> float:
        """Seconds from the beginning to the last end."""
        return float(self.timeline.spans.end.max()) if len(self.timeline.spans) else 0.0

    def lane_band(self, lane: IntArray) -> tuple[FloatArray, FloatArray]:
        """Centre (relative to the row) and height of lanes."""
        extra = max(1, len(self.timeline.lanes) - 1)
        each = _LANES_HEIGHT / extra
        thin = _COMPUTE_TOP + _COMPUTE_HEIGHT + 0.03 + each * (lane - 0.5)
        compute = lane == 0
        centre = np.where(compute, _COMPUTE_TOP + _COMPUTE_HEIGHT / 2, thin)
        return centre, np.where(compute, _COMPUTE_HEIGHT, each)


def drawing(timeline: Timeline) -> Drawing:
    """Choose rows, join spans to boxes and choose the unit of time."""
    rows = shown_rows(len(timeline.rows))
    place = np.full(len(timeline.rows), np.nan)
    place[rows] = np.arange(len(rows))
    joined = boxes(timeline.spans, rows, by_action=len(timeline.rows) > 1)
    whole = float(timeline.spans.end.max()) if len(timeline.spans) else 0.0
    return Drawing(timeline, joined, rows, place, time_scale(whole))


def timeline_figure(drawn: Drawing) -> Figure:
    """The figure of a drawing."""
    rows = [drawn.timeline.rows[row] for row in drawn.rows]
    ticks = [place + _COMPUTE_TOP + _COMPUTE_HEIGHT / 2 for place in range(len(rows))]
    each = max(20, min(52, 1000 // max(1, len(rows))))
    return Figure(
        name="timeline",
        traces=[*_tracks(drawn), *_category_traces(drawn), *_path_traces(drawn)],
        layout=layout(
            showlegend=True,
            legend=legend(),
            xaxis=axis(f"time [{drawn.scale.unit}]", range=[0, drawn.whole / drawn.scale.size or 1], minallowed=0),
            yaxis=axis(
                "",
                range=[len(rows) - 0.5, -0.55],
                tickmode="array",
                tickvals=ticks,
                ticktext=[escape(row.title) + "  " for row in rows],
                showgrid=False,
                fixedrange=True,
            ),
            shapes=[_step_end(end / drawn.scale.size) for end in drawn.timeline.ends],
        ),
        height=120 + each * len(rows),
        numbers=_numbers(drawn),
        narrow={"yaxis": {"ticktext": [escape(row.short) + " " for row in rows]}, "legend": {"font": {"size": 9}}},
    )


def _step_end(at: float) -> dict[str, Any]:
    """A line across all rows where a step ends."""
    line = {"color": "@muted", "width": 1, "dash": "dash"}
    return {"type": "line", "x0": at, "x1": at, "y0": 0, "y1": 1, "yref": "paper", "line": line, "layer": "above"}


def timeline_caption(drawn: Drawing) -> str:
    """What the reader must know about the rows and how the figure was reduced; empty if nothing."""
    notes = [drawn.timeline.row_note] if drawn.timeline.row_note else []
    if len(drawn.rows) < len(drawn.timeline.rows):
        notes.append(
            f"{len(drawn.rows)} of {len(drawn.timeline.rows)} {drawn.timeline.row_word}s are shown, evenly spaced."
        )
    if not drawn.timeline.path.whole:
        notes.append("The critical path also runs through ranks that are not shown.")
    if drawn.boxes.bin:
        notes.append(
            f"{len(drawn.timeline.spans):,} spans are drawn as {len(drawn.boxes):,} boxes: those shorter than "
            f"{format_seconds(drawn.boxes.bin)} are merged with their neighbours."
        )
    return " ".join(notes)


def _bar(name: str, **more: Any) -> dict[str, Any]:
    return {"type": "bar", "orientation": "h", "name": name, **more}


def _tracks(drawn: Drawing) -> Traces:
    """A pale band behind every compute lane: where it shows, the stage computes nothing."""
    centre, height = drawn.lane_band(np.zeros(len(drawn.rows), dtype=np.int64))
    return [
        _bar(
            "idle",
            y=typed(np.arange(len(drawn.rows)) + centre),
            width=typed(height),
            x=typed(np.full(len(drawn.rows), drawn.whole / drawn.scale.size)),
            marker={"color": "@track", "line": {"width": 0}},
            hoverinfo="skip",
        )
    ]


def _category_traces(drawn: Drawing) -> Traces:
    """One trace for each category; first model chunks first, because the legend shows the first box's shade."""
    category = drawn.boxes.category
    order = np.argsort(drawn.timeline.spans.chunk[drawn.boxes.lead()], kind="stable")
    return [_category_trace(drawn, CATEGORIES[index], order[category[order] == index]) for index in np.unique(category)]


def _category_trace(drawn: Drawing, category: Category, chosen: IntArray) -> dict[str, Any]:
    spans, lead = drawn.timeline.spans, drawn.boxes.lead()[chosen]
    centre, height = drawn.lane_band(spans.lane[lead])
    start = drawn.boxes.start[chosen]
    size = drawn.scale.size
    return _bar(
        category.label,
        y=typed(drawn.place[spans.row[lead]] + centre),
        width=typed(height),
        base=typed(start / size),
        x=typed((drawn.boxes.end[chosen] - start) / size),
        hovertext=[box_text(drawn.timeline, drawn.boxes, int(box)) for box in chosen],
        hovertemplate="%{hovertext}<extra></extra>",
        marker=_marker(drawn, category, chosen),
    )


def _numbers(drawn: Drawing) -> dict[str, Any]:
    """Microbatch numbers for compute boxes that stand for one action; the page draws those that fit."""
    spans, lead = drawn.timeline.spans, drawn.boxes.lead()
    several = spans.microbatch.max(initial=0) > 0 and drawn.boxes.bin == 0
    numbered = (spans.lane[lead] == 0) & (spans.microbatch[lead] >= 0) & several
    lead, start, end = lead[numbered], drawn.boxes.start[numbered], drawn.boxes.end[numbered]
    centre, _ = drawn.lane_band(spans.lane[lead])
    size = drawn.scale.size
    return {
        "middle": ((start + end) / (2 * size)).tolist(),
        "width": ((end - start) / size).tolist(),
        "y": (drawn.place[spans.row[lead]] + centre).tolist(),
        "height": _COMPUTE_HEIGHT,
        "text": [str(number_of(spans, span)) for span in lead.tolist()],
        "colour": _text_colours(drawn, numbered),
    }


def _text_colours(drawn: Drawing, numbered: BoolArray) -> list[str]:
    category = drawn.boxes.category[numbered]
    chunks = drawn.timeline.spans.chunk[drawn.boxes.lead()[numbered]]
    most = int(drawn.timeline.spans.chunk.max(initial=0)) + 1
    pairs = set(zip(category.tolist(), chunks.tolist(), strict=True))
    table = {(look, chunk): text_colour(chunk_shade(CATEGORIES[look].colour, chunk, most)) for look, chunk in pairs}
    return [table[pair] for pair in zip(category.tolist(), chunks.tolist(), strict=True)]


def _marker(drawn: Drawing, category: Category, chosen: IntArray) -> dict[str, Any]:
    """Boxes in their shades; a box of a few pixels gets a thin edge, or the edge would hide it."""
    look = marker(category, _shades(drawn, category, drawn.boxes.lead()[chosen]))
    pixels = (drawn.boxes.end - drawn.boxes.start)[chosen] / (drawn.whole or 1.0) * _PIXELS
    return {**look, "line": {**look["line"], "width": typed(np.clip(pixels / 16, 0.0, 0.6))}}


def _shades(drawn: Drawing, category: Category, lead: IntArray) -> list[str] | None:
    chunks = int(drawn.timeline.spans.chunk.max(initial=0)) + 1
    if chunks == 1:
        return None
    table = [chunk_shade(category.colour, chunk, chunks) for chunk in range(chunks)]
    return [table[max(0, chunk)] for chunk in drawn.timeline.spans.chunk[lead]]


def _path_traces(drawn: Drawing) -> Traces:
    path = _joined_path(drawn)
    if len(path.row) == 0:
        return []
    size = drawn.scale.size
    centre, height = drawn.lane_band(path.lane)
    middle = drawn.place[path.row] + centre
    group = {"legendgroup": "path", "hoverinfo": "skip"}
    outline = _bar(
        "critical path",
        y=typed(middle),
        width=typed(height),
        base=typed(path.start / size),
        x=typed((path.end - path.start) / size),
        marker={"color": "rgba(0,0,0,0)", "line": {"width": 1.8, "color": "@ink"}},
        **group,
    )
    after = np.flatnonzero(path.follows[1:]) + 1
    gap = np.full(len(after), np.nan)
    link = np.column_stack([path.end[after - 1], path.start[after], gap]).ravel() / size
    height_of_link = np.column_stack([middle[after - 1], middle[after], gap]).ravel()
    line = {
        "type": "scatter",
        "mode": "lines",
        "name": "critical path",
        "showlegend": False,
        "x": typed(link),
        "y": typed(height_of_link),
        "line": {"width": 1.4, "color": "@ink", "dash": "dot"},
        **group,
    }
    return [outline, line]


def _joined_path(drawn: Drawing) -> Path:
    """The path's shown pieces, those that touch in one row joined, the shortest left out if they are too many."""
    path = drawn.timeline.path
    keep = np.flatnonzero(~np.isnan(drawn.place[path.row])) if len(path.row) else np.zeros(0, dtype=np.int64)
    row, lane, start, end = path.row[keep], path.lane[keep], path.start[keep], path.end[keep]
    follows = path.follows[keep] & (np.diff(keep, prepend=-1) == 1)
    if len(row) == 0:
        return Path(row, lane, start, end, follows)
    new = ~follows
    new[0] = True
    new[1:] |= (row[1:] != row[:-1]) | (lane[1:] != lane[:-1]) | (start[1:] - end[:-1] > 1e-6 * drawn.whole)
    first = np.flatnonzero(new)
    ends = np.maximum.reduceat(end, first)
    longest = np.sort(np.argsort(start[first] - ends, kind="stable")[:_MOST_PATH_PIECES])
    first = first[longest]
    return Path(row[first], lane[first], start[first], ends[longest], follows[first])
