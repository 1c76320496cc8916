"""What runs inside the passes that the page shows, down to one kernel?

Most runs of a block take exactly what the block takes alone. These are told by their times and share one template; only
runs that waited, were slowed or vary are worked out. Equal templates are kept once.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

import numpy as np

from clustersim.common.arrays import FloatArray, IntArray
from clustersim.common.units import Seconds
from clustersim.cost.segment import SegmentTiming
from clustersim.program.task import ComputeTask, Segment
from clustersim.report.export.span_descriptions import Label, operation_label
from clustersim.report.theme import CATEGORIES
from clustersim.report.timeline_data import KernelLabel, Kernels
from clustersim.results.simulation_result import SimulationResult

MOST_OPERATIONS: Final = 1_000_000
_ROUNDING: Final = 1e-9  # of the makespan
_LINES: Final = ("kernel", "dtype", "shape"), ("collective", "group")


def kernels_of(result: SimulationResult, rows: IntArray, most: int = MOST_OPERATIONS) -> Kernels:
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

    rounding: seconds by which equal times may differ; worded: numbers of labels of blocks with their timings, by
    identity, and the timings, so that they stay alive and ids apart.
    """

    result: SimulationResult
    most: int
    rounding: Seconds
    columns: list[tuple[IntArray, FloatArray, FloatArray]] = field(default_factory=list)
    numbers: dict[object, int] = field(default_factory=dict)
    labels: dict[KernelLabel, int] = field(default_factory=dict)
    worded: dict[tuple[Segment, int], tuple[IntArray, SegmentTiming]] = field(default_factory=dict)
    own: int = 0
    left_out: int = 0

    def of_rank(self, rank: int, rows: IntArray) -> IntArray:
        """The template of each of a rank's rows: -1 for communication, and for what is too much."""
        trace = self.result.trace
        tasks = self.result.program.programs[int(self.result.program.program_index[rank])].tasks
        blocks = {number: task.segment for number, task in enumerate(tasks) if isinstance(task, ComputeTask)}
        timings = {block: self.result.cost.time_segment(rank, block) for block in dict.fromkeys(blocks.values())}
        task = trace.task[rows].tolist()
        alone = np.array([timings[blocks[item]].seconds if item in blocks else np.nan for item in task])
        off = np.abs(trace.end[rows] - trace.start[rows] - alone)
        longer = (trace.waited[rows] + trace.slowed[rows] != 0) | np.isin(rows, trace.contention.event)
        plain = (off <= self.rounding) & ~longer
        template = np.full(len(rows), -1)
        for at in np.flatnonzero(plain).tolist():
            template[at] = self._alone(blocks[task[at]], timings[blocks[task[at]]])
        varied = np.flatnonzero(~plain & ~np.isnan(alone))
        if len(varied):
            template[varied] = self._varied(rank, rows[varied], [blocks[task[at]] for at in varied.tolist()])
        return template

    def _alone(self, block: Segment, timing: SegmentTiming) -> int:
        """The template of runs that take what their block takes alone."""
        key, labels = (block, id(timing)), self._labels(block, timing)
        duration = np.array(timing.durations)
        return self._add(key, labels, np.zeros_like(duration), duration)

    def _varied(self, rank: int, rows: IntArray, blocks: Sequence[Segment]) -> list[int]:
        """Templates of runs that were waited in, slowed or varied; none beyond the limit. blocks: of the rows."""
        trace = self.result.trace
        sizes = np.cumsum([len(block.operations) for block in blocks])
        allowed = int(np.searchsorted(sizes, self.most - self.own, side="right"))
        self.left_out += len(rows) - allowed
        if not allowed:
            return [-1] * len(rows)
        self.own += int(sizes[allowed - 1])
        tasks, starts = trace.task[rows[:allowed]].tolist(), trace.start[rows[:allowed]].tolist()
        operations = self.result.operation_spans(rank, frozenset(tasks))
        first = np.searchsorted(operations.task, np.arange(int(operations.task.max()) + 2))
        templates = []
        for number, start, block in zip(tasks, starts, blocks[:allowed], strict=True):
            chosen = slice(int(first[number]), int(first[number + 1]))
            begins, ends = operations.start[chosen], operations.end[chosen]
            gap, duration = begins - np.concatenate(([start], ends[:-1])), ends - begins
            labels = self._labels(block, self.result.cost.time_segment(rank, block))
            gap = np.where(gap > self.rounding, gap, 0.0)
            key = (labels.tobytes(), gap.astype(np.float32).tobytes(), duration.astype(np.float32).tobytes())
            templates.append(self._add(key, labels, gap, duration))
        return templates + [-1] * (len(rows) - allowed)

    def _add(self, key: object, labels: IntArray, gap: FloatArray, duration: FloatArray) -> int:
        if key not in self.numbers:
            self.numbers[key] = len(self.columns)
            self.columns.append((labels, gap, duration))
        return self.numbers[key]

    def _labels(self, block: Segment, timing: SegmentTiming) -> IntArray:
        key = (block, id(timing))
        if key not in self.worded:
            words = (operation_label(operation, timing, place) for place, operation in enumerate(block.operations))
            numbers = [self.labels.setdefault(kernel_label(word), len(self.labels)) for word in words]
            self.worded[key] = np.array(numbers, dtype=np.int64), timing
        return self.worded[key][0]

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
    lines += [f"bound by {said['bound']}", str(said["duration_from"])]  # what limits it, and how that is known
    return KernelLabel(
        label.name, CATEGORIES.index(label.category), tuple(filter(None, lines)),
        float(said.get("flop", 0)), float(said.get("memory_bytes", 0)), float(said.get("payload_bytes", 0)),
    )  # fmt: skip
