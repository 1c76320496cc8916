"""Segment evaluation: run a segment on many ranks at once, by max-plus arithmetic on arrays.

Operations run back to back. A rank starts a collective when the last member of its group has arrived. While a
collective is in flight on another stream of the rank, its kernels are slowed, each by its own factor for that
kind of collective; communication inside the segment is not.

All times are arrays over the ranks. Without overlapping collectives, a segment that synchronizes with groups
of one kind reduces to three sums and two maxima (`MaxPlusSummary`): until the first synchronization, from
there to the last one, and the remainder.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Final, NamedTuple, Self

import numpy as np

from clustersim.common.arrays import FloatArray, IntArray
from clustersim.engine.vectorized.group_sync import GroupSync


class OverlapInterval(NamedTuple):
    """A collective in flight on another stream of each rank: [ranks] begin, end, interference level of kernels."""

    begin: FloatArray
    end: FloatArray
    level: IntArray | int = 1


OverlapIntervals = Sequence[OverlapInterval]
"""Overlapping collectives, one after the other on every rank."""
NO_OVERLAP: Final[OverlapIntervals] = ()


@dataclass(frozen=True, slots=True, eq=False)
class SegmentDurations:
    """Durations of a segment's operations on n ranks.

    kernel_seconds, fixed_seconds: [n or 1, operations] uncontended kernel time, and time that overlapping
    collectives do not slow; slowdown: [levels - 1, n or 1, operations] relative slowdown of kernels at each
    interference level from 1 on; group_syncs: for each operation the groups that synchronize before it, None if
    there are none. For batches of runs (`evaluate_operations`): [n or 1, runs or 1, operations], and slowdown
    [levels - 1, n or 1, 1, operations].
    """

    rank_count: int
    kernel_seconds: FloatArray
    fixed_seconds: FloatArray
    slowdown: FloatArray
    group_syncs: tuple[GroupSync | None, ...]
    _ranges: list["_OperationRange"] = field(init=False, default_factory=list)

    @property
    def ranges(self) -> Sequence["_OperationRange"]:
        """The segment in ranges of operations; computed once, as overlapping collectives evaluate it many times."""
        if not self._ranges:
            bounds = pairwise((*_boundaries(self), len(self.group_syncs)))
            self._ranges.extend(_OperationRange.from_operations(self, begin, end) for begin, end in bounds)
        return self._ranges

    @property
    def has_sync(self) -> bool:
        """Whether any ranks synchronize."""
        return any(group_sync is not None for group_sync in self.group_syncs)


@dataclass(frozen=True, slots=True, eq=False)
class SegmentRun:
    """Result of a segment: [n] each. waited: seconds for other ranks, slowed: by overlapping collectives."""

    end: FloatArray
    waited: FloatArray
    slowed: FloatArray


@dataclass(frozen=True, slots=True, eq=False)
class MaxPlusSummary:
    """A segment that synchronizes with groups of one kind, without overlapping collectives.

    lead: [n] seconds before the first synchronization (without any: in total); middle, tail: [n] from there to
    the last one, and after it; waited: [n] seconds of waiting in the middle.
    """

    group_sync: GroupSync | None
    lead: FloatArray
    middle: FloatArray
    tail: FloatArray
    waited: FloatArray

    def evaluate(self, start: FloatArray) -> SegmentRun:
        """Run from these start times."""
        arrival = start + self.lead
        if self.group_sync is None:
            return SegmentRun(arrival, self.waited, self.waited)
        synced = self.group_sync.group_max(arrival)
        return SegmentRun(synced + self.middle + self.tail, synced - arrival + self.waited, np.zeros_like(synced))


def summarize_segment(durations: SegmentDurations) -> MaxPlusSummary | None:
    """The summary of a segment; None where it synchronizes with groups of several kinds."""
    operation_seconds, zeros = durations.kernel_seconds + durations.fixed_seconds, np.zeros(durations.rank_count)
    sync_points = [index for index, group_sync in enumerate(durations.group_syncs) if group_sync is not None]
    if not sync_points:
        return MaxPlusSummary(
            None, np.broadcast_to(operation_seconds.sum(axis=1), durations.rank_count), zeros, zeros, zeros
        )
    group_sync = durations.group_syncs[sync_points[0]]
    if group_sync is None or any(durations.group_syncs[index] is not group_sync for index in sync_points):
        return None
    lead = operation_seconds[:, : sync_points[0]].sum(axis=1)
    interval_seconds = np.broadcast_to(
        np.add.reduceat(operation_seconds, sync_points, axis=1), (durations.rank_count, len(sync_points))
    )
    inner_seconds = interval_seconds[:, :-1]
    middle = (inner_seconds if len(operation_seconds) == 1 else group_sync.group_max(inner_seconds)).sum(axis=1)
    return MaxPlusSummary(
        group_sync,
        np.broadcast_to(lead, durations.rank_count),
        middle,
        interval_seconds[:, -1],
        middle - inner_seconds.sum(axis=1),
    )


def blocking_ranks(durations: SegmentDurations, waited: FloatArray) -> IntArray:
    """For each rank the index of the one that waited least among those that it synchronizes with: [n]."""
    blocking = np.arange(durations.rank_count)
    for group_sync in dict.fromkeys(durations.group_syncs):
        if group_sync is not None:
            lateness = -waited[blocking]
            blocking = blocking[group_sync.last_arriver(lateness, group_sync.group_max(lateness))]
    return blocking


def overlapping_intervals(run: SegmentRun, start: FloatArray, overlaps: OverlapIntervals) -> OverlapIntervals:
    """The collectives that may overlap a segment, if any overlaps it when it runs without them; otherwise none.

    A slowed rank makes others wait for it, and so may let any collective overlap their segments that has not
    ended before.
    """
    remaining = [overlap for overlap in overlaps if (overlap.end > start).any()]
    return (
        remaining
        if any(((overlap.begin < run.end) & (overlap.end > start)).any() for overlap in remaining)
        else NO_OVERLAP
    )


def evaluate_segment(
    start: FloatArray, durations: SegmentDurations, overlaps: OverlapIntervals = NO_OVERLAP
) -> SegmentRun:
    """Run a segment, summing up operations between synchronization points and changes of kind."""
    now, waited, slowed = start, np.zeros(durations.rank_count), np.zeros(durations.rank_count)
    for operations in durations.ranges:
        now, waited = _apply_sync(operations.group_sync, now, waited)
        now, slowdown_seconds = _advance(now, operations.work, overlaps)
        slowed = slowed + slowdown_seconds
    return SegmentRun(now, waited, slowed)


def evaluate_operations(
    start: FloatArray, durations: SegmentDurations, overlaps: OverlapIntervals
) -> tuple[SegmentRun, FloatArray, FloatArray]:
    """Run a segment operation by operation; return also when each began and ended: [n, operations].

    Or several runs at once, with start and overlaps [n, runs]: [n, runs, operations].
    """
    begins, ends = np.empty((2, *start.shape, len(durations.group_syncs)))
    now, waited, slowed = start, np.zeros_like(start), np.zeros_like(start)
    for index, group_sync in enumerate(durations.group_syncs):
        now, waited = _apply_sync(group_sync, now, waited)
        begins[..., index] = now
        work = _SlowableWork.from_seconds(
            durations.kernel_seconds[..., index],
            durations.fixed_seconds[..., index],
            durations.slowdown[..., index] if overlaps else None,
        )
        now, slowdown_seconds = _advance(now, work, overlaps)
        slowed = slowed + slowdown_seconds
        ends[..., index] = now
    return SegmentRun(now, waited, slowed), begins, ends


def _apply_sync(group_sync: GroupSync | None, arrival: FloatArray, waited: FloatArray) -> tuple[FloatArray, FloatArray]:
    """When ranks that arrive at a synchronization continue, and their accumulated waiting time."""
    if group_sync is None:
        return arrival, waited
    synced = group_sync.group_max(arrival)
    return synced, waited + (synced - arrival)


def _advance(start: FloatArray, work: "_SlowableWork", overlaps: OverlapIntervals) -> tuple[FloatArray, FloatArray]:
    """End of work with evenly distributed kernels, and the seconds that overlapping collectives cost it."""
    end, slowed = start + work.seconds, np.zeros_like(start)
    if work.slowdown is None:
        return end, slowed
    for overlap_begin, overlap_end, level in overlaps:
        overlap_start = np.maximum(start, overlap_begin)
        remaining = end - overlap_start
        if (remaining <= 0.0).all():
            continue
        ratio = work.slowdown[level - 1] if isinstance(level, int) else np.choose(level - 1, work.slowdown)
        lost_fraction = ratio / (1.0 + ratio)
        delay = (
            np.minimum(np.maximum(remaining, 0.0) * (1.0 + ratio), np.maximum(overlap_end - overlap_start, 0.0))
            * lost_fraction
        )
        end, slowed = end + delay, slowed + delay
    return end, slowed


@dataclass(frozen=True, slots=True, eq=False)
class _SlowableWork:
    """Uncontended seconds of kernels and communication.

    slowdown: [levels - 1, ...] of both together at each interference level; None where nothing slows them.
    """

    seconds: FloatArray
    slowdown: FloatArray | None

    @classmethod
    def from_seconds(cls, kernel_seconds: FloatArray, fixed_seconds: FloatArray, slowdown: FloatArray | None) -> Self:
        """slowdown: [levels - 1, ...] of all these kernels; None: nothing overlaps them."""
        seconds = kernel_seconds + fixed_seconds
        if slowdown is None or not kernel_seconds.any():
            return cls(seconds, None)
        share = np.divide(kernel_seconds, seconds, out=np.zeros_like(seconds), where=seconds > 0)
        return cls(seconds, slowdown * share)


@dataclass(frozen=True, slots=True, eq=False)
class _OperationRange:
    """Operations with one synchronization before the first, and work of one kind."""

    group_sync: GroupSync | None
    work: _SlowableWork

    @classmethod
    def from_operations(cls, durations: SegmentDurations, begin: int, end: int) -> Self:
        """Sum up operations `begin` to before `end`."""
        kernels, fixed = durations.kernel_seconds[:, begin:end], durations.fixed_seconds[:, begin:end]
        slowdown = durations.slowdown[..., begin]
        work = _SlowableWork.from_seconds(kernels.sum(axis=1), fixed.sum(axis=1), slowdown)
        return cls(durations.group_syncs[begin], work)


def _boundaries(durations: SegmentDurations) -> tuple[int, ...]:
    """Where to split a segment: a range synchronizes only before its first operation, and has work of one kind.

    Kernels and communication are slowed differently, so they must not be summed up, neither must kernels with
    different slowdown, nor two operations that are both.
    """
    group_syncs, slowdown = durations.group_syncs, durations.slowdown
    slowdown_changes = (slowdown[..., 1:] != slowdown[..., :-1]).any(axis=(0, 1))
    kind = np.where(
        (durations.fixed_seconds == 0).all(axis=0), 0, np.where((durations.kernel_seconds == 0).all(axis=0), 1, 2)
    )
    return tuple(
        index
        for index in range(len(group_syncs))
        if index == 0
        or group_syncs[index] is not None
        or kind[index] == 2
        or kind[index] != kind[index - 1]
        or slowdown_changes[index - 1]
    )
