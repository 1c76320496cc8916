"""When do the members of many groups meet, all groups at once?

Members of a group go on together when the last of them has come. Times of all members are one array, groups are runs
of it once it is sorted by group.
"""

from dataclasses import dataclass
from typing import Self

import numpy as np

from clustersim.common.arrays import FloatArray, IntArray


@dataclass(frozen=True, slots=True, eq=False)
class Meeting:
    """order: [members] sorted by group; first: [groups] where each group begins in it; label: [members] group."""

    order: IntArray
    first: IntArray
    label: IntArray

    @classmethod
    def of(cls, groups: IntArray) -> Self:
        """The members with equal numbers meet: [members]."""
        order = np.argsort(groups, kind="stable")
        first = np.flatnonzero(np.diff(groups[order], prepend=-1))
        label = np.empty(len(groups), dtype=np.int64)
        label[order] = np.repeat(np.arange(len(first)), np.diff(first, append=len(groups)))
        return cls(order, first, label)

    @property
    def alone(self) -> bool:
        """Whether every group has one member."""
        return len(self.first) == len(self.order)

    def latest(self, times: FloatArray) -> FloatArray:
        """For each member the latest time of its group: [members, ...] as `times`."""
        latest: FloatArray = np.maximum.reduceat(times[self.order], self.first)[self.label]
        return latest

    def last(self, times: FloatArray, latest: FloatArray) -> IntArray:
        """For each member the first one of its group that comes latest: [members]."""
        come = self.order[::-1]
        come = come[times[come] == latest[come]]
        winner = np.empty(len(self.first), dtype=np.int64)
        winner[self.label[come]] = come  # of several, the last one written stays: the first in order
        return winner[self.label]
