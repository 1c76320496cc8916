"""How are millions of spans kept as some boxes?

First the spans of one action (a stage's forward of a microbatch) that follow each other without a gap become the one
box that pipeline figures show. If there are still too many, spans shorter than a bin of time are drawn together with
the others that begin in the bin, in the colour of the category that lasts longest there; the bin is doubled until the
boxes are few enough. Longer spans always keep their own box.
"""

from dataclasses import dataclass
from typing import Final

import numpy as np

from clustersim.arrays import BoolArray, FloatArray, IntArray
from clustersim.report.theme import CATEGORIES
from clustersim.report.view import Spans
from clustersim.units import Seconds

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

    def members(self, box: int) -> IntArray:
        """The spans of one box, by start."""
        return self.order[self.first[box] : self.first[box + 1]]


def boxes(spans: Spans, rows: IntArray, *, by_action: bool, most: int) -> Boxes:
    """At most `most` boxes that stand for all spans of these rows; by_action: join the pieces of one action."""
    whole = float(spans.end.max()) if len(spans) else 0.0
    order = np.lexsort((spans.end, spans.start, spans.lane, spans.row))
    order = order[np.isin(spans.row[order], rows)]
    new = _new_action(spans, order, _TOUCH * whole) if by_action else np.ones(len(order), dtype=np.bool_)
    width = 0.0
    while np.count_nonzero(new) > most and width < whole:
        width = width * 2 if width else whole * _FINEST_BIN
        new = _new_bin(spans, order, width)
    return _gathered(spans, order, new, width)


def _changes(*columns: IntArray) -> BoolArray:
    new = np.ones(len(columns[0]), dtype=np.bool_)
    if len(new):
        new[1:] = np.logical_or.reduce([column[1:] != column[:-1] for column in columns])
    return new


def _new_action(spans: Spans, order: IntArray, touch: float) -> BoolArray:
    keys = (spans.row, spans.lane, spans.category, spans.microbatch, spans.chunk)
    new = _changes(*(key[order] for key in keys))
    gap = np.zeros(len(order), dtype=np.bool_)
    gap[1:] = spans.start[order][1:] - spans.end[order][:-1] > touch
    alone = (spans.lane[order] > 0) | (spans.microbatch[order] < 0)
    return np.asarray(new | gap | alone)


def _new_bin(spans: Spans, order: IntArray, width: float) -> BoolArray:
    bin_ = np.floor(spans.start[order] / width).astype(np.int64)
    long = (spans.end - spans.start)[order] >= width
    alone = np.where(long, np.arange(1, len(order) + 1), 0)
    return _changes(spans.row[order], spans.lane[order], bin_, alone)


def _gathered(spans: Spans, order: IntArray, new: BoolArray, width: float) -> Boxes:
    first = np.append(np.flatnonzero(new), len(order))
    box = np.cumsum(new) - 1
    weight = np.zeros((len(first) - 1, len(CATEGORIES)))
    np.add.at(weight, (box, spans.category[order]), (spans.end - spans.start)[order])
    if len(order) == 0:
        nothing = np.zeros(0)
        return Boxes(order, first, order, nothing, nothing, width)
    return Boxes(
        order=order,
        first=first,
        category=np.where(weight.any(axis=1), weight.argmax(axis=1), spans.category[order[first[:-1]]]),
        start=np.minimum.reduceat(spans.start[order], first[:-1]),
        end=np.maximum.reduceat(spans.end[order], first[:-1]),
        bin=width,
    )
