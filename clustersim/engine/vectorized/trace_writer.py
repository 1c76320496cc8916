"""Where do spans go while whole cohorts run? One row for every rank and task, in columns filled task by task."""

from dataclasses import dataclass
from typing import Self

import numpy as np

from clustersim.common.arrays import FloatArray, IntArray
from clustersim.program.program import Program
from clustersim.trace.trace import Contention, Trace


@dataclass(frozen=True, slots=True, eq=False)
class Span:
    """What the ranks of a cohort did in one task: [ranks] each. cause: trace rows."""

    queued: FloatArray
    ready: FloatArray
    start: FloatArray
    end: FloatArray
    cause: IntArray


@dataclass(frozen=True, slots=True, eq=False)
class Columns:
    """The rows of one cohort, which is [tasks, ranks] in every column. first: the trace row of its first."""

    first: int
    ranks: IntArray
    queued: FloatArray
    ready: FloatArray
    start: FloatArray
    end: FloatArray
    waited: FloatArray
    slowed: FloatArray
    cause: IntArray
    leader: IntArray

    def write(self, task: int, span: Span) -> None:
        """Write what all ranks did in a task."""
        self.queued[task], self.ready[task] = span.queued, span.ready
        self.start[task], self.end[task] = span.start, span.end
        self.cause[task] = span.cause

    def rows(self, task: int) -> IntArray:
        """Trace rows of a task: [ranks]."""
        begin = self.first + task * len(self.ranks)
        return np.arange(begin, begin + len(self.ranks))


@dataclass(frozen=True, slots=True, eq=False)
class Table:
    """The rows of all cohorts, one cohort after the other."""

    cohorts: tuple[Columns, ...]
    times: FloatArray
    links: IntArray

    @classmethod
    def of(cls, program: Program, ranks: list[IntArray]) -> Self:
        """Room for the tasks of every kind; ranks: those that are simulated of each kind."""
        tasks = [len(rank_program.tasks) for rank_program in program.programs]
        sizes = [count * len(own) for count, own in zip(tasks, ranks, strict=True)]
        first = np.concatenate(([0], np.cumsum(sizes))).tolist()
        times, links = np.zeros((6, first[-1])), np.empty((2, first[-1]), dtype=np.int64)
        links[0], links[1] = -1, np.arange(first[-1])
        cohorts = [
            _columns(begin, own, times[:, begin:end].reshape(6, count, -1), links[:, begin:end].reshape(2, count, -1))
            for begin, end, count, own in zip(first[:-1], first[1:], tasks, ranks, strict=True)
            if end > begin
        ]
        return cls(tuple(cohorts), times, links)

    def trace(self, program: Program, representative: IntArray) -> Trace:
        """All spans."""
        tasks = [np.repeat(np.arange(len(cohort.queued)), len(cohort.ranks)) for cohort in self.cohorts]
        ranks = [np.tile(columns.ranks, len(columns.queued)) for columns in self.cohorts]
        streams = [
            np.repeat(np.array(program.programs[int(program.kind[item.ranks[0]])].streams), len(item.ranks))
            for item in self.cohorts
        ]
        queued, ready, start, end, waited, slowed = self.times
        cause, leader = self.links
        return Trace(
            rank=_joined(ranks), task=_joined(tasks), stream=_joined(streams), cause=cause, leader=leader,
            queued=queued, ready=ready, start=start, end=end, waited=waited, slowed=slowed,
            contention=Contention.none(),
            representative=representative,
        )  # fmt: skip


def _columns(first: int, ranks: IntArray, times: FloatArray, links: IntArray) -> Columns:
    return Columns(first, ranks, *times, *links)


def _joined(parts: list[IntArray]) -> IntArray:
    return np.concatenate([np.zeros(0, dtype=np.int64), *parts]).astype(np.int64, copy=False)
