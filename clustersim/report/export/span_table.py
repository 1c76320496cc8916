"""What happened on a rank, span by span? The one table that every format is written from.

A row for each pass, collective and message, by start, and behind it one for each operation inside it. Columns of
one length, worked out once for each simulated rank; what a span says is a label, shared by all that say the same.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Final

import numpy as np
from numpy.typing import ArrayLike, NDArray

from clustersim.common.arrays import BoolArray, FloatArray, IntArray
from clustersim.common.lru import LruCache, unit_size
from clustersim.common.units import Seconds
from clustersim.program.program import RankProgram
from clustersim.program.task import ComputeTask, Segment, Stream, Task
from clustersim.report.export.rank_selection import TraceRank
from clustersim.report.export.span_descriptions import Label, exchange_label, operation_label, pass_label
from clustersim.results.simulation_result import SimulationResult
from clustersim.trace.trace import Trace

_KEPT: Final = 8  # simulated ranks whose tables are kept: ranks of several classes come in turn


@dataclass(frozen=True, slots=True)
class Spans:
    """Spans of a simulated rank. program: what it runs; labels: what spans say.

    row: [n] of the trace, for an operation that of its pass; task: [n] place in the program; operation: [n] place in
    the pass, -1 for a task itself; label: [n] index into labels; start, end: [n] seconds; computed: [n] seconds when
    its kernel ended; moving: [n] seconds when its exchange began to move data.
    """

    trace: Trace
    program: RankProgram
    labels: list[Label]
    row: IntArray
    task: IntArray
    operation: IntArray
    label: IntArray
    start: FloatArray
    end: FloatArray
    computed: FloatArray
    moving: FloatArray

    def __len__(self) -> int:
        return len(self.row)

    @property
    def alone(self) -> BoolArray:
        """[n] whether it is a task, and no operation inside one."""
        return np.asarray(self.operation < 0)

    @property
    def stream(self) -> IntArray:
        """[n] the stream of the rank that runs it."""
        return self.trace.stream[self.row]

    def of_tasks(self, column: NDArray[Any], nothing: float) -> NDArray[Any]:
        """[n] a column of the trace; `nothing` for operations inside tasks."""
        return np.where(self.alone, column[self.row], nothing)

    def some(self, which: BoolArray | IntArray | slice) -> "Spans":
        """Some of the rows, in order."""
        names = ("row", "task", "operation", "label", "start", "end", "computed", "moving")
        return replace(self, **{name: getattr(self, name)[which] for name in names})

    def beginning(self, tasks: int) -> "Spans":
        """So many tasks, and what is inside them."""
        after = np.flatnonzero(self.alone)[tasks : tasks + 1]
        return self.some(slice(0, int(after[0]))) if len(after) else self


@dataclass(frozen=True, slots=True)
class Export:
    """What is written: some ranks of a result. most: of each at most so many tasks, for a sample; kept: tables."""

    result: SimulationResult
    ranks: tuple[TraceRank, ...]
    most: int | None = None
    kept: LruCache[Spans] = field(default_factory=lambda: LruCache(_KEPT, unit_size))

    def __iter__(self) -> Iterator[tuple[TraceRank, Spans]]:
        """Each rank with its spans: those of the simulated one that stands for it."""
        for rank in self.ranks:
            found = self.kept.get_or_compute((rank.simulated,), partial(spans_of, self.result, rank.simulated))
            yield rank, found if self.most is None else found.beginning(self.most)


def spans_of(result: SimulationResult, rank: int) -> Spans:
    """The table of a simulated rank."""
    trace, program = result.trace, result.program.programs[int(result.program.program_index[rank])]
    rows, operations, before = (
        trace.rank_events(rank),
        result.operation_spans(rank),
        np.array(program.operation_offsets),
    )
    sizes = 1 + np.diff(before)[trace.task[rows]]
    row = np.repeat(rows, sizes)
    place = np.arange(len(row)) - np.repeat(np.cumsum(sizes) - sizes, sizes) - 1
    task, inside = trace.task[row], np.flatnonzero(place >= 0)
    entry = before[task[inside]] + place[inside]
    start, end = trace.start[row], trace.end[row]
    start[inside], end[inside] = operations.start[entry], operations.end[entry]
    computed, moving = end.copy(), start.copy()
    said = _Said(result, rank, program)
    label = said.task[task]
    label[inside] = said.label[entry]
    exposed, moved = (
        said.exposed[entry] + operations.exposed_delay[entry],
        said.moved[entry] + operations.transfer_delay[entry],
    )
    computed[inside] = np.maximum(end[inside] - exposed, start[inside])
    moving[inside] = np.maximum(end[inside] - moved, start[inside])
    return Spans(trace, program, said.labels, row, task, place, label, start, end, computed, moving)


def nanoseconds(seconds: ArrayLike) -> IntArray:
    """Whole nanoseconds, as viewers of traces have them."""
    return np.rint(np.multiply(seconds, 1e9)).astype(np.int64)


def sent_cause(trace: Trace, rows: IntArray) -> IntArray:
    """The cause of some rows of a trace; where that is the arrival of a message, what the message waited for."""
    cause = trace.critical_predecessor[rows]
    received = (cause >= 0) & (trace.stream[cause] == Stream.RECEIVE)
    return np.where(received, trace.critical_predecessor[cause], cause)


class _Said:
    """What the spans of a rank say, and how long the parts of its operations take.

    task: [tasks] their labels; of all operations, pass by pass, label: theirs; exposed: seconds in which its exchange
    runs beside no kernel of it; moved: seconds that its exchange moves, infinite where it is the whole operation.
    """

    def __init__(self, result: SimulationResult, rank: int, program: RankProgram) -> None:
        self._result, self._rank = result, rank
        self.labels: list[Label] = []
        self._numbers: dict[object, int] = {}
        self.task = np.array([self._task(task) for task in program.tasks])
        blocks = [task.segment for task in program.tasks if isinstance(task, ComputeTask)]
        said = {block: np.array([*self._block(block)]).reshape(-1, 3) for block in dict.fromkeys(blocks)}
        label, self.exposed, self.moved = np.concatenate([np.empty((0, 3)), *(said[block] for block in blocks)]).T
        self.label = label.astype(np.int64)

    def _task(self, task: Task) -> int:
        """The number of a task's label; programs share blocks and exchanges, so that they are told by identity."""
        if isinstance(task, ComputeTask):
            return self._number((task.segment, task.action and task.action.kind), lambda: pass_label(task))
        key = (type(task), id(task.comm_op))
        return self._number(key, lambda: exchange_label(task, self._result.cost.comm_timing_by_group(task.comm_op)))

    def _block(self, block: Segment) -> Iterator[tuple[int, Seconds, Seconds]]:
        """Label, exposed and moved of each operation of a block."""
        timing = self._result.cost.time_segment(self._rank, block)
        kernels = timing.kernel_seconds
        for place, operation in enumerate(block.operations):
            both, exchange = timing.overlaps.get(place), operation.comm_op
            key = (id(operation), timing.bottleneck[place], timing.provenance[place])
            algorithm = "" if exchange is None else self._result.cost.comm_timing_by_group(exchange).algorithm
            label = self._number(key, partial(operation_label, operation, timing, place, algorithm))
            if both is None:
                yield label, 0.0, np.inf
            else:
                yield (
                    label,
                    float(timing.exposed_comm[place]),
                    both.comm_duration(float(kernels[place]), both.comm_seconds),
                )

    def _number(self, key: object, said: Callable[[], Label]) -> int:
        if key not in self._numbers:
            self._numbers[key] = len(self.labels)
            self.labels.append(said())
        return self._numbers[key]
