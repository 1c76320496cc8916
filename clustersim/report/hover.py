"""What does a box say when one points at it? What, where, when, how long, how many bytes, and what it waited for."""

from collections import Counter
from html import escape

from clustersim.report.detail import Boxes
from clustersim.report.theme import CATEGORIES
from clustersim.report.view import Spans, Timeline
from clustersim.units import format_bytes, format_seconds

_MOST_NAMES = 5


def box_text(timeline: Timeline, boxes: Boxes, box: int) -> str:
    """Lines in plotly's small HTML; every user's text is escaped."""
    spans = timeline.spans
    members = boxes.members(box)
    lead = int(members[0])
    row = timeline.rows[spans.row[lead]]
    start, end = float(boxes.start[box]), float(boxes.end[box])
    lines = [
        f"<b>{escape(what(spans, lead))}</b>" if not boxes.bin or len(members) == 1 else f"<b>{len(members)} spans</b>",
        escape(
            f"{row.label} · {row.told or f'rank {row.rank}'}"
            + (f", for {row.stands_for:,} ranks" if row.stands_for > 1 else "")
        ),
        f"{format_seconds(start)} → {format_seconds(end)} · <b>{format_seconds(end - start)}</b>",
        *_contents(spans, [int(member) for member in members]),
        *_moved(float(spans.bytes[members].sum())),
        *_waited(timeline, lead),
        *_inside(float(spans.waited[members].sum()), float(spans.slowed[members].sum())),
    ]
    return "<br>".join(lines)


def what(spans: Spans, span: int) -> str:
    """The category, microbatch and chunk of a span in words."""
    words = CATEGORIES[int(spans.category[span])].label
    if spans.microbatch[span] >= 0:
        words += f" of microbatch {number_of(spans, span)}"
    if spans.chunk[span] > 0:
        words += f", chunk {spans.chunk[span]}"
    if spans.per_step and spans.microbatch[span] >= 0:
        words += f", step {int(spans.microbatch[span]) // spans.per_step + 1}"
    return words


def number_of(spans: Spans, span: int) -> int:
    """A span's microbatch, counted from the beginning of its step."""
    number = int(spans.microbatch[span])
    return number % spans.per_step if spans.per_step else number


def _contents(spans: Spans, members: list[int]) -> list[str]:
    counts = Counter(int(spans.name[member]) for member in members if spans.name[member] >= 0)
    names = [
        (f"{count} × " if count > 1 else "") + spans.texts[name] for name, count in counts.most_common(_MOST_NAMES)
    ]
    if len(counts) > _MOST_NAMES:
        names.append(f"{len(counts) - _MOST_NAMES} more")
    details = Counter(int(spans.detail[member]) for member in members if spans.detail[member] >= 0)
    lines = [escape(", ".join(names))] if names else []
    return lines + [escape(spans.texts[detail]).replace("\n", "<br>") for detail, _ in details.most_common(1)]


def _moved(moved: float) -> list[str]:
    return [f"{format_bytes(moved)} moved"] if moved > 0 else []


def _inside(waited: float, slowed: float) -> list[str]:
    """What made it longer than its own work."""
    lines = [f"waits {format_seconds(waited)} inside for ranks that it meets"] if waited > 0 else []
    return lines + ([f"slowed by communication by {format_seconds(slowed)}"] if slowed > 0 else [])


def cause_words(timeline: Timeline, span: int) -> str:
    """What had to end before this span could start, and where; empty if nothing that is shown."""
    cause = int(timeline.spans.cause[span])
    return f"{what(timeline.spans, cause)} on {timeline.rows[timeline.spans.row[cause]].title}" if cause >= 0 else ""


def _waited(timeline: Timeline, span: int) -> list[str]:
    waited = float(timeline.spans.start[span] - timeline.spans.waiting[span])
    after = cause_words(timeline, span)
    if waited > 0:
        return [escape(f"waited {format_seconds(waited)}" + (f" for {after}" if after else ""))]
    return [escape(f"after {after}")] if after else []
