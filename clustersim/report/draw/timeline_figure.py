"""When does each stage do what? The usual pipeline figure, to scale, down to single kernels.

One row for each stage: a tall compute lane (blue forward, green backward, lighter for later model chunks,
the microbatch's number in the box) and a thin lane for each kind of communication. The critical path is
outlined and its segments are joined by a line. What is drawn depends on the zoom, so the browser draws it
(`assets/timeline.js`) from the arrays that `timeline_arrays` packs.
"""

from dataclasses import asdict, replace
from html import escape
from typing import Any, Final

from clustersim.report.draw.charts import tick_labels, xy_figure
from clustersim.report.figure import Figure, axis_layout, time_scale
from clustersim.report.html_document import Panel, figure_panel, render_text
from clustersim.report.theme import CATEGORY_STYLES, CategoryStyle, chunk_shade, contrasting_text_colour
from clustersim.report.timeline_arrays import TimelineDrawing, build_drawing
from clustersim.report.timeline_data import PipelineTimeline, TimelineRow

_COMPUTE_TOP: Final = -0.42
_COMPUTE_HEIGHT: Final = 0.56
_LANES_HEIGHT: Final = 0.26
_TALL_ROW_PIXELS: Final = 110  # pixels of a row if there are at most two
_TITLES: Final = ("Timeline", "Pipeline timeline")


def timeline_panel(timeline: PipelineTimeline) -> Panel:
    """Panel of the timeline."""
    drawing, has_several_rows = build_drawing(timeline), len(timeline.rows) > 1
    has_slow_rows = any(row.qualifier for row in timeline.rows)
    lead = render_text(
        "timeline", row=timeline.row_type, several=has_several_rows, slow=has_slow_rows, ends=timeline.step_ends
    )
    return figure_panel(
        _TITLES[has_several_rows], timeline_figure(drawing), lead=lead, caption=timeline_caption(drawing)
    )


def timeline_figure(drawing: TimelineDrawing, *, name: str = "timeline") -> Figure:
    """Figure of a drawing; figures on one page need different names."""
    rows, scale = drawing.rows, time_scale(drawing.end_seconds)
    middles = [index + _COMPUTE_TOP + _COMPUTE_HEIGHT / 2 for index in range(len(rows))]
    row_pixels = _TALL_ROW_PIXELS if len(rows) <= 2 else max(20, min(52, 1000 // len(rows)))
    top, bottom, end = -0.55, len(rows) - 0.5, drawing.end_seconds / scale.unit_size or 1
    titles, short = [escape(row.title) + "  " for row in rows], [escape(row.short) + " " for row in rows]
    x = axis_layout(f"time [{scale.unit}]", range=[0, end], minallowed=0, maxallowed=end)
    y = axis_layout(
        "", range=[bottom, top], minallowed=top, maxallowed=bottom, showgrid=False, **tick_labels(middles, titles)
    )
    narrow = {"yaxis": {"ticktext": short}, "legend": {"font": {"size": 9}}}
    figure = xy_figure(name, [], x, y, height=120 + row_pixels * len(rows), narrow=narrow, uirevision=name)
    return replace(
        figure, client_script="timeline", arrays=drawing.arrays, script_data=_script_data(drawing, scale.unit_size)
    )


def _script_data(drawing: TimelineDrawing, unit_size: float) -> dict[str, Any]:
    """Data that the page's script needs in addition to the arrays."""
    timeline = drawing.timeline
    return {
        "rows": [_row_data(row) for row in drawing.rows],
        "lanes": list(timeline.lanes),
        "bands": lane_geometry(len(timeline.lanes)),
        "styles": [_style_data(category, drawing.max_chunks) for category in CATEGORY_STYLES],
        "present": drawing.visible_styles,
        "texts": list(timeline.spans.texts),
        "labels": [asdict(label) for label in drawing.kernels.labels],
        "tick": drawing.tick_seconds,
        "size": unit_size,
        "whole": drawing.end_seconds,
        "perStep": timeline.spans.microbatches_per_step,
        "microbatches": timeline.spans.microbatches_per_step or int(timeline.spans.microbatch.max(initial=0)) + 1,
        "several": bool(timeline.spans.microbatch.max(initial=0) > 0 and not drawing.boxes.bin_seconds),
        "boxWord": "spans" if drawing.boxes.bin_seconds else "passes or messages",
    }


def lane_geometry(lane_count: int) -> list[tuple[float, float]]:
    """Centre (relative to the row) and height of every lane: compute on top, the others share the space below it."""
    lane_height = _LANES_HEIGHT / max(1, lane_count - 1)
    comm_lanes = [
        (_COMPUTE_TOP + _COMPUTE_HEIGHT + 0.03 + lane_height * (lane - 0.5), lane_height)
        for lane in range(1, lane_count)
    ]
    return [(_COMPUTE_TOP + _COMPUTE_HEIGHT / 2, _COMPUTE_HEIGHT), *comm_lanes]


def _row_data(row: TimelineRow) -> dict[str, Any]:
    description = f"{row.label} · {row.qualifier or f'rank {row.rank}'}"
    description += f", for {row.represented_count:,} ranks" if row.represented_count > 1 else ""
    return {"title": row.title, "words": description, "rank": row.rank}


def _style_data(style: CategoryStyle, chunk_count: int) -> dict[str, Any]:
    """Colours of a category, one shade for each model chunk, and the text colour with the best contrast on each."""
    shades = [chunk_shade(style.colour, chunk, chunk_count) for chunk in range(chunk_count)]
    return {
        "label": style.label, "colour": style.colour, "pattern": style.pattern,
        "shades": shades, "inks": [contrasting_text_colour(shade) for shade in shades],
    }  # fmt: skip


def timeline_caption(drawing: TimelineDrawing) -> str:
    """Caption: notes on the rows and on how the figure was reduced; empty if there are none."""
    return render_text("timeline_caption", drawn=drawing).strip()
