"""What does a page show? The answer of one simulation, cut to what is drawn; pure data, no drawing.

Everything is in SI units. Text may come from a user's file and is escaped where it is drawn, not here. Categories give
colours; labels give words, so a part may be named more precisely than its category.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

import numpy as np

from clustersim.analysis.economics import Economics
from clustersim.analysis.expert_loads import FullestRank
from clustersim.analysis.formats import Formats
from clustersim.analysis.losses import Help, Loss
from clustersim.analysis.stragglers import Stragglers, Waits
from clustersim.analysis.utilization import gpu_hours
from clustersim.arrays import BoolArray, FloatArray, IntArray
from clustersim.cost.record import StepRow
from clustersim.cost.timing import Provenance
from clustersim.report.theme import Category
from clustersim.units import Bytes, FlopPerSecond, Seconds

if TYPE_CHECKING:  # what only pages show: a terminal's view does not wait for it
    from clustersim.analysis.nearest import NearestRun
    from clustersim.analysis.what_if import WhatIfs
    from clustersim.report.critical_path import CriticalPath
    from clustersim.report.heatmap import Heatmap
    from clustersim.report.network import Network
    from clustersim.report.overlap import StageOverlap
    from clustersim.report.topology import Picture

ROUNDING: Final = 1e-9
"""Part of the step time that sums of times are off by."""


@dataclass(frozen=True, slots=True)
class Subject:
    """What was simulated, in words.

    placement: which GPUs of the machine the job has, empty if it says nothing of them; disturbed: what is wrong with
    the cluster, empty if nothing is.
    """

    title: str
    model: str
    cluster: str
    gpu: str
    layout: str
    placement: str = ""
    disturbed: str = ""


@dataclass(frozen=True, slots=True)
class Steps:
    """Several successive steps. times: [steps] seconds of each; spread: seconds by name, from the least to the most."""

    times: FloatArray
    spread: Mapping[str, Seconds]


@dataclass(frozen=True, slots=True)
class Verdict:
    """The headline. convention: how FLOP are counted and which peak is meant; worst_stage: its label.

    mfu_causal: MFU with attention as its causal mask leaves it; steps: where there are several; then step_time is
    their mean; band: between what the step time is expected; host: what the fullest host holds, and what it has, where
    anything is offloaded; experts: whose get the most rows, where loads are uneven; formats: of products, where there
    are several; economics: what the step costs and what energy it takes.
    """

    step_time: Seconds
    tokens_per_s: float
    tokens_per_s_per_gpu: float
    model_flops_per_gpu: FlopPerSecond
    mfu: float
    mfu_causal: float
    hfu: float
    convention: str
    fits: bool
    peak_memory: Bytes
    memory_capacity: Bytes
    worst_stage: str
    bubble_fraction: float
    exposed_communication_fraction: float
    steps: Steps | None = None
    band: tuple[Seconds, Seconds] | None = None
    host: tuple[Bytes, Bytes] | None = None
    experts: FullestRank | None = None
    formats: Formats | None = None
    economics: Economics | None = None

    @property
    def gpu_hours(self) -> float:
        """Hours of all GPUs together for a trillion tokens."""
        return gpu_hours(self.tokens_per_s_per_gpu)


@dataclass(frozen=True, slots=True)
class Trust:
    """How far the answer carries.

    provenance: share of busy time by source of its durations, summing to 1; experience: how such predictions compared
    with real runs; suggestions: changes that would make it fit; steps: real ones that the record predicted.
    """

    ranks: int
    simulated_ranks: int
    spans: int
    provenance: Mapping[Provenance, float]
    experience: str = ""
    warnings: tuple[str, ...] = ()
    suggestions: tuple[str, ...] = ()
    not_modelled: tuple[str, ...] = ()
    steps: Sequence[StepRow] = ()


@dataclass(frozen=True, slots=True)
class Breakdown:
    """Where the step's time goes.

    labels, categories: [parts]; step: [parts] seconds, the mean over ranks, which sum
    to the step time; stages: [rows, parts] seconds, each row sums to the step time; path: [parts] seconds of the
    critical path, which also sum to the step time; ideal: seconds that the model's FLOP take at the peak, part of the
    first part, or 0 where that is not longer (by convention attention counts in full, and causal kernels skip half).
    """

    labels: tuple[str, ...]
    categories: tuple[Category, ...]
    step: FloatArray
    stages: FloatArray
    path: FloatArray
    ideal: Seconds = 0.0

    @property
    def present(self) -> IntArray:
        """The parts that are more than rounding, in the mean, on a stage or on the critical path."""
        most = np.maximum(np.maximum(self.step, self.path), self.stages.max(axis=0, initial=0.0))
        return np.flatnonzero(most > ROUNDING * self.step.sum())


@dataclass(frozen=True, slots=True)
class ShownLoss:
    """What keeps the step from the ideal. look: of its first part; help: None where no change was simulated."""

    loss: Loss
    look: Category
    help: Help | None = None


@dataclass(frozen=True, slots=True)
class Row:
    """One line of the timeline: a pipeline rank, shown by one rank that stands for `stands_for` ranks.

    told: what tells it from other rows of its pipeline rank, empty if there are none.
    """

    label: str
    short: str
    rank: int
    stands_for: int = 1
    told: str = ""

    @property
    def title(self) -> str:
        """The label, and the rank where that alone is not enough."""
        return f"{self.label}, {self.told}" if self.told else self.label

    @property
    def named(self) -> str:
        """The label with the rank, and how many it stands for."""
        rank = self.told or f"rank {self.rank}"
        return f"{self.label}, {rank}" + (f" (for {self.stands_for:,})" if self.stands_for > 1 else "")


@dataclass(frozen=True, slots=True)
class Spans:
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
    waiting: FloatArray
    start: FloatArray
    end: FloatArray
    bytes: FloatArray
    name: IntArray
    detail: IntArray
    cause: IntArray
    waited: FloatArray
    slowed: FloatArray
    texts: tuple[str, ...]
    per_step: int = 0

    def __len__(self) -> int:
        return len(self.row)


@dataclass(frozen=True, slots=True)
class KernelLabel:
    """What an operation inside a span says: a kernel, an exchange, or both side by side.

    category: index into theme.CATEGORIES; lines: its shape, what bounds it and how its duration is known; flop: FLOP;
    bytes: memory traffic; payload: bytes of the exchange.
    """

    name: str
    category: int
    lines: tuple[str, ...]
    flop: float = 0.0
    bytes: float = 0.0
    payload: float = 0.0


@dataclass(frozen=True, slots=True)
class Kernels:
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
    left_out: int = 0


@dataclass(frozen=True, slots=True)
class Path:
    """The critical path: pieces in order of time, each in a row and a lane. Columns of one length.

    follows: whether the piece before is the one that the path came from, and not one on a rank that is not shown.
    """

    row: IntArray
    lane: IntArray
    start: FloatArray
    end: FloatArray
    follows: BoolArray

    @property
    def whole(self) -> bool:
        """Whether all of it is shown."""
        return bool(self.follows.all())


@dataclass(frozen=True, slots=True)
class Timeline:
    """Rows of spans; lane 0 is computation, further lanes are kinds of communication.

    row_word: what a row is called; row_note: what must be said of that, if anything; ends: seconds at which steps end
    that another one follows; kernels: what runs inside spans, where it is shown; of_rows: of how many rows these were
    chosen, 0 for all.
    """

    rows: tuple[Row, ...]
    lanes: tuple[str, ...]
    spans: Spans
    path: Path
    row_word: str = "stage"
    row_note: str = ""
    ends: tuple[Seconds, ...] = ()
    kernels: Kernels | None = None
    of_rows: int = 0


@dataclass(frozen=True, slots=True)
class StageMemory:
    """What a pipeline rank holds. times: [t] seconds, ascending; held: [categories, t] bytes, from times[i] on.

    experts, others: parameters, and bytes of them, their gradients and optimizer states; None where no experts are.
    """

    label: str
    short: str
    times: FloatArray
    held: FloatArray
    experts: tuple[float, Bytes] | None = None
    others: tuple[float, Bytes] = (0.0, 0.0)

    @property
    def peak(self) -> int:
        """Index of the moment at which most is held."""
        return int(self.held.sum(axis=0).argmax())


@dataclass(frozen=True, slots=True)
class Memory:
    """Memory of pipeline ranks; labels, categories: [categories]; of_stages: of how many these are, 0 for all."""

    labels: tuple[str, ...]
    categories: tuple[Category, ...]
    stages: tuple[StageMemory, ...]
    capacity: Bytes
    of_stages: int = 0


@dataclass(frozen=True, slots=True)
class Waiting:
    """Who waits for whom.

    labels, short: names of the pipeline ranks, whose ranks wait as long as `waits` says; otherwise: what is to be said
    where nobody is slow.
    """

    labels: tuple[str, ...]
    short: tuple[str, ...]
    waits: Waits
    stragglers: Stragglers
    otherwise: str

    @property
    def spread(self) -> Seconds:
        """By how much ranks of one pipeline rank differ at most."""
        return float((self.waits.most - self.waits.least).max(initial=0.0))


@dataclass(frozen=True, slots=True)
class TableView:
    """All that a terminal shows. waiting: where something is disturbed or ranks of one pipeline rank differ."""

    subject: Subject
    verdict: Verdict
    trust: Trust
    breakdown: Breakdown
    waiting: Waiting | None = field(default=None, kw_only=True)


@dataclass(frozen=True, slots=True)
class PageView(TableView):
    """All that the page shows.

    notes: further lines for the foot of the page, such as the version that made it. On pages only, each None where
    there is nothing to show: dominant, of all ranks over time; overlap of communication and computation; network;
    topology; critical_path; what_ifs, changes that were simulated; losses: the largest; nearest, the published
    run that is most like this one.
    """

    timeline: Timeline
    memory: Memory
    notes: tuple[str, ...] = field(default=())
    dominant: "Heatmap | None" = None
    overlap: "StageOverlap | None" = None
    network: "Network | None" = None
    topology: "Picture | None" = None
    critical_path: "CriticalPath | None" = None
    what_ifs: "WhatIfs | None" = None
    losses: tuple[ShownLoss, ...] = ()
    nearest: "NearestRun | None" = None
