"""When do the members of one group end a segment in which they synchronize? Max-plus arithmetic on plain numbers.

The times are those of `vectorized.segment_eval`, to the bit, which is made for many ranks: a group that runs a segment
jointly has a few members, and for these plain numbers are ten times as fast as arrays.
"""

from collections.abc import Iterable, Sequence
from functools import cached_property

import numpy as np

from clustersim.common.arrays import FloatArray
from clustersim.common.units import Seconds
from clustersim.engine.recording.recorder import WaitAndSlowdown
from clustersim.engine.vectorized.segment_eval import MaxPlusSummary, SegmentDurations

MemberOverlap = tuple[Seconds, Seconds, int]
"""A collective that overlaps a member's segment: begin, end (inf: in flight), interference level."""
MemberEnd = tuple[Seconds, WaitAndSlowdown]
"""When a member ends the segment, and what it has lost in it."""
_MemberWork = tuple[Seconds, Sequence[float]]
"""Uncontended seconds of a member's work, and its relative slowdown at each level from 1 on; empty: none at any."""


class GroupDurations:
    """A segment on the members of one group. summary: the same without overlapping collectives, if there is one."""

    def __init__(self, durations: SegmentDurations, summary: MaxPlusSummary | None) -> None:
        self.member_count, self._durations, self._summary = durations.rank_count, durations, summary

    def ends(self, start: Sequence[Seconds], overlaps: Sequence[Sequence[MemberOverlap]]) -> list[MemberEnd]:
        """[members] ends. start: [members]; overlaps: [members] collectives, one after the other."""
        if self._summary is None or any(overlaps):
            return self._overlapped_ends(start, overlaps)
        arrivals = [begin + lead for begin, (lead, *_) in zip(start, self._summaries, strict=True)]
        if self._summary.group_sync is None:
            return [(arrival, WaitAndSlowdown()) for arrival in arrivals]
        synced = max(arrivals)
        return [
            (synced + middle + tail, WaitAndSlowdown(synced - arrival + waited))
            for arrival, (_, middle, tail, waited) in zip(arrivals, self._summaries, strict=True)
        ]

    def _overlapped_ends(
        self, start: Sequence[Seconds], overlaps: Sequence[Sequence[MemberOverlap]]
    ) -> list[MemberEnd]:
        """The same by ranges of operations."""
        now = list(start)
        waited, slowed = ([0.0] * self.member_count for _ in range(2))
        for has_sync, works in self._ranges:
            if has_sync:
                synced = max(now)
                waited = [before + (synced - arrival) for before, arrival in zip(waited, now, strict=True)]
                now = [synced] * self.member_count
            for member, (seconds, slowdown) in enumerate(works):
                end, lost = _advance(now[member], seconds, slowdown, overlaps[member])
                now[member], slowed[member] = end, slowed[member] + lost
        return [*zip(now, map(WaitAndSlowdown, waited, slowed), strict=True)]

    @cached_property
    def _summaries(self) -> list[tuple[Seconds, Seconds, Seconds, Seconds]]:
        """Lead, middle, tail and waited (`MaxPlusSummary`) of each member."""
        summary = self._summary
        columns = () if summary is None else (summary.lead, summary.middle, summary.tail, summary.waited)
        return [*zip(*(column.tolist() for column in columns), strict=True)]

    @cached_property
    def _ranges(self) -> list[tuple[bool, list[_MemberWork]]]:
        """Ranges of operations: whether members synchronize before the first one, and each member's work."""
        return [
            (
                operations.group_sync is not None,
                [
                    *zip(
                        self._per_member(operations.work.seconds),
                        self._slowdowns(operations.work.slowdown),
                        strict=True,
                    )
                ],
            )
            for operations in self._durations.ranges
        ]

    def _slowdowns(self, slowdown: FloatArray | None) -> Iterable[Sequence[float]]:
        """[members] relative slowdown at each level from 1 on; slowdown: [levels - 1, members or 1], None: none."""
        none: Sequence[float] = ()
        return [none] * self.member_count if slowdown is None else zip(*map(self._per_member, slowdown), strict=True)

    def _per_member(self, values: FloatArray) -> list[float]:
        """A value for each member. values: [members or 1]."""
        per_member: list[float] = np.broadcast_to(values, self.member_count).tolist()
        return per_member


def _advance(
    start: Seconds, seconds: Seconds, slowdown: Sequence[float], overlaps: Sequence[MemberOverlap]
) -> tuple[Seconds, Seconds]:
    """End of work with evenly distributed kernels, and the seconds that overlapping collectives cost it."""
    end, slowed = start + seconds, 0.0
    for begin, until, level in overlaps if slowdown else ():
        overlap_start = max(start, begin)
        remaining = end - overlap_start
        if remaining > 0.0:
            ratio = slowdown[level - 1]
            delay = min(remaining * (1.0 + ratio), max(until - overlap_start, 0.0)) * (ratio / (1.0 + ratio))
            end, slowed = end + delay, slowed + delay
    return end, slowed
