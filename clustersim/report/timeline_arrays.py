"""Which arrays of a timeline go into the file, and how are they packed?

Boxes (`timeline_boxes`) with their labels, the spans that they merge, kernel templates, ends of steps, and
the segments of the critical path. Times are integer ticks, the makespan over 2^32; times inside a span are
single-precision seconds from one operation to the next. So that the page of any scenario can be opened,
rows and boxes are limited, and if the arrays are still too large, detail is dropped from the innermost
level outwards: kernels, spans inside boxes, then boxes.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from clustersim.common.arrays import FloatArray, IntArray
from clustersim.common.units import Bytes
from clustersim.report.figure import compress_array
from clustersim.report.row_selection import sample_rows
from clustersim.report.timeline_boxes import TimelineBoxes, merge_spans
from clustersim.report.timeline_data import KernelTemplates, PipelineTimeline, TimelineRow

MAX_BOXES: Final = 200_000
MAX_PATH_SEGMENTS: Final = 50_000
MAX_ARRAY_BYTES: Final = (
    9_500_000  # of packed arrays: a page with plotly.js (0.6 MB) and all else stays well below 15 MB
)
_MAX_TICK: Final = 2**32 - 1


@dataclass(frozen=True)
class TimelineDrawing:
    """A timeline reduced to what the file holds.

    kernels: those in the file; boxes: merged spans; shown_rows: indices of the rows shown; row_positions: [all
    rows] position of each row in the figure (-1: not shown); end_seconds: end of the last span;
    has_spans_in_boxes: whether the spans inside boxes are in the file.
    """

    timeline: PipelineTimeline
    kernels: KernelTemplates
    boxes: TimelineBoxes
    shown_rows: IntArray
    row_positions: IntArray
    end_seconds: float
    has_spans_in_boxes: bool

    @property
    def rows(self) -> list[TimelineRow]:
        """The rows shown."""
        return [self.timeline.rows[row] for row in self.shown_rows.tolist()]

    @property
    def max_chunks(self) -> int:
        """Maximum number of model chunks in a row."""
        return int(self.timeline.spans.chunk.max(initial=0)) + 1

    @property
    def tick_seconds(self) -> float:
        """Seconds of one tick."""
        return self.end_seconds / _MAX_TICK

    @property
    def visible_styles(self) -> list[int]:
        """Indices into CATEGORY_STYLES that can be visible at any zoom, ascending: forward before backward."""
        inner_styles = [label.style for label in self.kernels.labels] if self.has_spans_in_boxes else []
        box_styles = self.boxes.category[self.boxes.end > self.boxes.start]
        return sorted({*np.unique(box_styles).tolist(), *inner_styles})

    @cached_property
    def arrays(self) -> dict[str, dict[str, str]]:
        """All packed arrays, by the names that `assets/timeline.js` uses."""
        ends = {"ends": self._to_ticks(np.array(self.timeline.step_ends, dtype=np.float64))}
        arrays: dict[str, NDArray[Any]] = {**self._box_arrays(), **self._inner_arrays(), **self._path_arrays(), **ends}
        return {name: compress_array(array) for name, array in arrays.items()}

    def _to_ticks(self, seconds: FloatArray) -> NDArray[np.uint32]:
        share = seconds / self.end_seconds if self.end_seconds else np.zeros_like(seconds)
        return np.rint(np.clip(share, 0.0, 1.0) * _MAX_TICK).astype(np.uint32)

    def _box_arrays(self) -> dict[str, NDArray[Any]]:
        spans, boxes, first_span = self.timeline.spans, self.boxes, self.boxes.first_spans()
        box_of_span = np.full(len(spans) + 1, -1)  # the last entry serves cause -1
        box_of_span[boxes.order] = np.repeat(np.arange(len(boxes)), np.diff(boxes.first))
        cause = box_of_span[spans.cause[first_span]]

        def sum_by_box(values: FloatArray) -> NDArray[np.float32]:
            """Sum of a column over the spans of each box."""
            sums = np.add.reduceat(values[boxes.order], boxes.first[:-1]) if len(boxes) else values[:0]
            return sums.astype(np.float32)

        return {
            "row": smallest_dtype(self.row_positions[spans.row[first_span]]),
            "lane": smallest_dtype(spans.lane[first_span]),
            "style": smallest_dtype(boxes.category),
            "microbatch": smallest_dtype(spans.microbatch[first_span]),
            "chunk": smallest_dtype(spans.chunk[first_span]),
            "start": self._to_ticks(boxes.start),
            "end": self._to_ticks(boxes.end),
            "waiting": self._to_ticks(spans.start[first_span] - spans.waiting_since[first_span]),
            "cause": np.where(cause == np.arange(len(boxes)), -1, cause).astype(np.int32),
            "name": smallest_dtype(spans.name[first_span]),
            "detail": smallest_dtype(spans.detail[first_span]),
            "bytes": sum_by_box(spans.bytes),
            "waited": sum_by_box(spans.waited),
            "slowed": sum_by_box(spans.slowed),
            "first": boxes.first.astype(np.uint32),
        }

    def _inner_arrays(self) -> dict[str, NDArray[Any]]:
        """Spans in boxes and their kernels; no spans if boxes merge different actions."""
        spans, kernels = self.timeline.spans, self.kernels
        order = self.boxes.order if self.has_spans_in_boxes else self.boxes.order[:0]
        return {
            "template": kernels.template[order].astype(np.int32),
            "spanStart": self._to_ticks(spans.start[order]),
            "spanEnd": self._to_ticks(spans.end[order]),
            "spanStyle": smallest_dtype(spans.category[order]),
            "templateFirst": kernels.first.astype(np.uint32),
            "label": smallest_dtype(kernels.label),
            "gap": kernels.gap.astype(np.float32),
            "duration": kernels.duration.astype(np.float32),
        }

    def _path_arrays(self) -> dict[str, NDArray[Any]]:
        """Shown critical-path segments: contiguous ones of a row merged, the shortest dropped if too many."""
        path = self.timeline.path
        keep = np.flatnonzero(self.row_positions[path.row] >= 0)
        row, lane, start, end = self.row_positions[path.row[keep]], path.lane[keep], path.start[keep], path.end[keep]
        follows = path.is_connected[keep] & (np.diff(keep, prepend=-1) == 1)
        changes_lane = (np.diff(row, prepend=-1) != 0) | (np.diff(lane, prepend=-1) != 0)
        first = np.flatnonzero(
            ~follows | changes_lane | (start - np.append(start[:1], end[:-1]) > 1e-6 * self.end_seconds)
        )
        ends = np.append(end[first[1:] - 1], end[-1:])
        longest = np.sort(np.argsort(start[first] - ends, kind="stable")[:MAX_PATH_SEGMENTS])
        first, ends = first[longest], ends[longest]
        return {
            "pathRow": smallest_dtype(row[first]),
            "pathLane": smallest_dtype(lane[first]),
            "pathStart": self._to_ticks(start[first]),
            "pathEnd": self._to_ticks(ends),
            "pathFollows": follows[first].astype(np.uint8),
        }


def build_drawing(timeline: PipelineTimeline, max_bytes: Bytes = MAX_ARRAY_BYTES) -> TimelineDrawing:
    """Choose rows and merge spans into boxes, reducing detail until the packed arrays have at most `max_bytes`."""
    rows = sample_rows(len(timeline.rows))
    positions = np.full(len(timeline.rows), -1)
    positions[rows] = np.arange(len(rows))
    end_seconds = float(timeline.spans.end.max(initial=0.0))
    for kernels, max_boxes, with_inner_spans in _reduction_levels(timeline.kernels):
        merged_boxes = merge_spans(timeline.spans, rows, by_action=len(timeline.rows) > 1, max_boxes=max_boxes)
        candidate = TimelineDrawing(
            timeline,
            kernels,
            merged_boxes,
            rows,
            positions,
            end_seconds,
            with_inner_spans and not merged_boxes.bin_seconds,
        )
        if sum(len(array["z"]) for array in candidate.arrays.values()) <= max_bytes:
            break
    return candidate


def _reduction_levels(kernels: KernelTemplates) -> Iterator[tuple[KernelTemplates, int, bool]]:
    """Levels of detail, finest first: with all kernels, then without kernels, then ever fewer boxes."""
    templated_count = int(np.count_nonzero(kernels.template >= 0))
    no_kernels = KernelTemplates.empty(len(kernels.template), templated_count + kernels.omitted_spans)
    yield kernels, MAX_BOXES, True
    yield no_kernels, MAX_BOXES, True
    for halvings in range(MAX_BOXES.bit_length() - 1):
        yield no_kernels, MAX_BOXES >> halvings, False


def smallest_dtype(values: IntArray) -> NDArray[Any]:
    """Convert integers to the smallest dtype with a JavaScript typed array; signed values use at least int16.

    >>> smallest_dtype(np.array([0, 200])).dtype, smallest_dtype(np.array([-1, 200])).dtype
    (dtype('uint8'), dtype('int16'))
    """
    low, high = int(values.min(initial=0)), int(values.max(initial=0))
    signed = np.result_type(np.int16, np.min_scalar_type(min(low, -1 - high)))
    return values.astype(signed if low < 0 else np.min_scalar_type(high))
