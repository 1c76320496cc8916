"""What runs inside the passes that the page shows, down to one kernel?

Most runs of a block take exactly what the block takes alone. These are told by their times and share one template; only
runs that waited, were slowed or vary are worked out. Equal templates are kept once.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final

import numpy as np

from clustersim.answer import Answer
from clustersim.arrays import BoolArray, FloatArray, IntArray
from clustersim.cost.block import BlockTiming
from clustersim.program.task import Block, Compute
from clustersim.report.answer_timeline import shown_rows_of
from clustersim.report.export.words import Label, operation_label
from clustersim.report.theme import CATEGORIES
from clustersim.report.view import KernelLabel, Kernels, Timeline
from clustersim.units import Seconds

MOST_OPERATIONS: Final = 1_000_000
_ROUNDING: Final = 1e-9  # of the makespan
_LINES: Final = ("kernel", "dtype", "shape"), ("collective", "group")


def with_kernels(result: Answer, timeline: Timeline) -> Timeline:
    """A timeline of `timeline_of` with the kernels inside its passes."""
    rows = shown_rows_of(result, [row.rank for row in timeline.rows])
    return replace(timeline, kernels=kernels_of(result, rows))


def kernels_of(result: Answer, rows: IntArray, most: int = MOST_OPERATIONS) -> Kernels:
    """What runs inside spans that are these rows of the trace; at most so many operations that no template shares."""
    templates = _Templates(result, most, _ROUNDING * result.trace.makespan)
    template = np.full(len(rows), -1)
    ranks = result.trace.rank[rows]
    for rank in np.unique(ranks).tolist():
        mine = np.flatnonzero(ranks == rank)
        template[mine] = templates.of_rank(rank, rows[mine])
    return templates.kernels(template)


@dataclass(slots=True)
class _Templates:
    """Templates and labels, numbered as they are met; columns: label, gap and duration of each template.

    rounding: seconds by which equal times may differ.
    """

    result: Answer
    most: int
    rounding: Seconds
    columns: list[tuple[IntArray, FloatArray, FloatArray]] = field(default_factory=list)
    numbers: dict[object, int] = field(default_factory=dict)
    labels: dict[KernelLabel, int] = field(default_factory=dict)
    worded: dict[tuple[Block, int], IntArray] = field(default_factory=dict)
    timings: list[BlockTiming] = field(default_factory=list)
    own: int = 0
    left_out: int = 0

    def of_rank(self, rank: int, rows: IntArray) -> IntArray:
        """The template of each of a rank's rows: -1 for communication, and for what is too much."""
        trace = self.result.trace
        tasks = self.result.program.programs[int(self.result.program.kind[rank])].tasks
        blocks = {number: task.block for number, task in enumerate(tasks) if isinstance(task, Compute)}
        timings = {block: self.result.cost.block(rank, block) for block in dict.fromkeys(blocks.values())}
        task = trace.task[rows]
        template = np.full(len(rows), -1)
        computes = np.isin(task, list(blocks))
        alone = np.array([timings[blocks[number]].seconds for number in task[computes].tolist()])
        plain = computes.copy()
        plain[computes] = self._undisturbed(rows[computes], alone)
        for number, at in zip(task[plain].tolist(), np.flatnonzero(plain).tolist(), strict=True):
            template[at] = self._alone(blocks[number], timings[blocks[number]])
        varied = np.flatnonzero(computes & ~plain)
        if len(varied):
            template[varied] = self._varied(rank, rows[varied], blocks, timings)
        return template

    def _undisturbed(self, rows: IntArray, alone: FloatArray) -> BoolArray:
        """Whether runs take what their blocks take alone."""
        trace = self.result.trace
        longer = trace.waited[rows] + trace.slowed[rows]
        off = np.abs(trace.end[rows] - trace.start[rows] - alone)
        undisturbed: BoolArray = (longer == 0) & (off <= self.rounding) & ~np.isin(rows, trace.contention.row)
        return undisturbed

    def _alone(self, block: Block, timing: BlockTiming) -> int:
        key = (block, id(timing))
        if key not in self.numbers:
            duration = np.array(timing.durations)
            self.timings.append(timing)  # keeps it alive, so that ids stay apart
            self._add(key, self._labels(block, timing), np.zeros_like(duration), duration)
        return self.numbers[key]

    def _varied(
        self, rank: int, rows: IntArray, blocks: Mapping[int, Block], timings: Mapping[Block, BlockTiming]
    ) -> list[int]:
        """Templates of runs that were waited in, slowed or varied; none beyond the limit. blocks: by number of task."""
        trace = self.result.trace
        tasks = trace.task[rows].tolist()
        sizes = np.cumsum([len(blocks[number].operations) for number in tasks])
        allowed = int(np.searchsorted(sizes, self.most - self.own, side="right"))
        self.left_out += len(tasks) - allowed
        if not allowed:
            return [-1] * len(tasks)
        self.own += int(sizes[allowed - 1])
        operations = self.result.operations(rank, frozenset(tasks[:allowed]))
        first = np.searchsorted(operations.task, np.arange(int(operations.task.max()) + 2))
        templates = []
        for number, start in zip(tasks[:allowed], trace.start[rows[:allowed]].tolist(), strict=True):
            chosen = slice(int(first[number]), int(first[number + 1]))
            begins, ends = operations.start[chosen], operations.end[chosen]
            gap, duration = begins - np.concatenate(([start], ends[:-1])), ends - begins
            labels = self._labels(blocks[number], timings[blocks[number]])
            gap = np.where(gap > self.rounding, gap, 0.0)
            key = (labels.tobytes(), gap.astype(np.float32).tobytes(), duration.astype(np.float32).tobytes())
            templates.append(self._add(key, labels, gap, duration))
        return templates + [-1] * (len(tasks) - allowed)

    def _add(self, key: object, labels: IntArray, gap: FloatArray, duration: FloatArray) -> int:
        if key not in self.numbers:
            self.numbers[key] = len(self.columns)
            self.columns.append((labels, gap, duration))
        return self.numbers[key]

    def _labels(self, block: Block, timing: BlockTiming) -> IntArray:
        key = (block, id(timing))
        if key not in self.worded:
            self.timings.append(timing)
            words = (operation_label(each, timing, place) for place, each in enumerate(block.operations))
            numbers = [self.labels.setdefault(kernel_label(word), len(self.labels)) for word in words]
            self.worded[key] = np.array(numbers, dtype=np.int64)
        return self.worded[key]

    def kernels(self, template: IntArray) -> Kernels:
        """All templates, one after the other."""
        nothing = (np.zeros(0, dtype=np.int64), np.zeros(0), np.zeros(0))
        label, gap, duration = (np.concatenate(column) for column in zip(nothing, *self.columns, strict=True))
        first = np.cumsum([0, *(len(labels) for labels, _, _ in self.columns)])
        return Kernels(template, first, label, gap, duration, tuple(self.labels), self.left_out)


def kernel_label(label: Label) -> KernelLabel:
    """What the page says of an operation that a trace has with its arguments."""
    said = label.arguments
    lines = [", ".join(str(said[key]) for key in keys if key in said) for keys in _LINES]
    lines += _bound(said)
    return KernelLabel(
        label.name, CATEGORIES.index(label.category), tuple(line for line in lines if line),
        float(said.get("flop", 0)), float(said.get("memory_bytes", 0)), float(said.get("payload_bytes", 0)),
    )  # fmt: skip


def _bound(said: Mapping[str, str | int | float]) -> Sequence[str]:
    """What limits it, and how its duration is known."""
    return (f"bound by {said['bound']}", str(said["duration_from"]))
