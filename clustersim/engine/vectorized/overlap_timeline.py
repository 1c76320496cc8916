"""Timelines of the collectives that overlap segments, and the interference level of kernels meanwhile.

Each stream runs its collectives one after the other; of two streams both may have one in flight. Then the
level of the pair applies (the slower of the two), so merged timelines are split where either stream begins or
ends one.
"""

from dataclasses import dataclass
from typing import Self

import numpy as np

from clustersim.common.arrays import FloatArray, IntArray
from clustersim.cost.segment import SegmentCost


@dataclass(frozen=True, slots=True, eq=False)
class OverlapTimeline:
    """Consecutive collectives: [ranks, collectives] begin, end, and the interference level of concurrent kernels.

    Level 0: kernels are not slowed.
    """

    begin: FloatArray
    end: FloatArray
    level: IntArray

    def merge_timeline(self, stream_timeline: Self, cost: SegmentCost) -> "OverlapTimeline":
        """Timeline of two streams, in intervals in which neither changes."""
        edges = np.sort(np.hstack([self.begin, self.end, stream_timeline.begin, stream_timeline.end]), axis=1)
        begin, end = edges[:, :-1], edges[:, 1:]
        combined_level = np.array(
            [
                [cost.combined_interference_level(a, b) for b in range(stream_timeline._level_count)]
                for a in range(self._level_count)
            ]
        )
        level = combined_level[self._level_at(begin), stream_timeline._level_at(begin)]
        return OverlapTimeline(begin, np.where(level > 0, end, begin), level)

    @property
    def _level_count(self) -> int:
        """One more than the highest level."""
        return int(self.level.max(initial=0)) + 1

    def _level_at(self, times: FloatArray) -> IntArray:
        """The level at given times: [ranks, n] both."""
        level = np.zeros(times.shape, dtype=np.int64)
        for rank_index, (rank_times, begin, end) in enumerate(zip(times, self.begin, self.end, strict=True)):
            position = np.searchsorted(begin, rank_times, side="right") - 1
            in_flight = (
                (position >= 0) & (end[position] > rank_times)
                if len(begin)
                else np.zeros(len(rank_times), dtype=np.bool_)
            )
            level[rank_index, in_flight] = self.level[rank_index, position[in_flight]]
        return level
