"""What stands in an exported trace? Every span, with its arguments, on a track on which nothing overlaps.

Trace viewers draw overlapping slices of one track wrongly, so a lane whose spans overlap (sends in both directions) is
split into as many tracks as it needs.
"""

import heapq
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from clustersim.report.hover import cause_words, what
from clustersim.report.theme import CATEGORIES, Category
from clustersim.report.view import IntArray, Timeline
from clustersim.units import Seconds

Arguments = dict[str, str | int | float]


@dataclass(frozen=True, slots=True)
class Slice:
    """One span on a track; track: 0 ... within its row and lane."""

    row: int
    lane: int
    track: int
    start: Seconds
    end: Seconds
    name: str
    category: Category
    arguments: Arguments


def slices(timeline: Timeline) -> Iterator[Slice]:
    """All spans, row by row, lane by lane, track by track, by start."""
    spans = timeline.spans
    track = tracks(timeline)
    for span in np.lexsort((spans.end, spans.start, track, spans.lane, spans.row)).tolist():
        yield Slice(
            row=int(spans.row[span]),
            lane=int(spans.lane[span]),
            track=int(track[span]),
            start=float(spans.start[span]),
            end=float(spans.end[span]),
            name=what(spans, span),
            category=CATEGORIES[spans.category[span]],
            arguments=_arguments(timeline, span),
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


def _arguments(timeline: Timeline, span: int) -> Arguments:
    spans = timeline.spans
    arguments: Arguments = {}
    for key, text in (("does", spans.name[span]), ("detail", spans.detail[span])):
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
    if cause := cause_words(timeline, span):
        arguments["after"] = cause
    return arguments
