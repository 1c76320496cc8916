"""Which collectives are beside the blocks of ranks, and at which pace do kernels go meanwhile?

Each stream runs its collectives one after the other; of two streams both may be under way. Beside both, kernels go at
the slower pace of the two, so what both streams do is cut where either begins or ends something.
"""

from dataclasses import dataclass
from typing import Self

import numpy as np

from clustersim.common.arrays import FloatArray, IntArray
from clustersim.cost.segment import BlockCost


@dataclass(frozen=True, slots=True, eq=False)
class Moves:
    """Collectives that follow each other: [ranks, collectives] when they moved, and the pace of kernels beside them.

    A pace of 0 is that of kernels alone.
    """

    since: FloatArray
    until: FloatArray
    pace: IntArray

    def with_others(self, other: Self, cost: BlockCost) -> "Moves":
        """What this stream and another do together, in the pieces in which both stay the same."""
        edges = np.sort(np.hstack([self.since, self.until, other.since, other.until]), axis=1)
        since, until = edges[:, :-1], edges[:, 1:]
        both = np.array([[cost.pace_of_both(a, b) for b in range(other._most)] for a in range(self._most)])
        pace = both[self._at(since), other._at(since)]
        return Moves(since, np.where(pace > 0, until, since), pace)

    @property
    def _most(self) -> int:
        """One more than the highest number of a pace."""
        return int(self.pace.max(initial=0)) + 1

    def _at(self, times: FloatArray) -> IntArray:
        """The pace beside what is under way at these times: [ranks, n] both."""
        pace = np.zeros(times.shape, dtype=np.int64)
        for row, (own, since, until) in enumerate(zip(times, self.since, self.until, strict=True)):
            place = np.searchsorted(since, own, side="right") - 1
            moves = (place >= 0) & (until[place] > own) if len(since) else np.zeros(len(own), dtype=np.bool_)
            pace[row, moves] = self.pace[row, place[moves]]
        return pace
