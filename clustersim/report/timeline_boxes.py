"""How are millions of spans kept as some boxes?

First the spans of one action (a stage's forward of a microbatch) that follow each other without a gap become the one
box that pipeline figures show. If there are still too many, spans shorter than a bin of time are drawn together with
the others that begin in the bin, in the colour of the category that lasts longest there; the bin is doubled until the
boxes are few enough. Longer spans always keep their own box.
"""

from dataclasses import dataclass
from typing import Final

import numpy as np

from clustersim.common.arrays import BoolArray, FloatArray, IntArray
from clustersim.common.units import Seconds
from clustersim.report.theme import CATEGORIES
from clustersim.report.timeline_data import Spans

_FINEST_BIN: Final = 2.0**-20  # of the drawn time
_TOUCH: Final = 1e-9  # of the drawn time: rounding, not a gap


@dataclass(frozen=True, slots=True)
class Boxes:
    """Boxes over spans.

    order: span numbers, box after box; first: [boxes + 1] offsets into `order`; category: [boxes]; start, end: [boxes]
    seconds; bin: seconds, 0 when no spans of different actions share a box.
    """

    order: IntArray
    first: IntArray
    category: IntArray
    start: FloatArray
    end: FloatArray
    bin: Seconds

    def __len__(self) -> int:
        return len(self.category)

    def lead(self) -> IntArray:
        """The first span of every box."""
        return self.order[self.first[:-1]]


def boxes(spans: Spans, rows: IntArray, *, by_action: bool, most: int) -> Boxes:
    """At most `most` boxes that stand for all spans of these rows; by_action: join the pieces of one action."""
    whole = float(spans.end.max(initial=0.0))
    order = np.lexsort((spans.end, spans.start, spans.lane, spans.row))
    order = order[np.isin(spans.row[order], rows)]
    new = _new_action(spans, order, _TOUCH * whole) if by_action else np.ones(len(order), dtype=np.bool_)
    width = 0.0
    while np.count_nonzero(new) > most and width < whole:
        width = width * 2 if width else whole * _FINEST_BIN
        new = _new_bin(spans, order, width)
    return _gathered(spans, order, new, width)


def _changes(*columns: IntArray) -> BoolArray:
    different: BoolArray = np.any([np.diff(column, prepend=column[:1] - 1) != 0 for column in columns], axis=0)
    return different


def _new_action(spans: Spans, order: IntArray, touch: float) -> BoolArray:
    keys = (spans.row, spans.lane, spans.category, spans.microbatch, spans.chunk)
    start, end = spans.start[order], spans.end[order]
    gap = start - np.append(start[:1], end[:-1]) > touch
    alone = (spans.lane[order] > 0) | (spans.microbatch[order] < 0)
    return _changes(*(key[order] for key in keys)) | gap | alone


def _new_bin(spans: Spans, order: IntArray, width: float) -> BoolArray:
    bin_ = np.floor(spans.start[order] / width).astype(np.int64)
    long = (spans.end - spans.start)[order] >= width
    alone = np.where(long, np.arange(1, len(order) + 1), 0)
    return _changes(spans.row[order], spans.lane[order], bin_, alone)


def _gathered(spans: Spans, order: IntArray, new: BoolArray, width: float) -> Boxes:
    begins = np.flatnonzero(new)
    weight = np.zeros((len(begins), len(CATEGORIES)))
    np.add.at(weight, (np.cumsum(new) - 1, spans.category[order]), (spans.end - spans.start)[order])
    return Boxes(
        order=order,
        first=np.append(begins, len(order)),
        category=np.where(weight.any(axis=1), weight.argmax(axis=1), spans.category[order[begins]]),
        start=np.minimum.reduceat(spans.start[order], begins) if len(begins) else np.zeros(0),
        end=np.maximum.reduceat(spans.end[order], begins) if len(begins) else np.zeros(0),
        bin=width,
    )
