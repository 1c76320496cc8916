"""Where do spans go while the engine runs?"""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from typing import Final, NamedTuple

import numpy as np

from clustersim.arrays import FloatArray, IntArray
from clustersim.program.task import Stream
from clustersim.trace.store import Contention, OperationSpans, Trace
from clustersim.units import Seconds


class Lost(NamedTuple):
    """Seconds of a block: a rank waited for others, communication beside slowed its kernels."""

    waited: Seconds = 0.0
    slowed: Seconds = 0.0


class Longer(NamedTuple):
    """An operation whose exchange shares links: seconds more than if nobody shared them, nor slowed its kernel.

    kernel: that its kernel runs; exposed: that its exchange moves with the kernel done; moved: that its exchange takes.
    """

    kernel: Seconds = 0.0
    exposed: Seconds = 0.0
    moved: Seconds = 0.0


ALONE: Final = Longer()


class Times(NamedTuple):
    """When a span was queued, ready, started and ended, and what was lost inside it."""

    queued: Seconds
    ready: Seconds
    start: Seconds
    end: Seconds
    waited: Seconds = 0.0
    slowed: Seconds = 0.0


@dataclass(slots=True)
class Recorder:
    """Appends rows; a row's number is its place."""

    whole: list[tuple[int, int, int, int]] = field(default_factory=list)
    times: list[Times] = field(default_factory=list)
    met: dict[tuple[int, int, Hashable], list[int]] = field(default_factory=dict)
    operations: list[tuple[int, int, int]] = field(default_factory=list)
    operation_times: list[tuple[float, float]] = field(default_factory=list)
    longer: list[tuple[int, float, float]] = field(default_factory=list)

    def span(self, rank: int, task: int, stream: Stream, cause: int, times: Times) -> int:
        """Write the span of a task; return its row."""
        self.whole.append((rank, task, stream, cause))
        self.times.append(times)
        return len(self.whole) - 1

    def meet(self, task: int, groups: Sequence[Hashable], row: int) -> None:
        """Note that a span is of a block in which its rank met the members of groups, first come first."""
        for place, group in enumerate(groups):
            self.met.setdefault((place, task, group), []).append(row)

    def operation(self, place: tuple[int, int, int], start: Seconds, end: Seconds, longer: Longer = ALONE) -> None:
        """Write the span of an operation: of a rank, inside a task's block, at this place."""
        if longer.exposed or longer.moved:
            self.longer.append((len(self.operations), longer.exposed, longer.moved))
        self.operations.append(place)
        self.operation_times.append((start, end))

    def trace(self, representative: IntArray) -> Trace:
        """All spans, in columns."""
        whole = np.array(self.whole, dtype=np.int64).reshape(-1, 4)
        times = np.array(self.times, dtype=np.float64).reshape(-1, 6)
        rank, task, stream, cause = np.ascontiguousarray(whole.T)
        queued, ready, start, end, waited, slowed = np.ascontiguousarray(times.T)
        return Trace(
            rank=rank, task=task, stream=stream, cause=cause,
            leader=self._leaders(waited),
            queued=queued, ready=ready, start=start, end=end, waited=waited, slowed=slowed,
            contention=self._contention(rank, task),
            representative=representative,
        )  # fmt: skip

    def _leaders(self, waited: FloatArray) -> IntArray:
        """For each row the one of those that met that waited least; through groups of several roles, role by role."""
        leader = np.arange(len(self.whole))
        for _, rows in sorted(self.met.items(), key=lambda met: met[0][0]):
            first = rows[int(np.argmin(waited[leader[rows]]))]
            leader[rows] = leader[first]
        return leader

    def _contention(self, rank: IntArray, task: IntArray) -> Contention:
        """What sharing links changed; rank, task: of each row."""
        if not self.longer:
            return Contention.none()
        entry, exposed, moved = np.array(self.longer, dtype=np.float64).T
        ranks, tasks, operation = np.array([self.operations[each] for each in entry.astype(np.int64)]).T
        many = int(task.max()) + 1
        keys = rank * many + task
        order = np.argsort(keys)
        row = order[np.searchsorted(keys[order], ranks * many + tasks)]
        by_row = np.argsort(row, kind="stable")
        return Contention(row[by_row], operation[by_row], exposed[by_row], moved[by_row])

    def operation_spans(self) -> OperationSpans:
        """Spans of single operations, where blocks were run operation by operation."""
        where = np.array(self.operations, dtype=np.int64).reshape(-1, 3)
        times = np.array(self.operation_times, dtype=np.float64).reshape(-1, 2)
        return OperationSpans(*where.T, *times.T, *np.zeros((2, len(times))))
