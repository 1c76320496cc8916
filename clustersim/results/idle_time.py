"""Why did a compute stream stand still?

A *gap* is the time between two tasks of a rank's compute stream. What ended it is the cause of the later task
(`causes`), here the *awaited* row. A gap is split into

1. transfer: the time in which data that was waited for moved, by the axis of what moved.
   Awaited on the receive stream: the awaited transfer itself, since receives do not queue behind each other.
   Awaited on another stream: everything that this stream moved in the gap, since the awaited row queued behind it.
   Where the host had a part in it (a gather of what came from there, weights that it updated): what moved, or the host
   computed, one after the other, from the awaited row back through the causes of its start.
2. the rest, in which other ranks were waited for. If the awaited group spans pipeline stages, it is bubble (of the
   gap's phase), else it is wait. Without an awaited communication of the rank's own, it is wait.

A gap's phase is, within its step, warm-up before the rank's first backward has begun, cool-down after its last forward
has ended, and steady between. (In GPipe the pause between the last forward and the first backward is thus warm-up.)

After its last block a rank's compute stream waits for its data stream: rows of that stream that end later count as if
the compute stream ran them. What is then left until the step ends is cool-down in a pipeline, else wait.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Final, Self

import numpy as np

from clustersim.common.arrays import FloatArray, IntArray
from clustersim.program.program import Program
from clustersim.program.task import HOST_STREAMS, Stream
from clustersim.results.critical_predecessors import Causes
from clustersim.results.time_categories import PARTS, Part
from clustersim.results.trace_table import WHOLE, Rows, Span, staged
from clustersim.trace.trace import Trace

Busy = tuple[IntArray, IntArray, FloatArray]
"""Numbers of gaps, the part of what moved in each, and for how many seconds of the gap it did."""
Moved = tuple[IntArray, IntArray, FloatArray, FloatArray]
"""Numbers of gaps, the part of what moved in each, and from when to when of the gap it did."""
_ELSEWHERE: Final = (Stream.COMPUTE, Stream.RECEIVE)


@dataclass(frozen=True, slots=True)
class Queue:
    """What compute streams ran, and at the end waited for.

    row: trace rows by class and time; start: seconds, clipped to the last block's end for rows of data streams;
    first: [classes + 1] where each class begins.
    """

    row: IntArray
    start: FloatArray
    first: IntArray


@dataclass(frozen=True, slots=True)
class Gaps:
    """Pauses of compute streams, columns of one length.

    owner: class; start, end: seconds; awaited: the row that was waited for, or -1; rest: place of the part that the
    time is in which nothing awaited moved; causes: of all rows.
    """

    owner: IntArray
    start: FloatArray
    end: FloatArray
    awaited: IntArray
    rest: IntArray
    causes: Causes


def compute_queue(trace: Trace, rows: Rows) -> Queue:
    """Rows of the compute streams, and those of data streams that end after a class's last one."""
    last = np.zeros(len(rows.ranks))
    computes = np.flatnonzero(trace.stream == Stream.COMPUTE)
    np.maximum.at(last, rows.owner[computes], trace.end[computes])
    moves = np.flatnonzero(trace.stream == Stream.DP)
    late = moves[trace.end[moves] > last[rows.owner[moves]]]
    row = np.concatenate((computes, late))
    start = np.concatenate((trace.start[computes], np.maximum(trace.start[late], last[rows.owner[late]])))
    order = _in_order(rows, row, len(computes))
    first = np.searchsorted(rows.owner[row[order]], np.arange(len(rows.ranks) + 1))
    return Queue(row[order], start[order], first)


def _in_order(rows: Rows, row: IntArray, computes: int) -> IntArray:
    """Sort rows by class, then compute streams before data streams, then as the stream ran them: by task."""
    tasks = len(rows.tasks.block) + 1
    late = np.arange(len(row)) >= computes
    order: IntArray = np.argsort((rows.owner[row] * 2 + late) * tasks + rows.trace.task[row], kind="stable")
    return order


def find_gaps(trace: Trace, rows: Rows, queue: Queue) -> Gaps:
    """All gaps that ended because a task began."""
    owner = rows.owner[queue.row]
    previous = np.concatenate(([0.0], trace.end[queue.row[:-1]]))[: len(queue.row)]
    previous[queue.first[:-1][np.diff(queue.first) > 0]] = 0.0
    chosen = np.flatnonzero(queue.start > previous)
    causes = Causes.of(rows)
    awaited = _awaited(rows, causes, queue.row[chosen])
    crosses = (awaited >= 0) & rows.tasks.crosses[rows.entry[awaited]]
    rest = np.where(crosses, _phases(rows, queue, owner)[chosen], Part.WAIT.place)
    return Gaps(owner[chosen], previous[chosen], queue.start[chosen], awaited, rest, causes)


def idle_seconds(trace: Trace, program: Program, rows: Rows, queue: Queue, span: Span = WHOLE) -> FloatArray:
    """Seconds within a span in which compute streams stood still: [classes, parts]."""
    seconds = np.zeros((len(rows.ranks), len(PARTS)))
    gaps = find_gaps(trace, rows, queue)
    gaps = replace(gaps, start=np.clip(gaps.start, *span), end=np.clip(gaps.end, *span))
    moved = np.zeros(len(gaps.owner))
    gap, part, start, end = followed(rows, gaps)
    causes = gap, part, end - start
    for chosen, part, busy in (*_receiving(trace, rows, gaps), *_queueing(trace, rows, gaps), causes):
        np.add.at(seconds, (gaps.owner[chosen], part), busy)
        np.add.at(moved, chosen, busy)
    np.add.at(seconds, (gaps.owner, gaps.rest), np.maximum(gaps.end - gaps.start - moved, 0.0))
    _add_end(seconds, trace, program, queue, span)
    return seconds


def _add_end(seconds: FloatArray, trace: Trace, program: Program, queue: Queue, span: Span) -> None:
    part = Part.BUBBLE_COOLDOWN if staged(program) else Part.WAIT
    filled = np.diff(queue.first) > 0
    ends = np.zeros(len(seconds))
    ends[filled] = trace.end[queue.row[queue.first[1:][filled] - 1]]
    seconds[:, part.place] += np.clip(trace.makespan, *span) - np.clip(ends, *span)


def _awaited(rows: Rows, causes: Causes, row: IntArray) -> IntArray:
    """The communication of the rank's own that each row waited for: its cause, else itself, else -1."""
    trace, cause = rows.trace, causes(row)
    own = (cause >= 0) & (trace.rank[cause] == trace.rank[row]) & (trace.stream[cause] != Stream.COMPUTE)
    return np.where(own, cause, np.where(rows.tasks.exchange[rows.entry[row]] >= 0, row, -1))


def _phases(rows: Rows, queue: Queue, owner: IntArray) -> IntArray:
    """Which bubble a gap before each row of the queue would be: places of parts."""
    place = np.arange(len(queue.row))
    entry = rows.entry[queue.row]
    own = owner * rows.steps + rows.tasks.step[entry]
    first_backward = np.full(len(rows.ranks) * rows.steps, len(queue.row))
    last_forward = np.full(len(rows.ranks) * rows.steps, -1)
    backward, forward = rows.tasks.backward[entry], rows.tasks.forward[entry]
    np.minimum.at(first_backward, own[backward], place[backward])
    np.maximum.at(last_forward, own[forward], place[forward])
    after = np.where(place > last_forward[own], Part.BUBBLE_COOLDOWN.place, Part.BUBBLE_STEADY.place)
    return np.where(place <= first_backward[own], Part.BUBBLE_WARMUP.place, after)


def _receiving(trace: Trace, rows: Rows, gaps: Gaps) -> Iterator[Busy]:
    """Overlap of gaps with the one transfer that each awaits on the receive stream."""
    chosen = np.flatnonzero((gaps.awaited >= 0) & (trace.stream[gaps.awaited] == Stream.RECEIVE))
    awaited = gaps.awaited[chosen]
    begin = np.maximum(gaps.start[chosen], trace.start[awaited])
    busy = np.minimum(gaps.end[chosen], trace.end[awaited]) - begin
    yield chosen, rows.tasks.part[rows.entry[awaited]], np.maximum(busy, 0.0)


def _queueing(trace: Trace, rows: Rows, gaps: Gaps) -> Iterator[Busy]:
    """Overlap of gaps with everything that moved on the stream that each awaits, by part."""
    chosen = queued(rows, gaps)
    waits = gaps.owner[chosen] * len(Stream) + trace.stream[gaps.awaited[chosen]]
    moves = np.flatnonzero((trace.stream != Stream.COMPUTE) & (trace.stream != Stream.RECEIVE))
    keys = rows.owner[moves] * len(Stream) + trace.stream[moves]
    awaited = np.isin(keys, waits)
    moves, keys = moves[awaited], keys[awaited]
    parts = rows.tasks.part[rows.entry[moves]]
    for part in np.unique(parts).tolist():
        busy = _BusyTime.of(trace, moves[parts == part], keys[parts == part])
        seconds = busy.until(waits, gaps.end[chosen]) - busy.until(waits, gaps.start[chosen])
        yield chosen, np.full(len(chosen), part), seconds


def followed(rows: Rows, gaps: Gaps) -> Moved:
    """What moved in the gaps that the host had a part in, one after the other."""
    gap, row = _causes(rows, gaps)
    start = np.maximum(gaps.start[gap], rows.trace.start[row])
    end = np.maximum(np.minimum(gaps.end[gap], rows.trace.end[row]), start)
    return gap, rows.tasks.part[rows.entry[row]], start, end


def queued(rows: Rows, gaps: Gaps) -> IntArray:
    """The gaps that await a stream of the rank's own, and that the host had no part in."""
    stream = rows.trace.stream[gaps.awaited]
    awaits = (gaps.awaited >= 0) & (stream != Stream.RECEIVE)
    awaits[_causes(rows, gaps)[0]] = False
    chosen: IntArray = np.flatnonzero(awaits)
    return chosen


def _causes(rows: Rows, gaps: Gaps) -> tuple[IntArray, IntArray]:
    """Gaps that the host had a part in, with each row of the rank's own that had to end, one because of the other."""
    trace, nothing = rows.trace, np.zeros(0, np.int64)
    if not np.isin(trace.stream, HOST_STREAMS).any():
        return nothing, nothing
    gap = np.flatnonzero((gaps.awaited >= 0) & (trace.stream[gaps.awaited] != Stream.RECEIVE))
    row = gaps.awaited[gap]
    found = [(nothing, nothing)]
    while len(gap):
        within = trace.end[row] > gaps.start[gap]
        gap, row = gap[within], row[within]
        found.append((gap, row))
        cause = gaps.causes(row)
        own = (cause >= 0) & (trace.rank[cause] == trace.rank[row]) & ~np.isin(trace.stream[cause], _ELSEWHERE)
        gap, row = gap[own], cause[own]
    gap, row = (np.concatenate(column) for column in zip(*found, strict=True))
    hosted = np.isin(gap, gap[np.isin(trace.stream[row], HOST_STREAMS)])
    return gap[hosted], row[hosted]


@dataclass(frozen=True, slots=True, eq=False)
class _BusyTime:
    """How long streams have been busy by a given time. Rows by stream, in order of time.

    when: sorts as (stream, start); stream, end; total: [rows + 1] busy seconds of all rows before; whole: span of time.
    """

    when: FloatArray
    stream: IntArray
    end: FloatArray
    total: FloatArray
    whole: float

    @classmethod
    def of(cls, trace: Trace, row: IntArray, stream: IntArray) -> Self:
        whole = 2.0 * trace.makespan
        order = np.lexsort((trace.start[row], stream))
        row, stream = row[order], stream[order]
        start, end = trace.start[row], trace.end[row]
        return cls(stream * whole + start, stream, end, np.concatenate(([0.0], np.cumsum(end - start))), whole)

    def until(self, stream: IntArray, time: FloatArray) -> FloatArray:
        """Busy seconds of a stream in [0, time]: those of all rows that have begun, less what the last still has to do.

        Places are found to a rounding of the streams' numbers times the makespan; a row that begins within it of `time`
        has as much to do as it adds, so it counts for nothing either way.
        """
        first = np.searchsorted(self.stream, stream, side="left")
        begun = np.maximum(np.searchsorted(self.when, stream * self.whole + time, side="right"), first)
        left = np.where(begun > first, np.maximum(self.end[begun - 1] - time, 0.0), 0.0)
        return self.total[begun] - self.total[first] - left
