"""Of what does the critical path consist? Its uninterrupted pieces on single ranks, and its parts by pipeline rank.

A piece is a run of neighbouring rows of the path on one rank, with the time between them; pieces follow each other
without a gap from 0 to the makespan. What joins two pieces is what the later one's rank waited for. Seconds of rows are
divided into parts as by `breakdown`, each run of a block by itself, so parts sum to the makespan.
"""

from dataclasses import dataclass
from enum import Enum
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from clustersim.common.arrays import FloatArray, IntArray
from clustersim.common.units import Seconds
from clustersim.program.action import ActionKind
from clustersim.program.task import CollectiveTask, ComputeTask, ReceiveTask, SendTask, Task
from clustersim.results.critical_path import Course, path_parts
from clustersim.results.time_breakdown import run_parts
from clustersim.results.time_categories import Part
from clustersim.results.trace_table import BlockRuns, Rows, TimingOf, contention_parts

_Number = TypeVar("_Number", np.int64, np.float64)
InTime = tuple[IntArray, FloatArray, FloatArray]
"""Values in order of time, equal neighbours together, each with its start and its end in seconds."""


class Arrival(Enum):
    """How the path came to a piece."""

    BEGINNING = "beginning"
    MESSAGE = "message"  # the rank waited for a message
    GROUP = "group"  # it waited for the last member of a collective
    BLOCK = "block"  # the ranks met inside a block


@dataclass(frozen=True, slots=True)
class Passes:
    """Actions of one kind in a piece: the least and the greatest microbatch, counted through all steps."""

    kind: ActionKind
    first: int
    last: int


@dataclass(frozen=True, slots=True)
class Piece:
    """A piece: on which rank, from when to when, how the path came to it, and what the rank did.

    kind: the rank's program; passes: by kind of action; others: names of its other blocks and of collectives; both in
    order of time, and only of what took time.
    """

    rank: int
    kind: int
    start: Seconds
    end: Seconds
    arrival: Arrival
    passes: tuple[Passes, ...]
    others: tuple[str, ...]

    @property
    def seconds(self) -> Seconds:
        """How long it is."""
        return self.end - self.start


@dataclass(frozen=True, slots=True, eq=False)
class Legs:
    """The path cut where its rank or what takes most of a row changes; columns of one length, from 0 to the makespan.

    kind: program of the rank; part: place of the part.
    """

    rank: IntArray
    kind: IntArray
    part: IntArray
    start: FloatArray
    end: FloatArray

    def parts_in_time(self, bins: int) -> InTime:
        """The part that takes most of each of so many equal times."""
        present, lasting = np.unique(self.part), self.end - self.start
        edges = np.linspace(0.0, float(self.end.max(initial=0.0)), bins + 1)
        knots = np.append(0.0, self.end)
        spent = [np.append(0.0, np.cumsum(np.where(self.part == part, lasting, 0.0))) for part in present]
        most = present[np.array([np.diff(np.interp(edges, knots, array)) for array in spent]).argmax(axis=0)]
        return _joined(most, edges)

    def kinds_in_time(self, most: int) -> InTime:
        """The program of each leg; of more than `most` legs those in the middle of as many equal times."""
        if len(self.kind) <= most:
            return _joined(self.kind, np.append(self.start, self.end[-1:]))
        edges = np.linspace(0.0, float(self.end[-1]), most + 1)
        met = np.minimum(np.searchsorted(self.end, (edges[1:] + edges[:-1]) / 2), len(self.kind) - 1)
        return _joined(self.kind[met], edges)


@dataclass(frozen=True, slots=True, eq=False)
class PathPieces:
    """The critical path of all steps. parts: [kinds, parts] its seconds by the program of the rank that it was on."""

    pieces: tuple[Piece, ...]
    parts: FloatArray
    legs: Legs

    @property
    def seconds(self) -> Seconds:
        """The whole path, which is the makespan."""
        return float(self.legs.end.max(initial=0.0))


def path_pieces(rows: Rows, path: IntArray, timing_of: TimingOf) -> PathPieces:
    """Cut the critical path into pieces. path: rows of the trace, first to last, as by `critical_path`."""
    course = Course.of(rows.trace, path)
    bounds = np.flatnonzero(np.diff(rows.trace.rank[path], prepend=-1)).tolist()
    pieces = tuple(_piece(rows, course, item) for item in map(slice, bounds, [*bounds[1:], len(path)]))
    return PathPieces(pieces, path_parts(rows, course, timing_of), _legs(rows, course, timing_of))


def _most(rows: Rows, row: IntArray, timing_of: TimingOf) -> IntArray:
    """The place of the part that takes most of each row."""
    trace, part = rows.trace, rows.tasks.part[rows.entry[row]].copy()
    blocks = np.flatnonzero(part < 0)
    run = row[blocks]
    full = trace.end[run] - trace.start[run]
    exposed, hidden = contention_parts(rows, run, np.arange(len(run)), len(run))
    each = BlockRuns(
        owner=rows.owner[run], block=rows.block[run], seconds=full, full=full, waited=trace.waited[run],
        slowed=trace.slowed[run], exposed=exposed, hidden=hidden, runs=np.ones(len(run), dtype=np.int64),
    )  # fmt: skip
    part[blocks] = run_parts(rows, each, timing_of).argmax(axis=1)
    return part


def _legs(rows: Rows, course: Course, timing_of: TimingOf) -> Legs:
    """Rows, and the waits before them, joined while rank and part stay the same."""
    waits = np.full(len(course.row), Part.WAIT.place)
    start, end = _paired(course.before, course.begin), _paired(course.begin, course.end)
    part, rank = _paired(waits, _most(rows, course.row, timing_of)), np.repeat(rows.trace.rank[course.row], 2)
    kept = end > start
    start, end, part, rank = start[kept], end[kept], part[kept], rank[kept]
    first = np.flatnonzero((np.diff(rank, prepend=-1) != 0) | (np.diff(part, prepend=-1) != 0))
    last = np.append(first[1:], len(rank))[: len(first)] - 1
    return Legs(rank[first], rows.program.program_index[rank[first]], part[first], start[first], end[last])


def _joined(values: IntArray, edges: FloatArray) -> InTime:
    """Values between edges, equal neighbours together."""
    first = np.flatnonzero(np.diff(values, prepend=-1))
    return values[first], edges[first], np.append(edges[first[1:]], edges[-1:])


def _paired(some: NDArray[_Number], others: NDArray[_Number]) -> NDArray[_Number]:
    """One of some, one of the others, in turn."""
    return np.stack((some, others), axis=1).ravel()


def _arrival(rows: Rows, path: IntArray, place: int) -> Arrival:
    """How the path came from the row before to the one at a place."""
    if place == 0:
        return Arrival.BEGINNING
    task = _task(rows, path[place])
    if isinstance(task, ReceiveTask | SendTask):
        return Arrival.MESSAGE
    return (
        Arrival.BLOCK
        if isinstance(task, ComputeTask) and rows.trace.blocking_event[path[place]] == path[place - 1]
        else Arrival.GROUP
    )


def _piece(rows: Rows, course: Course, which: slice) -> Piece:
    passes: dict[ActionKind, Passes] = {}
    others: dict[str, None] = {}
    for row in course.row[which][(course.end > course.before)[which]].tolist():
        task = _task(rows, row)
        if isinstance(task, CollectiveTask):
            others[task.comm_op.name] = None
        elif not isinstance(task, ComputeTask):
            continue
        elif task.action is None:
            others[task.segment.name] = None
        else:
            kind, number = task.action.kind, task.action.microbatch
            known = passes.get(kind, Passes(kind, number, number))
            passes[kind] = Passes(kind, min(known.first, number), max(known.last, number))
    rank, arrival = int(rows.trace.rank[course.row[which.start]]), _arrival(rows, course.row, which.start)
    start, end = float(course.before[which.start]), float(course.end[which][-1])
    return Piece(
        rank, int(rows.program.program_index[rank]), start, end, arrival, tuple(passes.values()), tuple(others)
    )


def _task(rows: Rows, row: int) -> Task:
    trace, program = rows.trace, rows.program
    return program.programs[int(program.program_index[trace.rank[row]])].tasks[int(trace.task[row])]
