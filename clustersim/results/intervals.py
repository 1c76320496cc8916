"""When do two things happen at once? Intervals of time of many owners, intersected, joined and summed in columns."""

from dataclasses import dataclass

import numpy as np

from clustersim.common.arrays import FloatArray, IntArray


@dataclass(frozen=True, slots=True, eq=False)
class Intervals:
    """Columns of one length. key: whose (a class, a stream, or both in a number); start, end: seconds, start <= end."""

    key: IntArray
    start: FloatArray
    end: FloatArray

    def __len__(self) -> int:
        return len(self.key)

    @property
    def seconds(self) -> FloatArray:
        """How long each is."""
        return self.end - self.start

    def total(self, keys: int) -> FloatArray:
        """Seconds of each of so many keys, what overlaps counted as often as it is there: [keys]."""
        return np.bincount(self.key, self.seconds, minlength=keys).astype(np.float64, copy=False)

    def sorted(self) -> "Intervals":
        """By key and time."""
        order = np.argsort(self.key * _apart(self) + self.start, kind="stable")  # fast where they are sorted mostly
        return Intervals(self.key[order], self.start[order], self.end[order])

    def joined(self) -> "Intervals":
        """Those of a key that overlap or touch as one, by key and time."""
        if len(self) == 0:
            return self
        ordered = self.sorted()
        apart = _apart(ordered)
        reached = np.maximum.accumulate(ordered.key * apart + ordered.end)
        new = np.concatenate(([True], ordered.key[1:] * apart + ordered.start[1:] > reached[:-1]))
        new[1:] |= ordered.key[1:] != ordered.key[:-1]
        first = np.flatnonzero(new)
        return Intervals(ordered.key[first], ordered.start[first], np.maximum.reduceat(ordered.end, first))


def common(some: Intervals, others: Intervals) -> tuple[IntArray, IntArray, Intervals]:
    """Where intervals of equal keys overlap: which of `some`, which of `others`, and the time that they share.

    others: by key and time, and those of a key apart from each other.
    """
    apart = max(_apart(some), _apart(others))
    low = np.searchsorted(others.key * apart + others.end, some.key * apart + some.start, side="right")
    high = np.searchsorted(others.key * apart + others.start, some.key * apart + some.end, side="left")
    count = np.maximum(high - low, 0)
    one = np.repeat(np.arange(len(some)), count)
    other = np.arange(len(one)) - np.repeat(np.cumsum(count) - count, count) + np.repeat(low, count)
    start = np.maximum(some.start[one], others.start[other])
    end = np.maximum(np.minimum(some.end[one], others.end[other]), start)
    return one, other, Intervals(some.key[one], start, end)


def tracks(key: IntArray, start: FloatArray, end: FloatArray) -> IntArray:
    """For every interval the first track of its key that is free when it starts: [n]."""
    track = np.zeros(len(key), dtype=np.int64)
    lasts: dict[int, list[float]] = {}
    for item in np.lexsort((end, start, key)).tolist():
        ends = lasts.setdefault(int(key[item]), [])
        free = next((number for number, until in enumerate(ends) if until <= start[item]), len(ends))
        ends[free : free + 1] = [float(end[item])]
        track[item] = free
    return track


def sums(start: IntArray, end: IntArray, values: FloatArray) -> tuple[IntArray, FloatArray]:
    """What values of intervals sum to from each time on at which that changes; exactly nothing where none is."""
    times = np.append(start, end)
    order = np.argsort(times, kind="stable")
    running, value = (np.append(array, -array)[order].cumsum() for array in (np.ones(len(start)), values))
    return last(times[order], np.where(running > 0, value, 0.0))


def last(times: IntArray, values: FloatArray) -> tuple[IntArray, FloatArray]:
    """Of several values at one time the last. times: ascending."""
    kept = np.diff(times, append=times[-1:] + 1) != 0
    return times[kept], values[kept]


def _apart(intervals: Intervals) -> float:
    """By how much times of successive keys are set apart, so that (key, time) sorts as one number."""
    return 2.0 * float(intervals.end.max(initial=0.0)) or 1.0
