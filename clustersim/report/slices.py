"""What stands in an exported trace? Every span, with its arguments, on a track on which nothing overlaps.

Trace viewers draw overlapping slices of one track wrongly, so a lane whose spans overlap (sends in both directions) is
split into as many tracks as it needs. For the same reason times are whole nanoseconds, and what runs inside a slice
ends with it at the latest.
"""

import heapq
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Final

import numpy as np

from clustersim.report.hover import cause_words, what
from clustersim.report.theme import CATEGORIES, Category
from clustersim.report.view import FloatArray, IntArray, Timeline
from clustersim.units import format_seconds

Arguments = dict[str, str | int | float]
Nanoseconds = int
_ROUNDING: Final = 5e-10  # seconds: less than a trace can show


@dataclass(frozen=True, slots=True, eq=False)
class Label:
    """What a slice says. Compared by identity: operations that are repeated share one."""

    name: str
    category: Category
    arguments: Arguments


@dataclass(frozen=True, slots=True, eq=False)
class Inside:
    """What runs in a slice, in order. start, end: [labels] seconds."""

    start: FloatArray
    end: FloatArray
    labels: tuple[Label, ...]


InsideOf = Callable[[int], Inside | None]
"""What runs inside a span of the timeline, by its number."""


@dataclass(frozen=True, slots=True)
class Slice:
    """One span on a track; track: 0 ... within its row and lane; inside: the slices nested in it, in order."""

    row: int
    lane: int
    track: int
    start: Nanoseconds
    end: Nanoseconds
    label: Label
    inside: "tuple[Slice, ...]" = ()


def slices(timeline: Timeline, inside_of: InsideOf) -> Iterator[Slice]:
    """All spans, row by row, lane by lane, track by track, by start."""
    spans = timeline.spans
    track = tracks(timeline)
    for span in np.lexsort((spans.end, spans.start, track, spans.lane, spans.row)).tolist():
        inside = inside_of(span)
        label = Label(what(spans, span), CATEGORIES[spans.category[span]], _arguments(timeline, span, inside))
        place = (int(spans.row[span]), int(spans.lane[span]), int(track[span]))
        start, end = float(spans.start[span]), float(spans.end[span])
        nested = _nested(inside, place, start, end) if inside else ()
        yield Slice(*place, round(start * 1e9), round(end * 1e9), label, nested)


def _nested(inside: Inside, place: tuple[int, int, int], start: float, end: float) -> tuple[Slice, ...]:
    times = np.rint(np.clip((inside.start, inside.end), start, end) * 1e9).astype(np.int64)
    return tuple(
        Slice(*place, begin, stop, label) for begin, stop, label in zip(*times.tolist(), inside.labels, strict=True)
    )


def tracks(timeline: Timeline) -> IntArray:
    """For every span the first track of its lane that is free when it starts: [spans]."""
    spans = timeline.spans
    track = np.zeros(len(spans), dtype=np.int64)
    lanes = spans.row * len(timeline.lanes) + spans.lane
    busy: list[tuple[float, int]] = []
    free: list[int] = []
    here, used = -1, 0
    for span in np.lexsort((spans.end, spans.start, lanes)).tolist():
        if lanes[span] != here:
            here, used, busy, free = int(lanes[span]), 0, [], []
        while busy and busy[0][0] <= spans.start[span]:
            heapq.heappush(free, heapq.heappop(busy)[1])
        if not free:
            free.append(used)
            used += 1
        track[span] = heapq.heappop(free)
        heapq.heappush(busy, (float(spans.end[span]), int(track[span])))
    return track


def _arguments(timeline: Timeline, span: int, inside: Inside | None) -> Arguments:
    spans = timeline.spans
    arguments: Arguments = {}
    for key, text in (("does", spans.name[span]), ("detail", -1 if inside else spans.detail[span])):
        if text >= 0:
            arguments[key] = spans.texts[text]
    for key, number in (("microbatch", spans.microbatch[span]), ("chunk", spans.chunk[span])):
        if number >= 0:
            arguments[key] = int(number)
    if spans.bytes[span] > 0:
        arguments["bytes"] = int(spans.bytes[span])
    waited = float(spans.start[span] - spans.waiting[span])
    if waited > 0:
        arguments["waited_us"] = waited * 1e6
    if spans.slowed[span] > 0:
        arguments["slowed_us"] = float(spans.slowed[span]) * 1e6
    if cause := cause_words(timeline, span):
        arguments["after"] = cause
    between = float(spans.end[span] - spans.start[span] - (inside.end - inside.start).sum()) if inside else 0.0
    if between > _ROUNDING:
        arguments["inside"] = f"waited {format_seconds(between)} between operations"
    return arguments
