"""How are millions of spans reduced to a limited number of boxes (level of detail)?

First the consecutive spans of one action (a stage's forward of a microbatch) become one box, as in pipeline
figures. If there are still too many, spans shorter than a time bin are merged with the others that begin in
the same bin, in the colour of the category with the longest time in it; the bin is doubled until the boxes
are few enough. Longer spans always keep their own box.
"""

from dataclasses import dataclass
from typing import Final

import numpy as np

from clustersim.common.arrays import BoolArray, FloatArray, IntArray
from clustersim.common.units import Seconds
from clustersim.report.theme import CATEGORY_STYLES
from clustersim.report.timeline_data import TimelineSpans

_MIN_BIN_FRACTION: Final = 2.0**-20  # relative to the drawn time
_GAP_TOLERANCE: Final = 1e-9  # relative to the drawn time: rounding, not a gap


@dataclass(frozen=True, slots=True)
class TimelineBoxes:
    """Boxes of merged spans.

    order: span indices, box by box; first: [boxes + 1] offsets into `order`; category: [boxes] index into
    CATEGORY_STYLES; start, end: [boxes] seconds; bin_seconds: width of the merging bins, 0 if no box merges
    different actions.
    """

    order: IntArray
    first: IntArray
    category: IntArray
    start: FloatArray
    end: FloatArray
    bin_seconds: Seconds

    def __len__(self) -> int:
        return len(self.category)

    def first_spans(self) -> IntArray:
        """[boxes] index of each box's first span."""
        return self.order[self.first[:-1]]


def merge_spans(spans: TimelineSpans, rows: IntArray, *, by_action: bool, max_boxes: int) -> TimelineBoxes:
    """At most `max_boxes` boxes that cover all spans of these rows; by_action: merge the spans of one action."""
    end_seconds = float(spans.end.max(initial=0.0))
    order = np.lexsort((spans.end, spans.start, spans.lane, spans.row))
    order = order[np.isin(spans.row[order], rows)]
    starts_box = (
        _action_starts(spans, order, _GAP_TOLERANCE * end_seconds) if by_action else np.ones(len(order), dtype=np.bool_)
    )
    bin_seconds = 0.0
    while np.count_nonzero(starts_box) > max_boxes and bin_seconds < end_seconds:
        bin_seconds = bin_seconds * 2 if bin_seconds else end_seconds * _MIN_BIN_FRACTION
        starts_box = _bin_starts(spans, order, bin_seconds)
    return _build_boxes(spans, order, starts_box, bin_seconds)


def _changes(*columns: IntArray) -> BoolArray:
    changed: BoolArray = np.any([np.diff(column, prepend=column[:1] - 1) != 0 for column in columns], axis=0)
    return changed


def _action_starts(spans: TimelineSpans, order: IntArray, tolerance: float) -> BoolArray:
    keys = (spans.row, spans.lane, spans.category, spans.microbatch, spans.chunk)
    start, end = spans.start[order], spans.end[order]
    has_gap = start - np.append(start[:1], end[:-1]) > tolerance
    is_separate = (spans.lane[order] > 0) | (spans.microbatch[order] < 0)
    return _changes(*(key[order] for key in keys)) | has_gap | is_separate


def _bin_starts(spans: TimelineSpans, order: IntArray, bin_seconds: float) -> BoolArray:
    bin_index = np.floor(spans.start[order] / bin_seconds).astype(np.int64)
    is_long = (spans.end - spans.start)[order] >= bin_seconds
    long_span_id = np.where(is_long, np.arange(1, len(order) + 1), 0)
    return _changes(spans.row[order], spans.lane[order], bin_index, long_span_id)


def _build_boxes(spans: TimelineSpans, order: IntArray, starts_box: BoolArray, bin_seconds: float) -> TimelineBoxes:
    box_starts = np.flatnonzero(starts_box)
    seconds_by_category = np.zeros((len(box_starts), len(CATEGORY_STYLES)))
    np.add.at(seconds_by_category, (np.cumsum(starts_box) - 1, spans.category[order]), (spans.end - spans.start)[order])
    return TimelineBoxes(
        order=order,
        first=np.append(box_starts, len(order)),
        category=np.where(
            seconds_by_category.any(axis=1), seconds_by_category.argmax(axis=1), spans.category[order[box_starts]]
        ),
        start=np.minimum.reduceat(spans.start[order], box_starts) if len(box_starts) else np.zeros(0),
        end=np.maximum.reduceat(spans.end[order], box_starts) if len(box_starts) else np.zeros(0),
        bin_seconds=bin_seconds,
    )
