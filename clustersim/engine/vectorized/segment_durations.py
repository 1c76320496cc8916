"""Durations of each task's operations on all ranks that run the same program, and the groups that synchronize."""

from dataclasses import dataclass, field, replace
from typing import Final

import numpy as np

from clustersim.common.arrays import FloatArray, IntArray
from clustersim.cost.jitter import Jitter
from clustersim.cost.segment import SegmentCost, SegmentTiming
from clustersim.engine.vectorized.group_sync import GroupSync
from clustersim.engine.vectorized.segment_eval import MaxPlusSummary, SegmentDurations, summarize_segment
from clustersim.program.program import Program, RankProgram
from clustersim.program.task import Segment
from clustersim.symmetry.refinement import SymmetryClasses

DRAW_SIZE: Final = 512
"""Operations whose jitter factors are drawn at once."""


@dataclass(slots=True, eq=False)
class RankSegmentDurations:
    """ranks: simulated ranks of one program; group_syncs: by kind of group, None where all groups are singletons."""

    program: RankProgram
    ranks: IntArray
    cost: SegmentCost
    jitter: Jitter | None
    group_syncs: dict[str, GroupSync | None]
    _segment_cache: dict[Segment, tuple["_SegmentTimings", MaxPlusSummary | None]] = field(
        init=False, default_factory=dict
    )
    _factors: "_JitterFactors | None" = field(init=False, default=None)

    @property
    def has_interference(self) -> bool:
        """Whether DP or EP collectives slow any kernel of these ranks."""
        return self.cost.comm_slows_compute(self.ranks)

    def durations_and_summary(self, task_id: int, segment: Segment) -> tuple[SegmentDurations, MaxPlusSummary | None]:
        """Durations of the segment of task `task_id`, and its max-plus summary without overlapping collectives."""
        timed, summary = self._cached_segment(segment)
        factors = self.draw_factors(self.program.operation_offsets[task_id], len(segment.operations))
        if factors is None:
            return timed.durations, summary
        varied = _apply_jitter(timed, timed.durations, factors)
        return varied, summarize_segment(varied)

    def batched_durations(self, segment: Segment, factors: FloatArray | None) -> SegmentDurations:
        """Durations of several runs of a segment; factors: [ranks, runs, operations] of jitter, if there is any."""
        timed = self._cached_segment(segment)[0]
        durations = timed.durations
        runs = replace(
            durations,
            kernel_seconds=durations.kernel_seconds[:, None],
            fixed_seconds=durations.fixed_seconds[:, None],
            slowdown=durations.slowdown[:, :, None],
        )
        return runs if factors is None else _apply_jitter(timed, runs, factors)

    def draw_factors(self, first_operation: int, count: int) -> FloatArray | None:
        """Jitter factors of a range of operations, in ascending order of calls only: [ranks, count]."""
        if self.jitter is None:
            return None
        if self._factors is None:
            self._factors = _JitterFactors(self.jitter, self.ranks)
        return self._factors.draw_range(first_operation, count)

    def _cached_segment(self, segment: Segment) -> tuple["_SegmentTimings", MaxPlusSummary | None]:
        cached = self._segment_cache.get(segment)
        if cached is None:
            timed = self._time_segment(segment)
            cached = self._segment_cache[segment] = timed, summarize_segment(timed.durations)
        return cached

    def _time_segment(self, segment: Segment) -> "_SegmentTimings":
        _, first_of_class, timing_index = np.unique(
            self.cost.timing_classes(segment)[self.ranks], return_index=True, return_inverse=True
        )
        timings = [self.cost.time_segment(int(self.ranks[index]), segment) for index in first_of_class]
        kernel_seconds = np.stack([timing.kernel_seconds for timing in timings])
        fixed_seconds = np.stack([timing.fixed(timing.kernel_seconds) for timing in timings])
        slowdown = np.stack([self.cost.slowdown(int(self.ranks[index]), segment) for index in first_of_class], axis=1)
        comm_groups = [operation.comm_op.comm_group if operation.comm_op else None for operation in segment.operations]
        group_syncs = tuple(None if comm_group is None else self.group_syncs[comm_group] for comm_group in comm_groups)
        if len(timings) > 1:
            timing_index = timing_index.reshape(-1)
            kernel_seconds, fixed_seconds, slowdown = (
                kernel_seconds[timing_index],
                fixed_seconds[timing_index],
                slowdown[:, timing_index],
            )
        return _SegmentTimings(
            timings,
            timing_index.reshape(-1),
            SegmentDurations(len(self.ranks), kernel_seconds, fixed_seconds, slowdown, group_syncs),
        )


@dataclass(frozen=True, slots=True, eq=False)
class _SegmentTimings:
    """A segment on many ranks. timings: the distinct ones; timing_index: [ranks] which of them each rank has."""

    timings: list[SegmentTiming]
    timing_index: IntArray
    durations: SegmentDurations


def _apply_jitter(timed: _SegmentTimings, durations: SegmentDurations, factors: FloatArray) -> SegmentDurations:
    """Durations with varied kernels; factors: [ranks, ..., operations]."""
    kernel_seconds = durations.kernel_seconds * factors
    if not any(timing.overlaps for timing in timed.timings):
        return replace(durations, kernel_seconds=kernel_seconds)
    fixed_seconds = np.empty_like(kernel_seconds)
    for index, timing in enumerate(timed.timings):
        fixed_seconds[timed.timing_index == index] = timing.fixed(kernel_seconds[timed.timing_index == index])
    return replace(durations, kernel_seconds=kernel_seconds, fixed_seconds=fixed_seconds)


class _JitterFactors:
    """Jitter factors of many ranks, drawn some operations in advance: there may be 10^8 of them."""

    def __init__(self, jitter: Jitter, ranks: IntArray) -> None:
        self._jitter = jitter
        self._generators = [jitter.rank_generator(rank) for rank in ranks.tolist()]
        self._first_operation = 0
        self._drawn = np.empty((len(ranks), 0))

    def draw_range(self, first_operation: int, count: int) -> FloatArray:
        """Factors of operations from `first_operation` on, in ascending order of calls only: [ranks, count]."""
        self._skip_to(first_operation)
        begin, drawn = first_operation - self._first_operation, self._drawn
        missing = begin + count - drawn.shape[1]
        if missing > 0:
            new_factors = np.empty((len(drawn), max(DRAW_SIZE, missing)))
            self._jitter.draw_factors(self._generators, new_factors)
            self._drawn, self._first_operation, begin = (
                np.concatenate((drawn[:, begin:], new_factors), axis=1),
                first_operation,
                0,
            )
        return self._drawn[:, begin : begin + count]

    def _skip_to(self, first_operation: int) -> None:
        """Draw skipped factors in chunks, without keeping them."""
        end = self._first_operation + self._drawn.shape[1]
        if first_operation <= end:
            return
        for begin in range(end, first_operation, DRAW_SIZE):
            self._jitter.draw_factors(
                self._generators, np.empty((len(self._drawn), min(DRAW_SIZE, first_operation - begin)))
            )
        self._first_operation, self._drawn = first_operation, self._drawn[:, :0]


def rank_group_colours(program: Program, classes: SymmetryClasses, comm_group: str, ranks: IntArray) -> IntArray:
    """[ranks] colour of the group of a kind that each simulated rank is in; ranks of equal colours synchronize."""
    return classes.group_colours[comm_group][program.group_indices[comm_group][ranks]]


def find_group_syncs(program: Program, classes: SymmetryClasses, ranks: IntArray) -> dict[str, GroupSync | None]:
    """The groups in which ranks synchronize, by kind; None where all groups are singletons."""
    group_syncs: dict[str, GroupSync | None] = {}
    for comm_group, group_indices in program.group_indices.items():
        if (group_indices[ranks] >= 0).all() and not program.groups[comm_group].ordered:
            group_sync = GroupSync.from_groups(rank_group_colours(program, classes, comm_group, ranks))
            group_syncs[comm_group] = None if group_sync.is_trivial else group_sync
    return group_syncs
