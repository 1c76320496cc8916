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

    def segment_curves(self, rank: int, task_id: int, segment: Segment) -> ProgressCurves:
        """Curves of the segment of task `task_id` of a rank."""
        timing = self._cost.time_segment(rank, segment)
        if self._jitter is None:
            return self._timing_curves(timing, rank, segment)
        kernel_seconds = self._jittered_seconds(self._jitter, rank, task_id, timing)
        return _segment_curves(timing, kernel_seconds, self._cost.slowdown(rank, segment))

    @cached_by(lambda _self, timing, _rank, _segment: timing)
    def _timing_curves(self, timing: SegmentTiming, rank: int, segment: Segment) -> ProgressCurves:
        """Curves of all ranks and segments with this timing."""
        return _segment_curves(timing, timing.kernel_seconds, self._cost.slowdown(rank, segment))

    def kernel_curves(self, rank: int, task_id: int, segment: Segment, operation_index: int) -> ProgressCurves:
        """Curves of the kernel of one operation of the segment, without its communication."""
        timing = self._cost.time_segment(rank, segment)
        if self._jitter is None:
            return self._timing_kernel_curves(timing, operation_index, rank, segment)
        kernel_seconds = self._jittered_seconds(self._jitter, rank, task_id, timing)
        return _operation_curves(kernel_seconds, operation_index, self._cost.slowdown(rank, segment))

    @cached_by(lambda _self, timing, operation_index, _rank, _segment: (timing, operation_index))
    def _timing_kernel_curves(
        self, timing: SegmentTiming, operation_index: int, rank: int, segment: Segment
    ) -> ProgressCurves:
        return _operation_curves(timing.kernel_seconds, operation_index, self._cost.slowdown(rank, segment))

    def _jittered_seconds(self, jitter: Jitter, rank: int, task_id: int, timing: SegmentTiming) -> FloatArray:
        """[operations] kernel durations of task `task_id`, with jitter."""
        first = self._rank_program(rank).operation_offsets[task_id]
        return timing.kernel_seconds * self._rank_factors(jitter, rank)[first : first + len(timing.durations)]

    @cached_by(lambda _self, _jitter, rank: rank)
    def _rank_factors(self, jitter: Jitter, rank: int) -> FloatArray:
        """Jitter factors of all segment operations of a rank, in execution order."""
        return jitter.rank_factors(rank, self._rank_program(rank).operation_offsets[-1])

    def _rank_program(self, rank: int) -> RankProgram:
        return self._program.programs[int(self._program.program_index[rank])]


def _segment_curves(timing: SegmentTiming, kernel_seconds: FloatArray, slowdown: FloatArray) -> ProgressCurves:
    return progress_curves(kernel_seconds, timing.fixed(kernel_seconds), slowdown)


def _operation_curves(kernel_seconds: FloatArray, operation_index: int, slowdown: FloatArray) -> ProgressCurves:
    return progress_curves(
        kernel_seconds[operation_index : operation_index + 1],
        np.zeros(1),
        slowdown[:, operation_index : operation_index + 1],
    )
