"""Below what can no step of this configuration be?

Each rank has its matrix products and attention to do, causal attention counted as it is computed (half of it),
recomputation included; the dense peak is the most at which an accelerator does them. Nothing waits, nothing is
communicated, nothing else is computed.
"""

from collections import Counter

from clustersim.common.dtypes import DType
from clustersim.common.units import FlopPerSecond, Seconds
from clustersim.hardware.accelerator import Accelerator
from clustersim.model.kernels import TENSOR_CORE_KINDS
from clustersim.program.program import RankProgram
from clustersim.program.task import ComputeTask, Segment
from clustersim.results.simulation_result import SimulationResult


def floor_of(result: SimulationResult) -> Seconds:
    """Seconds of a step in which the rank that has most to do does nothing else, at the peak of the fastest GPU."""
    accelerators, _ = result.scenario.cluster.accelerator_kinds()
    ranks = (_products(program, accelerators) for program in result.program.programs)
    return max(ranks, default=0.0) / result.scenario.steps


def _products(program: RankProgram, accelerators: tuple[Accelerator, ...]) -> Seconds:
    """What a rank's products take at the peak."""
    blocks = Counter(task.segment for task in program.tasks if isinstance(task, ComputeTask))
    return sum(times * _in_block(block, accelerators) for block, times in blocks.items())


def _in_block(block: Segment, accelerators: tuple[Accelerator, ...]) -> Seconds:
    kernels = (operation.kernel for operation in block.operations)
    return sum(
        kernel.flops / _peak(kernel.dtype, accelerators)
        for kernel in kernels
        if kernel is not None and kernel.kind in TENSOR_CORE_KINDS
    )


def _peak(dtype: DType, accelerators: tuple[Accelerator, ...]) -> FlopPerSecond:
    return max(accelerator.peak_flops(dtype) for accelerator in accelerators)
