"""Below what can no step of this configuration be? Physical lower bound of the step time.

Each rank has to compute its matmuls and attention, causal attention counted as executed (half of it),
recomputation included, at best at the accelerator's dense peak. Waiting, communication and all other
kernels are taken as free.
"""

from collections import Counter

from clustersim.common.dtypes import DType
from clustersim.common.units import FlopPerSecond, Seconds
from clustersim.hardware.accelerator import Accelerator
from clustersim.model.kernels import TENSOR_CORE_KINDS
from clustersim.program.program import RankProgram
from clustersim.program.task import ComputeTask, Segment
from clustersim.results.simulation_result import SimulationResult


def step_time_lower_bound(result: SimulationResult) -> Seconds:
    """Lower bound of the step time in seconds: the busiest rank's matmuls and attention at the fastest GPU's peak."""
    accelerators, _ = result.scenario.cluster.accelerator_kinds()
    rank_seconds = (_rank_peak_seconds(program, accelerators) for program in result.program.programs)
    return max(rank_seconds, default=0.0) / result.scenario.steps


def _rank_peak_seconds(program: RankProgram, accelerators: tuple[Accelerator, ...]) -> Seconds:
    """Seconds of a rank's matmuls and attention at peak."""
    segment_counts = Counter(task.segment for task in program.tasks if isinstance(task, ComputeTask))
    return sum(count * _segment_peak_seconds(segment, accelerators) for segment, count in segment_counts.items())


def _segment_peak_seconds(block: Segment, accelerators: tuple[Accelerator, ...]) -> Seconds:
    kernels = (operation.kernel for operation in block.operations)
    return sum(
        kernel.flops / _max_peak_flops(kernel.dtype, accelerators)
        for kernel in kernels
        if kernel is not None and kernel.kind in TENSOR_CORE_KINDS
    )


def _max_peak_flops(dtype: DType, accelerators: tuple[Accelerator, ...]) -> FlopPerSecond:
    return max(accelerator.peak_flops(dtype) for accelerator in accelerators)
