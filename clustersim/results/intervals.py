"""Sets of time intervals by key, in columns: intersection, union and totals."""

from dataclasses import dataclass

import numpy as np

from clustersim.common.arrays import FloatArray, IntArray


@dataclass(frozen=True, slots=True, eq=False)
class Intervals:
    """Columns of one length.

    key: owner of each interval (a class, a stream, or both combined in one integer); start, end: seconds, start
    <= end.
    """

    key: IntArray
    start: FloatArray
    end: FloatArray

    def __len__(self) -> int:
        return len(self.key)

    @property
    def seconds(self) -> FloatArray:
        """Duration of each interval."""
        return self.end - self.start

    def total_seconds(self, key_count: int) -> FloatArray:
        """Total seconds of each key, overlaps counted multiply: [keys]."""
        return np.bincount(self.key, self.seconds, minlength=key_count).astype(np.float64, copy=False)

    def sort_by_key(self) -> "Intervals":
        """The intervals sorted by key and time."""
        order = np.argsort(
            self.key * _key_stride(self) + self.start, kind="stable"
        )  # stable sort is fast on mostly sorted input
        return Intervals(self.key[order], self.start[order], self.end[order])

    def merge_overlapping(self) -> "Intervals":
        """Union of the intervals of each key: overlapping or touching ones are merged; sorted by key and time."""
        if len(self) == 0:
            return self
        ordered = self.sort_by_key()
        key_stride = _key_stride(ordered)
        latest_end = np.maximum.accumulate(ordered.key * key_stride + ordered.end)
        starts_new = np.concatenate(([True], ordered.key[1:] * key_stride + ordered.start[1:] > latest_end[:-1]))
        starts_new[1:] |= ordered.key[1:] != ordered.key[:-1]
        first_index = np.flatnonzero(starts_new)
        return Intervals(
            ordered.key[first_index], ordered.start[first_index], np.maximum.reduceat(ordered.end, first_index)
        )


def intersect(left: Intervals, right: Intervals) -> tuple[IntArray, IntArray, Intervals]:
    """Intersections of intervals with equal keys: indices into `left`, indices into `right`, and the common time.

    right: sorted by key and time, and disjoint within a key.
    """
    key_stride = max(_key_stride(left), _key_stride(right))
    first_match = np.searchsorted(right.key * key_stride + right.end, left.key * key_stride + left.start, side="right")
    match_end = np.searchsorted(right.key * key_stride + right.start, left.key * key_stride + left.end, side="left")
    count = np.maximum(match_end - first_match, 0)
    left_index = np.repeat(np.arange(len(left)), count)
    right_index = (
        np.arange(len(left_index)) - np.repeat(np.cumsum(count) - count, count) + np.repeat(first_match, count)
    )
    start = np.maximum(left.start[left_index], right.start[right_index])
    end = np.maximum(np.minimum(left.end[left_index], right.end[right_index]), start)
    return left_index, right_index, Intervals(left.key[left_index], start, end)


def assign_tracks(key: IntArray, start: FloatArray, end: FloatArray) -> IntArray:
    """First-fit track of every interval: the first track of its key that is free when it starts: [n]."""
    track = np.zeros(len(key), dtype=np.int64)
    track_ends: dict[int, list[float]] = {}
    for interval in np.lexsort((end, start, key)).tolist():
        ends = track_ends.setdefault(int(key[interval]), [])
        free_track = next((index for index, track_end in enumerate(ends) if track_end <= start[interval]), len(ends))
        ends[free_track : free_track + 1] = [float(end[interval])]
        track[interval] = free_track
    return track


def sum_over_time(start: IntArray, end: IntArray, values: FloatArray) -> tuple[IntArray, FloatArray]:
    """Sum of the values of active intervals from each time at which it changes; exactly 0 where none is active."""
    times = np.append(start, end)
    order = np.argsort(times, kind="stable")
    active_count, value = (np.append(array, -array)[order].cumsum() for array in (np.ones(len(start)), values))
    return last_per_time(times[order], np.where(active_count > 0, value, 0.0))


def last_per_time(times: IntArray, values: FloatArray) -> tuple[IntArray, FloatArray]:
    """The last of several values at the same time. times: ascending."""
    is_last = np.diff(times, append=times[-1:] + 1) != 0
    return times[is_last], values[is_last]


def _key_stride(intervals: Intervals) -> float:
    """Offset between successive keys such that key * offset + time sorts by (key, time)."""
    return 2.0 * float(intervals.end.max(initial=0.0)) or 1.0
