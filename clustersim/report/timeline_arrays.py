"""What of a timeline goes into the file, and how?

Boxes (`detail`) with what they say, the spans that they join, templates of kernels, ends of steps, and the pieces of
the critical path. Times are whole numbers of a tick, the makespan over 2^32; what is inside a span is seconds in single
precision, counted from one operation to the next. So that the page of any scenario can be opened, rows and boxes are
limited, and where the arrays would be too large they are left out, the innermost first: kernels, spans inside boxes,
then boxes.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from clustersim.common.arrays import FloatArray, IntArray
from clustersim.common.units import Bytes
from clustersim.report.figure import packed
from clustersim.report.row_selection import shown_rows
from clustersim.report.timeline_boxes import Boxes, boxes
from clustersim.report.timeline_data import Kernels, Row, Timeline

MOST_BOXES: Final = 200_000
MOST_PIECES: Final = 50_000
MOST_BYTES: Final = 9_500_000  # of packed arrays: with plotly.js (0.6) and the rest of a page well below 15 MB
_TICKS: Final = 2**32 - 1


@dataclass(frozen=True)
class Drawing:
    """A timeline made ready to draw.

    kernels: those in the file; chosen: the rows shown; place: [all rows] where each is drawn (-1: not shown); whole:
    seconds to the last end; inside: whether spans inside boxes are drawn.
    """

    timeline: Timeline
    kernels: Kernels
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
        inside = [label.look for label in self.kernels.labels] if self.inside else []
        lasting = self.boxes.category[self.boxes.end > self.boxes.start]
        return sorted({*np.unique(lasting).tolist(), *inside})

    @cached_property
    def arrays(self) -> dict[str, dict[str, str]]:
        """All arrays by the names that `assets/timeline.js` gives them."""
        ends = {"ends": self._ticks(np.array(self.timeline.ends, dtype=np.float64))}
        every: dict[str, NDArray[Any]] = {**self._boxes(), **self._inside(), **self._path(), **ends}
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

    def _inside(self) -> dict[str, NDArray[Any]]:
        """Spans and their kernels; nothing of spans where boxes are more than passes."""
        spans, kernels = self.timeline.spans, self.kernels
        order = self.boxes.order if self.inside else self.boxes.order[:0]
        return {
            "template": kernels.template[order].astype(np.int32),
            "spanStart": self._ticks(spans.start[order]),
            "spanEnd": self._ticks(spans.end[order]),
            "spanLook": narrowest(spans.category[order]),
            "templateFirst": kernels.first.astype(np.uint32),
            "label": narrowest(kernels.label),
            "gap": kernels.gap.astype(np.float32),
            "duration": kernels.duration.astype(np.float32),
        }

    def _path(self) -> dict[str, NDArray[Any]]:
        """The path's shown pieces, those that touch in one row joined, the shortest left out if they are too many."""
        path = self.timeline.path
        keep = np.flatnonzero(self.place[path.row] >= 0)
        row, lane, start, end = self.place[path.row[keep]], path.lane[keep], path.start[keep], path.end[keep]
        follows = path.follows[keep] & (np.diff(keep, prepend=-1) == 1)
        away = (np.diff(row, prepend=-1) != 0) | (np.diff(lane, prepend=-1) != 0)
        first = np.flatnonzero(~follows | away | (start - np.append(start[:1], end[:-1]) > 1e-6 * self.whole))
        ends = np.append(end[first[1:] - 1], end[-1:])
        longest = np.sort(np.argsort(start[first] - ends, kind="stable")[:MOST_PIECES])
        first, ends = first[longest], ends[longest]
        return {
            "pathRow": narrowest(row[first]),
            "pathLane": narrowest(lane[first]),
            "pathStart": self._ticks(start[first]),
            "pathEnd": self._ticks(ends),
            "pathFollows": follows[first].astype(np.uint8),
        }


def drawing(timeline: Timeline, most: Bytes = MOST_BYTES) -> Drawing:
    """Choose rows and join spans to boxes, each with its neighbours where there are too many for so many bytes."""
    rows = shown_rows(len(timeline.rows))
    place = np.full(len(timeline.rows), -1)
    place[rows] = np.arange(len(rows))
    whole = float(timeline.spans.end.max(initial=0.0))
    for kernels, many, inside in _attempts(timeline.kernels):
        joined = boxes(timeline.spans, rows, by_action=len(timeline.rows) > 1, most=many)
        drawn = Drawing(timeline, kernels, joined, rows, place, whole, inside and not joined.bin)
        if sum(len(array["z"]) for array in drawn.arrays.values()) <= most:
            break
    return drawn


def _attempts(kernels: Kernels) -> Iterator[tuple[Kernels, int, bool]]:
    """What to try, the most that can be seen first: with kernels, without, without spans inside, ever fewer boxes."""
    known = int(np.count_nonzero(kernels.template >= 0))
    bare = Kernels.none(len(kernels.template), known + kernels.left_out)
    yield kernels, MOST_BOXES, True
    yield bare, MOST_BOXES, True
    for halved in range(MOST_BOXES.bit_length() - 1):
        yield bare, MOST_BOXES >> halved, False


def narrowest(values: IntArray) -> NDArray[Any]:
    """The same integers in the smallest type that JavaScript has an array of, and of those with a sign no byte.

    >>> narrowest(np.array([0, 200])).dtype, narrowest(np.array([-1, 200])).dtype
    (dtype('uint8'), dtype('int16'))
    """
    low, high = int(values.min(initial=0)), int(values.max(initial=0))
    signed = np.result_type(np.int16, np.min_scalar_type(min(low, -1 - high)))
    return values.astype(signed if low < 0 else np.min_scalar_type(high))
