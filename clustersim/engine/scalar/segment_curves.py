"""Progress curves of the segment of each task on each rank, with the rank's own jitter."""

import numpy as np

from clustersim.common.arrays import FloatArray
from clustersim.common.cached_method import cached_by
from clustersim.cost.jitter import Jitter
from clustersim.cost.segment import SegmentCost, SegmentTiming
from clustersim.engine.scalar.segment_action import ProgressCurves, progress_curves
from clustersim.program.program import Program, RankProgram
from clustersim.program.task import Segment


class SegmentCurves:
    """Progress curves of segments; without jitter, ranks that share a segment's timing share its curves."""

    def __init__(self, program: Program, cost: SegmentCost, jitter: Jitter | None) -> None:
        self._program, self._cost, self._jitter = program, cost, jitter
        self._curve_cache: dict[int, tuple[SegmentTiming, ProgressCurves]] = {}
        self._kernel_curve_cache: dict[tuple[int, int], tuple[SegmentTiming, ProgressCurves]] = {}

    def segment_curves(self, rank: int, task_id: int, segment: Segment) -> ProgressCurves:
        """Curves of the segment of task `task_id` of a rank."""
        timing = self._cost.time_segment(rank, segment)
        cached = self._curve_cache.get(id(timing))
        if cached is None or self._jitter is not None:
            kernel_seconds = self._kernel_seconds(rank, task_id, timing)
            cached = (
                timing,
                progress_curves(kernel_seconds, timing.fixed(kernel_seconds), self._cost.slowdown(rank, segment)),
            )
            self._curve_cache[id(timing)] = cached
        return cached[1]

    def kernel_curves(self, rank: int, task_id: int, segment: Segment, operation_index: int) -> ProgressCurves:
        """Curves of the kernel of one operation of the segment, without its communication."""
        timing, slowdown = self._cost.time_segment(rank, segment), self._cost.slowdown(rank, segment)
        if self._jitter is not None:
            return _operation_curves(self._kernel_seconds(rank, task_id, timing), operation_index, slowdown)
        cached = self._kernel_curve_cache.get((id(timing), operation_index))
        if cached is None:
            cached = self._kernel_curve_cache[id(timing), operation_index] = (
                timing,
                _operation_curves(timing.kernel_seconds, operation_index, slowdown),
            )
        return cached[1]

    def _kernel_seconds(self, rank: int, task_id: int, timing: SegmentTiming) -> FloatArray:
        """[operations] kernel durations of task `task_id`, with jitter."""
        if self._jitter is None:
            return timing.kernel_seconds
        first = self._rank_program(rank).operation_offsets[task_id]
        return timing.kernel_seconds * self._rank_factors(self._jitter, rank)[first : first + len(timing.durations)]

    @cached_by(lambda _self, _jitter, rank: rank)
    def _rank_factors(self, jitter: Jitter, rank: int) -> FloatArray:
        """Jitter factors of all segment operations of a rank, in execution order."""
        return jitter.rank_factors(rank, self._rank_program(rank).operation_offsets[-1])

    def _rank_program(self, rank: int) -> RankProgram:
        return self._program.programs[int(self._program.program_index[rank])]


def _operation_curves(kernel_seconds: FloatArray, operation_index: int, slowdown: FloatArray) -> ProgressCurves:
    return progress_curves(
        kernel_seconds[operation_index : operation_index + 1],
        np.zeros(1),
        slowdown[:, operation_index : operation_index + 1],
    )
