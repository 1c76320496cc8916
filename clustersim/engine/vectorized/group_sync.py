"""Synchronization of many groups at once, as segmented maxima.

Members of a group go on when the last of them has arrived. Times of all members are one array, in which
groups are contiguous once it is sorted by group.
"""

from dataclasses import dataclass
from typing import Self

import numpy as np

from clustersim.common.arrays import FloatArray, IntArray


@dataclass(frozen=True, slots=True, eq=False)
class GroupSync:
    """order: [members] sorted by group; group_start: [groups] first member in that order; group_label: [members]."""

    order: IntArray
    group_start: IntArray
    group_label: IntArray

    @classmethod
    def from_groups(cls, groups: IntArray) -> Self:
        """Members with equal group ids synchronize. groups: [members]."""
        order = np.argsort(groups, kind="stable")
        group_start = np.flatnonzero(np.diff(groups[order], prepend=-1))
        group_label = np.empty(len(groups), dtype=np.int64)
        group_label[order] = np.repeat(np.arange(len(group_start)), np.diff(group_start, append=len(groups)))
        return cls(order, group_start, group_label)

    @property
    def is_trivial(self) -> bool:
        """Whether every group has one member."""
        return len(self.group_start) == len(self.order)

    def group_max(self, times: FloatArray) -> FloatArray:
        """For each member the latest time in its group: [members, ...] as `times`."""
        result: FloatArray = np.maximum.reduceat(times[self.order], self.group_start)[self.group_label]
        return result

    def last_arriver(self, times: FloatArray, group_max: FloatArray) -> IntArray:
        """For each member the first member, in index order, of those in its group with the latest time: [members]."""
        arrivals = self.order[::-1]
        arrivals = arrivals[times[arrivals] == group_max[arrivals]]
        last = np.empty(len(self.group_start), dtype=np.int64)
        last[self.group_label[arrivals]] = arrivals  # of several, the last write wins: the first in index order
        return last[self.group_label]
