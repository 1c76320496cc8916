"""What does every rank do, when? For each rank and bin of time the part of the breakdown that takes most of it.

The same parts as in `breakdown`, by the same rules, kept apart in time: a gap's transfers stand where they moved, the
rest of the gap around them. Inside a block its parts are spread evenly over its span, but for what this one run waited
for others; what slowed and shared links cost is spread over all runs of the block on the rank. So the sum over bins of
a rank's seconds of a part is its breakdown (of several steps: all of them together).

Ranks of one class share a row. Where there are more classes than can be shown, those of evenly spaced ranks are.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Self

import numpy as np
from numpy.typing import NDArray

from clustersim.common.arrays import FloatArray, IntArray
from clustersim.common.units import Seconds
from clustersim.program.task import Stream
from clustersim.results.idle_time import Gaps, Moved, Queue, compute_queue, find_gaps, followed, queued
from clustersim.results.intervals import Intervals, common
from clustersim.results.time_breakdown import run_parts
from clustersim.results.time_categories import PARTS, Part
from clustersim.results.trace_table import Rows, TimingOf, block_runs, staged
from clustersim.trace.trace import ContentionDelays, Trace

MOST_CLASSES = 2048
"""Classes that are worked out at most."""


@dataclass(frozen=True, slots=True, eq=False)
class DominantParts:
    """ranks: [classes] the simulated ranks that are shown; representative: [ranks] the simulated rank of each rank.

    seconds: [classes, parts] of all steps; category: [classes, bins] the place of the part that takes most of the bin;
    makespan: seconds of all bins together.
    """

    ranks: IntArray
    representative: IntArray
    seconds: FloatArray
    category: NDArray[np.uint8]
    makespan: Seconds

    @property
    def whole(self) -> bool:
        """Whether all classes are shown."""
        return len(self.ranks) == len(np.unique(self.representative))

    @property
    def class_of(self) -> IntArray:
        """[ranks] the class of each, -1 where it is not shown."""
        place = np.minimum(np.searchsorted(self.ranks, self.representative), len(self.ranks) - 1)
        return np.where(self.ranks[place] == self.representative, place, -1)


def dominant_parts(rows: Rows, timing_of: TimingOf, *, bins: int, most: int = MOST_CLASSES) -> DominantParts:
    """The part that takes most of each of `bins` equal bins from 0 to the makespan, for at most `most` classes."""
    shown = _spaced(rows, most)
    category = np.zeros((len(shown.ranks), bins), dtype=np.uint8)
    longest = np.zeros((len(shown.ranks), bins))
    seconds = np.zeros((len(shown.ranks), len(PARTS)))
    for place, share in enumerate(part_seconds(shown, timing_of, bins=bins, makespan=rows.trace.makespan)):
        seconds[:, place] = share.sum(axis=1)
        category[share > longest] = place
        np.maximum(longest, share, out=longest)
    return DominantParts(shown.ranks, rows.trace.representative, seconds, category, rows.trace.makespan)


def part_seconds(rows: Rows, timing_of: TimingOf, *, bins: int, makespan: Seconds) -> Iterator[FloatArray]:
    """For each part in its order, how many seconds of every bin it takes: [classes, bins]."""
    queue = compute_queue(rows.trace, rows)
    pieces = _joined([*_exchanges(rows, queue), *_gaps(rows, queue), _end(rows, queue, makespan)])
    blocks = _Blocks.of(rows, timing_of)
    grid = _Grid.of(_after(blocks.when, pieces.when), classes=len(rows.ranks), bins=bins, makespan=makespan)
    for place in range(len(PARTS)):
        yield grid.spread(np.concatenate((blocks.seconds(place), np.where(pieces.part == place, pieces.seconds, 0.0))))


def _spaced(rows: Rows, most: int) -> Rows:
    """The rows of the classes of at most `most` evenly spaced ranks."""
    if len(rows.ranks) <= most:
        return rows
    evenly = np.linspace(0, len(rows.trace.representative) - 1, most).round().astype(np.int64)
    kept = np.isin(rows.ranks, rows.trace.representative[evenly])
    row = np.flatnonzero(kept[rows.owner])
    owner = np.cumsum(kept) - 1
    return replace(
        rows, trace=_part_of(rows.trace, row), ranks=rows.ranks[kept], weights=rows.weights[kept],
        owner=owner[rows.owner[row]], entry=rows.entry[row],
    )  # fmt: skip


def _part_of(trace: Trace, row: IntArray) -> Trace:
    """Some rows, whole ranks of them. What a rank that is left out did is no longer a cause."""
    number = np.full(len(trace) + 1, -1)
    number[row] = np.arange(len(row))
    leader = np.where(number[trace.blocking_event[row]] >= 0, number[trace.blocking_event[row]], np.arange(len(row)))
    which, entry = trace.contention.lookup(row)
    contention = ContentionDelays(
        which,
        trace.contention.operation[entry],
        trace.contention.exposed_delay[entry],
        trace.contention.transfer_delay[entry],
    )
    return Trace(
        rank=trace.rank[row], task=trace.task[row], stream=trace.stream[row], queued=trace.queued[row],
        ready=trace.ready[row], start=trace.start[row], end=trace.end[row], waited=trace.waited[row],
        slowed=trace.slowed[row], contention=contention, critical_predecessor=number[trace.critical_predecessor[row]], blocking_event=leader,
        representative=trace.representative,
    )  # fmt: skip


@dataclass(frozen=True, slots=True, eq=False)
class _Pieces:
    """Intervals of classes with the part that each counts for; sign: +1, or -1 where it is taken away from a part."""

    when: Intervals
    part: IntArray
    sign: int | FloatArray = 1

    @property
    def seconds(self) -> FloatArray:
        """What each adds to its part."""
        return self.when.seconds * self.sign


def _joined(pieces: list[_Pieces]) -> _Pieces:
    when = _after(*(piece.when for piece in pieces))
    sign = np.concatenate([np.broadcast_to(np.asarray(item.sign, dtype=np.float64), len(item.part)) for item in pieces])
    return _Pieces(when, np.concatenate([element.part for element in pieces]), sign)


def _after(*some: Intervals) -> Intervals:
    """Intervals, one table after the other."""
    columns = (np.concatenate([getattr(intervals, name) for intervals in some]) for name in ("key", "start", "end"))
    return Intervals(*columns)


def _exchanges(rows: Rows, queue: Queue) -> Iterator[_Pieces]:
    """Collectives that the compute stream runs, and those that it waits for at the end."""
    entry = rows.entry[queue.row]
    chosen = rows.tasks.exchange[entry] >= 0
    row = queue.row[chosen]
    yield _Pieces(Intervals(rows.owner[row], queue.start[chosen], rows.trace.end[row]), rows.tasks.part[entry[chosen]])


def _gaps(rows: Rows, queue: Queue) -> Iterator[_Pieces]:
    """What compute streams waited for: where it moved its own part, else the gap's."""
    gaps = find_gaps(rows.trace, rows, queue)
    yield _Pieces(Intervals(gaps.owner, gaps.start, gaps.end), gaps.rest)
    for gap, part, start, end in (_received(rows, gaps), _queued(rows, gaps), followed(rows, gaps)):
        moved = Intervals(gaps.owner[gap], start, end)
        yield _Pieces(moved, part)
        yield _Pieces(moved, gaps.rest[gap], -1)


def _received(rows: Rows, gaps: Gaps) -> Moved:
    """When in each gap the message moved that it awaits: gap, part, start, end."""
    trace = rows.trace
    gap = np.flatnonzero((gaps.awaited >= 0) & (trace.stream[gaps.awaited] == Stream.RECEIVE))
    awaited = gaps.awaited[gap]
    start = np.maximum(gaps.start[gap], trace.start[awaited])
    end = np.maximum(np.minimum(gaps.end[gap], trace.end[awaited]), start)
    return gap, rows.tasks.part[rows.entry[awaited]], start, end


def _queued(rows: Rows, gaps: Gaps) -> Moved:
    """When in each gap something moved on the other stream that it awaits: gap, part, start, end."""
    trace, streams = rows.trace, len(Stream)
    gap = queued(rows, gaps)
    waits = gaps.owner[gap] * streams + trace.stream[gaps.awaited[gap]]
    row = np.flatnonzero((trace.stream != Stream.COMPUTE) & (trace.stream != Stream.RECEIVE))
    row = row[np.lexsort((trace.end[row], trace.start[row], rows.owner[row] * streams + trace.stream[row]))]
    moves = Intervals(rows.owner[row] * streams + trace.stream[row], trace.start[row], trace.end[row])
    which, other, when = common(Intervals(waits, gaps.start[gap], gaps.end[gap]), moves)
    return gap[which], rows.tasks.part[rows.entry[row[other]]], when.start, when.end


def _end(rows: Rows, queue: Queue, makespan: Seconds) -> _Pieces:
    """From a class's last task until the step ends."""
    filled = np.diff(queue.first) > 0
    ends = np.zeros(len(rows.ranks))
    ends[filled] = rows.trace.end[queue.row[queue.first[1:][filled] - 1]]
    part = Part.BUBBLE_COOLDOWN if staged(rows.program) else Part.WAIT
    owner = np.arange(len(ends))
    return _Pieces(Intervals(owner, ends, np.full(len(ends), makespan)), np.full(len(ends), part.place))


@dataclass(frozen=True, slots=True, eq=False)
class _Blocks:
    """Runs of blocks. waited: [runs] seconds in which each waited for others; pair: [runs] its block on its class;

    shares: [pairs, parts] how the rest of a pair's seconds is divided.
    """

    when: Intervals
    waited: FloatArray
    pair: IntArray
    shares: FloatArray

    @classmethod
    def of(cls, rows: Rows, timing_of: TimingOf) -> Self:
        """All runs."""
        trace, many = rows.trace, max(1, len(rows.blocks))
        row = np.flatnonzero(rows.block >= 0)
        runs = block_runs(rows, row, trace.end[row] - trace.start[row])
        pair = np.searchsorted(runs.owner * many + runs.block, rows.owner[row] * many + rows.block[row])
        parts, wait = run_parts(rows, runs, timing_of), Part.WAIT.place
        kept = np.minimum(_over(parts[:, wait], runs.waited), 1.0)  # less than all if the pair's parts were cut to fit
        parts[:, wait] -= kept * runs.waited
        shares = _over(parts, np.broadcast_to(parts.sum(axis=1)[:, None], parts.shape))
        return cls(
            Intervals(rows.owner[row], trace.start[row], trace.end[row]), trace.waited[row] * kept[pair], pair, shares
        )

    def seconds(self, part: int) -> FloatArray:
        """How long of each run a part takes."""
        rest: FloatArray = (self.when.seconds - self.waited) * self.shares[self.pair, part]
        return rest + self.waited if part == Part.WAIT.place else rest


def _over(some: FloatArray, others: FloatArray) -> FloatArray:
    """Their ratio, 0 where there is nothing to divide by."""
    return np.divide(some, others, out=np.zeros_like(some), where=others > 0)


@dataclass(frozen=True, slots=True, eq=False)
class _Grid:
    """Which cells (class and bin) intervals meet, and what share of each lies in its first, last and other cells.

    shape: classes and bins; first, last: [intervals] numbers of cells; head, tail, each: [intervals] shares.
    """

    shape: tuple[int, int]
    first: IntArray
    last: IntArray
    head: FloatArray
    tail: FloatArray
    each: FloatArray

    @classmethod
    def of(cls, when: Intervals, *, classes: int, bins: int, makespan: Seconds) -> Self:
        """The cells of equal bins from 0 to the makespan."""
        width = makespan / bins or 1.0
        first = np.clip((when.start / width).astype(np.int64), 0, bins - 1)
        last = np.clip(np.ceil(when.end / width).astype(np.int64) - 1, first, bins - 1)
        inside, length = first == last, when.seconds
        head = _over(np.where(inside, length, (first + 1) * width - when.start), length)
        tail = _over(np.where(inside, 0.0, when.end - last * width), length)
        each = _over(np.where(last > first + 1, width, 0.0), length)
        return cls((classes, bins), when.key * bins + first, when.key * bins + last, head, tail, each)

    def spread(self, seconds: FloatArray) -> FloatArray:
        """Seconds, spread evenly over their intervals, by class and bin: [classes, bins]."""
        chosen = np.flatnonzero(seconds)
        if len(chosen) == 0:
            return np.zeros(self.shape)
        first, last, seconds = self.first[chosen], self.last[chosen], seconds[chosen]
        total = self._placed(first, seconds * self.head[chosen], last, seconds * self.tail[chosen])
        far = np.flatnonzero(last > first + 1)
        if len(far):
            each = seconds[far] * self.each[chosen[far]]
            steps = self._placed(first[far] + 1, each, last[far], -each)
            total += np.cumsum(steps, axis=1, out=steps)
        return total

    def _placed(self, cell: IntArray, seconds: FloatArray, other: IntArray, more: FloatArray) -> FloatArray:
        """Two columns of seconds in their cells."""
        cells, size = np.concatenate((cell, other)), self.shape[0] * self.shape[1]
        found: FloatArray = np.bincount(cells, np.concatenate((seconds, more)), minlength=size).astype(
            np.float64, copy=False
        )
        return found.reshape(self.shape)
