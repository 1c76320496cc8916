"""What is a timeline before it is drawn or written? Rows of spans, what runs inside them, and the critical path.

Everything is in SI units. Text may come from a user's file and is escaped where it is drawn, not here.
"""

from dataclasses import dataclass
from typing import Self

import numpy as np

from clustersim.common.arrays import BoolArray, FloatArray, IntArray
from clustersim.common.units import Seconds


@dataclass(frozen=True, slots=True)
class TimelineRow:
    """One line of the timeline: a pipeline rank, shown by one rank that stands for `stands_for` ranks.

    told: what tells it from other rows of its pipeline rank, empty if there are none.
    """

    label: str
    short: str
    rank: int
    represented_count: int = 1
    qualifier: str = ""

    @property
    def title(self) -> str:
        """The label, and the rank where that alone is not enough."""
        return f"{self.label}, {self.qualifier}" if self.qualifier else self.label


@dataclass(frozen=True, slots=True)
class TimelineSpans:
    """Columns of one length n.

    row: index into the timeline's rows; lane: index into its lanes; category: index into theme.CATEGORIES;
    microbatch, chunk: -1 where there is none; waiting, start, end: seconds (it waited from `waiting` to `start`);
    bytes: moved by communication, else 0; name, detail: index into `texts` (-1: none); cause: the span whose end
    allowed the start, -1 if there is none or it is not among these; waited, slowed: seconds inside in which it waited
    for others, and by which communication made it longer; per_step: microbatches of each step where there are several
    steps, through which microbatches are numbered, else 0.
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
    """What an operation inside a span says: a kernel, an exchange, or both side by side.

    look: index into theme.CATEGORIES; lines: its shape, what bounds it and how its duration is known; flop: FLOP;
    bytes: memory traffic; payload: bytes of the exchange.
    """

    name: str
    look: int
    lines: tuple[str, ...]
    flop: float = 0.0
    bytes: float = 0.0
    payload: float = 0.0


@dataclass(frozen=True, slots=True)
class KernelTemplates:
    """What runs inside spans. Runs of one block are mostly equal, so spans refer to templates.

    template: [spans] number of a template, -1 where nothing is known; first: [templates + 1] where each begins in
    label: [n] index into labels, gap: [n] seconds since the operation before (at first since the span's start),
    duration: [n] seconds; left_out: spans whose operations are known and were too many.
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
        """Nothing inside so many spans."""
        no_ids, no_seconds = np.zeros(0, dtype=np.int64), np.zeros(0)
        return cls(
            np.full(span_count, -1), np.zeros(1, dtype=np.int64), no_ids, no_seconds, no_seconds, (), omitted_spans
        )


@dataclass(frozen=True, slots=True)
class TimelinePath:
    """The critical path: pieces in order of time, each in a row and a lane. Columns of one length.

    follows: whether the piece before is the one that the path came from, and not one on a rank that is not shown.
    """

    row: IntArray
    lane: IntArray
    start: FloatArray
    end: FloatArray
    is_connected: BoolArray

    @property
    def is_complete(self) -> bool:
        """Whether all of it is shown."""
        return bool(self.is_connected.all())


@dataclass(frozen=True, slots=True)
class PipelineTimeline:
    """Rows of spans; lane 0 is computation, further lanes are kinds of communication.

    row_word: what a row is called; row_note: what must be said of that, if anything; ends: seconds at which steps end
    that another one follows; of_rows: of how many rows these were chosen, 0 for all.
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
