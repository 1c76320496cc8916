"""Kernels that overlap collectives of two streams at once: DP all-reduces and MoE all-to-alls.

An all-reduce halves the rate of kernels, an all-to-all quarters it. A kernel of 1 s brings both ranks to 2 s
during the all-reduce of 8 s; then a segment of three kernels of 4 s each begins, overlapping an all-to-all of
4 s.
"""

import numpy as np
import pytest

from clustersim.cost.device_models import DeviceModel, DeviceModels
from clustersim.cost.interference import Interference, KernelClass
from clustersim.cost.segment import SegmentCost
from clustersim.engine.engine import simulate_program
from clustersim.engine.recording.operation_trace import OperationTraceReader
from clustersim.program.task import CollectiveTask, CollectiveType, Stream
from clustersim.symmetry.refinement import singleton_classes
from tests.engine.fake_costs import UnitCost
from tests.engine.small_programs import StreamTask, all_reduce, compute, make_comm_op, make_replicated_program

INTERFERENCE = Interference.from_measurements(
    {(CollectiveType.ALL_REDUCE, KernelClass.COMPUTE): 1.0, (CollectiveType.ALL_TO_ALL, KernelClass.COMPUTE): 3.0}, {}
)


def expert_all_to_all(seconds: float, *, depends_on: tuple[int, ...]) -> StreamTask:
    return Stream.EP, CollectiveTask(make_comm_op("ep", seconds, CollectiveType.ALL_TO_ALL), depends_on)


@pytest.mark.parametrize("coalesce", [True, False])
def test_the_strongest_of_two_overlapping_collectives_counts(coalesce: bool) -> None:
    """From 2 to 6 s at a quarter of the rate, so 1 s is done; to 8 s another; the other 10 s at full rate, to 18 s."""
    steps = [all_reduce(8.0), compute(1.0), expert_all_to_all(4.0, depends_on=(1,)), compute(4.0, 4.0, 4.0)]
    program = make_replicated_program(steps, 2, {"dp": [[0, 1]], "ep": [[0, 1]]})
    unit, classes = UnitCost(program), singleton_classes(program)
    cost = SegmentCost(program, DeviceModels.uniform(DeviceModel(unit, INTERFERENCE), 2), unit)
    trace, operation_log = simulate_program(program, classes, cost, coalesce=coalesce)
    first_event, second_event = (trace.rank_events(0, Stream.COMPUTE)[index] for index in (0, 1))
    assert (trace.end[first_event], trace.start[second_event], trace.end[second_event]) == (2.0, 2.0, 18.0)
    assert trace.slowed[second_event] == 4.0
    spans = OperationTraceReader(program, classes, cost, None, trace, operation_log).rank_spans(0, {3})
    assert np.allclose(spans.start, [2.0, 10.0, 14.0])
    assert np.allclose(spans.end, [10.0, 14.0, 18.0])
