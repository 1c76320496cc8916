"""How does a block run on many ranks side by side?

Operations run back to back. A rank goes on with an exchange when the last member of its group has come to it. While a
collective runs on another stream of the rank, its kernels take longer by a part, each by its own and beside each kind
of collective by another; what it communicates inside the block does not.

All times are arrays over the ranks. Without a collective beside, a block in which ranks meet in groups of one role is
three sums and two maxima: until the first meeting, from there to the last one, and the rest.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Final, NamedTuple

import numpy as np

from clustersim.common.arrays import FloatArray, IntArray
from clustersim.engine.vectorized.group_sync import GroupSync


class OverlapInterval(NamedTuple):
    """A collective beside, or one on every rank: [ranks] when it begins and ends, and the pace of kernels meanwhile."""

    begin: FloatArray
    end: FloatArray
    level: IntArray | int = 1


OverlapIntervals = Sequence[OverlapInterval]
"""Collectives beside, one after the other on every rank."""
NO_OVERLAP: Final[OverlapIntervals] = ()


@dataclass(frozen=True, slots=True, eq=False)
class SegmentDurations:
    """Durations of a block's operations on n ranks.

    kernels, rest: [n or 1, operations] seconds of kernels alone, and of what a collective beside does not slow;
    slowing: [paces - 1, n or 1, operations] the part by which it does slow kernels; meetings: for each operation who
    meets for it, None if nobody. Of several runs, for `evaluate_operations`: [n or 1, runs or 1, operations], and slowing
    [paces - 1, n or 1, 1, operations].
    """

    rank_count: int
    kernel_seconds: FloatArray
    fixed_seconds: FloatArray
    slowdown: FloatArray
    group_syncs: tuple[GroupSync | None, ...]

    @property
    def has_sync(self) -> bool:
        """Whether any ranks meet."""
        return any(group_sync is not None for group_sync in self.group_syncs)


@dataclass(frozen=True, slots=True, eq=False)
class SegmentRun:
    """How a block ran: [n] each. waited: seconds for others, slowed: by collectives beside, both inside the block."""

    end: FloatArray
    waited: FloatArray
    slowed: FloatArray


@dataclass(frozen=True, slots=True, eq=False)
class MaxPlusSummary:
    """A block in which ranks meet in the groups of one role, undisturbed.

    lead: [n] seconds before the first meeting (without one: all); middle, tail: [n] from there to the last one, and
    after it; waited: [n] seconds in the middle in which others were waited for.
    """

    group_sync: GroupSync | None
    lead: FloatArray
    middle: FloatArray
    tail: FloatArray
    waited: FloatArray

    def evaluate(self, start: FloatArray) -> SegmentRun:
        """Run from these times."""
        arrival = start + self.lead
        if self.group_sync is None:
            return SegmentRun(arrival, self.waited, self.waited)
        synced = self.group_sync.group_max(arrival)
        return SegmentRun(synced + self.middle + self.tail, synced - arrival + self.waited, np.zeros_like(synced))


def summarize_segment(durations: SegmentDurations) -> MaxPlusSummary | None:
    """The outline of a block; None where ranks meet in groups of several roles."""
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
    """For each rank the place of the one that waited least among those that it meets: [n]."""
    blocking = np.arange(durations.rank_count)
    for group_sync in dict.fromkeys(durations.group_syncs):
        if group_sync is not None:
            lateness = -waited[blocking]
            blocking = blocking[group_sync.last_arriver(lateness, group_sync.group_max(lateness))]
    return blocking


def overlapping_intervals(run: SegmentRun, start: FloatArray, overlaps: OverlapIntervals) -> OverlapIntervals:
    """The collectives that may be beside a block, if any is beside it where it runs undisturbed.

    What slows one rank makes another wait for it, and so may bring any collective beside that rank's block that has not
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
    """Run a block, operations that follow each other without a meeting or a change of kind at once."""
    now, waited, slowed = start, np.zeros(durations.rank_count), np.zeros(durations.rank_count)
    for begin, end in pairwise((*_boundaries(durations), len(durations.group_syncs))):
        now, waited = _apply_sync(durations.group_syncs[begin], now, waited)
        seconds = durations.kernel_seconds[:, begin:end].sum(axis=1), durations.fixed_seconds[:, begin:end].sum(axis=1)
        now, slowdown_seconds = _advance(now, *seconds, durations.slowdown[..., begin], overlaps)
        slowed = slowed + slowdown_seconds
    return SegmentRun(now, waited, slowed)


def evaluate_operations(
    start: FloatArray, durations: SegmentDurations, overlaps: OverlapIntervals
) -> tuple[SegmentRun, FloatArray, FloatArray]:
    """Run a block operation by operation; also when each began and ended: [n, operations].

    Or run it several times at once, from start and beside collectives [n, runs]: [n, runs, operations].
    """
    begins, ends = np.empty((2, *start.shape, len(durations.group_syncs)))
    now, waited, slowed = start, np.zeros_like(start), np.zeros_like(start)
    for index, group_sync in enumerate(durations.group_syncs):
        now, waited = _apply_sync(group_sync, now, waited)
        begins[..., index] = now
        now, slowdown_seconds = _advance(
            now,
            durations.kernel_seconds[..., index],
            durations.fixed_seconds[..., index],
            durations.slowdown[..., index],
            overlaps,
        )
        slowed = slowed + slowdown_seconds
        ends[..., index] = now
    return SegmentRun(now, waited, slowed), begins, ends


def _apply_sync(group_sync: GroupSync | None, arrival: FloatArray, waited: FloatArray) -> tuple[FloatArray, FloatArray]:
    """When ranks go on that come to a meeting, and how long they have waited then."""
    if group_sync is None:
        return arrival, waited
    synced = group_sync.group_max(arrival)
    return synced, waited + (synced - arrival)


def _advance(
    start: FloatArray,
    kernel_seconds: FloatArray,
    fixed_seconds: FloatArray,
    slowdown: FloatArray,
    overlaps: OverlapIntervals,
) -> tuple[FloatArray, FloatArray]:
    """When work ends of which a part is kernels, evenly; and how many seconds of it collectives beside have cost.

    slowing: [paces - 1, ...] of all these kernels.
    """
    uncontended = kernel_seconds + fixed_seconds
    end, slowed = start + uncontended, np.zeros_like(start)
    if not overlaps or not kernel_seconds.any():
        return end, slowed
    work_slowdown = slowdown * np.divide(
        kernel_seconds, uncontended, out=np.zeros_like(uncontended), where=uncontended > 0
    )
    for overlap_begin, overlap_end, level in overlaps:
        overlap_start = np.maximum(start, overlap_begin)
        remaining = end - overlap_start
        if (remaining <= 0.0).all():
            continue
        ratio = work_slowdown[level - 1] if isinstance(level, int) else np.choose(level - 1, work_slowdown)
        lost_fraction = ratio / (1.0 + ratio)
        delay = (
            np.minimum(np.maximum(remaining, 0.0) * (1.0 + ratio), np.maximum(overlap_end - overlap_start, 0.0))
            * lost_fraction
        )
        end, slowed = end + delay, slowed + delay
    return end, slowed


def _boundaries(durations: SegmentDurations) -> tuple[int, ...]:
    """Where to cut a block so that a piece has no meeting but before its first operation, and work of one kind.

    Kernels and communication are slowed differently, so they may not be added up, neither may kernels that collectives
    slow by different parts, nor two that are both.
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
