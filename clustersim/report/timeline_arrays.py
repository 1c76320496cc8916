"""What of a timeline goes into the file, and how?

Boxes (`detail`) with what they say, the spans that they join, templates of kernels, ends of steps, and the pieces of
the critical path. Times are whole numbers of a tick, the makespan over 2^32; what is inside a span is seconds in single
precision, counted from one operation to the next. So that the page of any scenario can be opened, rows and boxes are
limited, and where the arrays would be too large they are left out, the innermost first: kernels, spans inside boxes,
then boxes.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from clustersim.arrays import FloatArray, IntArray
from clustersim.report.detail import Boxes, boxes
from clustersim.report.figure import packed
from clustersim.report.rows import shown_rows
from clustersim.report.view import Kernels, Path, Row, Timeline
from clustersim.units import Bytes

MOST_BOXES: Final = 200_000
MOST_PIECES: Final = 50_000
MOST_BYTES: Final = 9_500_000  # of packed arrays: with plotly.js (0.6) and the rest of a page well below 15 MB
_TICKS: Final = 2**32 - 1


@dataclass(frozen=True)
class Drawing:
    """A timeline made ready to draw.

    chosen: the rows shown; place: [all rows] where each is drawn (-1: not shown); whole: seconds to the last end;
    inside: whether spans inside boxes are drawn.
    """

    timeline: Timeline
    boxes: Boxes
    chosen: IntArray
    place: IntArray
    whole: float
    inside: bool

    @property
    def rows(self) -> list[Row]:
        """The rows shown."""
        return [self.timeline.rows[row] for row in self.chosen.tolist()]

    @property
    def chunks(self) -> int:
        """How many model chunks a row holds at most."""
        return int(self.timeline.spans.chunk.max(initial=0)) + 1

    @property
    def tick(self) -> float:
        """Seconds of one tick."""
        return self.whole / _TICKS

    @property
    def looks(self) -> list[int]:
        """The categories that can be seen at any zoom, by number; forward before backward."""
        kernels = self.timeline.kernels
        inside = [label.category for label in kernels.labels] if kernels and self.inside else []
        lasting = self.boxes.category[self.boxes.end > self.boxes.start]
        return sorted({*np.unique(lasting).tolist(), *inside})

    @cached_property
    def arrays(self) -> dict[str, dict[str, str]]:
        """All arrays by the names that `assets/timeline.js` gives them."""
        ends = {"ends": self._ticks(np.array(self.timeline.ends, dtype=np.float64))}
        every: dict[str, NDArray[Any]] = {**self._boxes(), **self._spans(), **self._templates(), **self._path(), **ends}
        return {name: packed(array) for name, array in every.items()}

    def _ticks(self, seconds: FloatArray) -> NDArray[np.uint32]:
        share = seconds / self.whole if self.whole else np.zeros_like(seconds)
        return np.rint(np.clip(share, 0.0, 1.0) * _TICKS).astype(np.uint32)

    def _boxes(self) -> dict[str, NDArray[Any]]:
        spans, drawn, lead = self.timeline.spans, self.boxes, self.boxes.lead()
        of_span = np.full(len(spans) + 1, -1)  # the last entry serves cause -1
        of_span[drawn.order] = np.repeat(np.arange(len(drawn)), np.diff(drawn.first))
        cause = of_span[spans.cause[lead]]

        def summed(values: FloatArray) -> NDArray[np.float32]:
            """Over the spans of each box."""
            sums = np.add.reduceat(values[drawn.order], drawn.first[:-1]) if len(drawn) else values[:0]
            return sums.astype(np.float32)

        return {
            "row": narrowest(self.place[spans.row[lead]]),
            "lane": narrowest(spans.lane[lead]),
            "look": narrowest(drawn.category),
            "microbatch": narrowest(spans.microbatch[lead]),
            "chunk": narrowest(spans.chunk[lead]),
            "start": self._ticks(drawn.start),
            "end": self._ticks(drawn.end),
            "waiting": self._ticks(spans.start[lead] - spans.waiting[lead]),
            "cause": np.where(cause == np.arange(len(drawn)), -1, cause).astype(np.int32),
            "name": narrowest(spans.name[lead]),
            "detail": narrowest(spans.detail[lead]),
            "bytes": summed(spans.bytes),
            "waited": summed(spans.waited),
            "slowed": summed(spans.slowed),
            "first": drawn.first.astype(np.uint32),
        }

    def _spans(self) -> dict[str, NDArray[Any]]:
        """What kernels are inside of; nothing where boxes are more than passes."""
        spans, kernels = self.timeline.spans, self.timeline.kernels
        order = self.boxes.order if self.inside else self.boxes.order[:0]
        template = kernels.template[order] if kernels else np.full(len(order), -1)
        return {
            "template": template.astype(np.int32),
            "spanStart": self._ticks(spans.start[order]),
            "spanEnd": self._ticks(spans.end[order]),
            "spanLook": narrowest(spans.category[order]),
        }

    def _templates(self) -> dict[str, NDArray[Any]]:
        kernels = self.timeline.kernels
        if kernels is None:
            nothing = np.zeros(0, dtype=np.float32)
            empty = dict.fromkeys(("label", "gap", "duration"), nothing)
            return {"templateFirst": np.zeros(1, dtype=np.uint32), **empty}
        return {
            "templateFirst": kernels.first.astype(np.uint32),
            "label": narrowest(kernels.label),
            "gap": kernels.gap.astype(np.float32),
            "duration": kernels.duration.astype(np.float32),
        }

    def _path(self) -> dict[str, NDArray[Any]]:
        path = self._joined_path()
        return {
            "pathRow": narrowest(path.row),
            "pathLane": narrowest(path.lane),
            "pathStart": self._ticks(path.start),
            "pathEnd": self._ticks(path.end),
            "pathFollows": path.follows.astype(np.uint8),
        }

    def _joined_path(self) -> Path:
        """The path's shown pieces, those that touch in one row joined, the shortest left out if they are too many."""
        path = self.timeline.path
        keep = np.flatnonzero(self.place[path.row] >= 0) if len(path.row) else np.zeros(0, dtype=np.int64)
        row, lane, start, end = self.place[path.row[keep]], path.lane[keep], path.start[keep], path.end[keep]
        follows = path.follows[keep] & (np.diff(keep, prepend=-1) == 1)
        if len(row) == 0:
            return Path(row, lane, start, end, follows)
        new = ~follows
        new[0] = True
        new[1:] |= (row[1:] != row[:-1]) | (lane[1:] != lane[:-1]) | (start[1:] - end[:-1] > 1e-6 * self.whole)
        first = np.flatnonzero(new)
        ends = np.maximum.reduceat(end, first)
        longest = np.sort(np.argsort(start[first] - ends, kind="stable")[:MOST_PIECES])
        first = first[longest]
        return Path(row[first], lane[first], start[first], ends[longest], follows[first])


def drawing(timeline: Timeline, most: Bytes = MOST_BYTES) -> Drawing:
    """Choose rows and join spans to boxes, each with its neighbours where there are too many for so many bytes."""
    rows = shown_rows(len(timeline.rows))
    place = np.full(len(timeline.rows), -1)
    place[rows] = np.arange(len(rows))
    whole = float(timeline.spans.end.max()) if len(timeline.spans) else 0.0
    bare = replace(timeline, kernels=_without_kernels(timeline.kernels))
    for content, many, inside in _attempts(timeline, bare):
        joined = boxes(timeline.spans, rows, by_action=len(timeline.rows) > 1, most=many)
        drawn = Drawing(content, joined, rows, place, whole, inside and not joined.bin)
        if sum(len(array["z"]) for array in drawn.arrays.values()) <= most:
            break
    return drawn


def _attempts(timeline: Timeline, bare: Timeline) -> Iterator[tuple[Timeline, int, bool]]:
    """What to try, the most that can be seen first: with kernels, without, without spans inside, ever fewer boxes."""
    yield timeline, MOST_BOXES, True
    yield bare, MOST_BOXES, True
    boxes_ = MOST_BOXES
    while boxes_ > 1:
        yield bare, boxes_, False
        boxes_ //= 2


def _without_kernels(kernels: Kernels | None) -> Kernels | None:
    """The same without what is inside spans; it says so."""
    if kernels is None:
        return None
    nothing, real = np.zeros(0, dtype=np.int64), np.zeros(0)
    lost = int(np.count_nonzero(kernels.template >= 0)) + kernels.left_out
    return Kernels(np.full(len(kernels.template), -1), np.zeros(1, np.int64), nothing, real, real, (), lost)


_INTEGERS: Final[Mapping[bool, tuple[type[np.integer[Any]], ...]]] = {
    True: (np.int16, np.int32),
    False: (np.uint8, np.uint16, np.uint32),
}


def narrowest(values: IntArray) -> NDArray[Any]:
    """The same integers in the smallest type that JavaScript has an array of.

    >>> narrowest(np.array([0, 200])).dtype, narrowest(np.array([-1, 200])).dtype
    (dtype('uint8'), dtype('int16'))
    """
    low, high = int(values.min(initial=0)), int(values.max(initial=0))
    fits = (each for each in _INTEGERS[low < 0] if np.iinfo(each).min <= low and high <= np.iinfo(each).max)
    return values.astype(next(fits))
