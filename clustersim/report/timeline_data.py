"""What is a timeline before it is drawn? Rows of spans, the kernels inside them, and the critical path.

All quantities are in SI units. Text may come from a user's file and is escaped where it is drawn, not here.
"""

from dataclasses import dataclass
from typing import Self

import numpy as np

from clustersim.common.arrays import BoolArray, FloatArray, IntArray
from clustersim.common.units import Seconds


@dataclass(frozen=True, slots=True)
class TimelineRow:
    """One row of the timeline: a pipeline rank, shown by one rank that represents `represented_count` ranks.

    qualifier: distinguishes it from other rows of its pipeline rank, empty if there are none.
    """

    label: str
    short: str
    rank: int
    represented_count: int = 1
    qualifier: str = ""

    @property
    def title(self) -> str:
        """The label, with the qualifier if there is one."""
        return f"{self.label}, {self.qualifier}" if self.qualifier else self.label


@dataclass(frozen=True, slots=True)
class TimelineSpans:
    """Columns of one length n.

    row: index into the timeline's rows; lane: index into its lanes; category: index into theme.CATEGORY_STYLES;
    microbatch, chunk: -1 if there is none; waiting_since, start, end: seconds (it waited from `waiting_since`
    to `start`); bytes: moved by communication, else 0; name, detail: index into `texts` (-1: none); cause:
    index of the span whose end allowed the start, -1 if there is none or it is not shown; waited, slowed:
    seconds inside in which it waited for other ranks, and by which communication slowed it;
    microbatches_per_step: microbatches of each step if there are several steps, through which microbatches are
    numbered, else 0.
    """

    row: IntArray
    lane: IntArray
    category: IntArray
    microbatch: IntArray
    chunk: IntArray
    waiting_since: FloatArray
    start: FloatArray
    end: FloatArray
    bytes: FloatArray
    name: IntArray
    detail: IntArray
    cause: IntArray
    waited: FloatArray
    slowed: FloatArray
    texts: tuple[str, ...]
    microbatches_per_step: int = 0

    def __len__(self) -> int:
        return len(self.row)


@dataclass(frozen=True, slots=True)
class KernelLabel:
    """Label of an operation inside a span: a kernel, a comm op, or both overlapped.

    Field names are keys of the page's JSON.

    style: index into theme.CATEGORY_STYLES; lines: shape, bottleneck and provenance; flop: FLOP; bytes: memory
    traffic; payload: bytes of the comm op.
    """

    name: str
    style: int
    lines: tuple[str, ...]
    flop: float = 0.0
    bytes: float = 0.0
    payload: float = 0.0


@dataclass(frozen=True, slots=True)
class KernelTemplates:
    """Operations inside spans, as shared templates, since most runs of a segment are equal.

    template: [spans] index of the template, -1 if there is none; first: [templates + 1] offsets into label, gap
    and duration; label: [n] index into labels; gap: [n] seconds since the previous operation (for the first
    since the span's start); duration: [n] seconds; omitted_spans: spans with known operations that are left out
    because of the limit.
    """

    template: IntArray
    first: IntArray
    label: IntArray
    gap: FloatArray
    duration: FloatArray
    labels: tuple[KernelLabel, ...]
    omitted_spans: int = 0

    @classmethod
    def empty(cls, span_count: int, omitted_spans: int = 0) -> Self:
        """Templates of `span_count` spans without operations."""
        no_ids, no_seconds = np.zeros(0, dtype=np.int64), np.zeros(0)
        return cls(
            np.full(span_count, -1), np.zeros(1, dtype=np.int64), no_ids, no_seconds, no_seconds, (), omitted_spans
        )


@dataclass(frozen=True, slots=True)
class TimelinePath:
    """The critical path: segments in order of time, each with row and lane. Columns of one length.

    is_connected: whether the preceding segment is its predecessor on the path, and not one on a rank that is
    not shown.
    """

    row: IntArray
    lane: IntArray
    start: FloatArray
    end: FloatArray
    is_connected: BoolArray

    @property
    def is_complete(self) -> bool:
        """Whether the complete path is shown."""
        return bool(self.is_connected.all())


@dataclass(frozen=True, slots=True)
class PipelineTimeline:
    """Rows of spans; lane 0 is compute, the other lanes are kinds of communication.

    row_type: what a row is (stage, pipeline rank); row_note: explanation of that, if any; step_ends: seconds at
    which steps end that another step follows; candidate_row_count: number of rows that these were chosen from,
    0 if all.
    """

    rows: tuple[TimelineRow, ...]
    lanes: tuple[str, ...]
    spans: TimelineSpans
    path: TimelinePath
    kernels: KernelTemplates
    row_type: str = "stage"
    row_note: str = ""
    step_ends: tuple[Seconds, ...] = ()
    candidate_row_count: int = 0
