"""Kernels beside collectives of two streams at once: those of data parallelism, and tokens on their way to experts.

An all-reduce halves the pace of kernels, an all-to-all quarters it. A kernel of 1 s brings both ranks to 2 s beside the
all-reduce of 8 s; then a block of three kernels of 4 s each begins, and an all-to-all of 4 s beside it.
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
from tests.engine.small_programs import Step, compute, exchange, meet, replicated

SLOWED = Interference.from_measurements(
    {(CollectiveType.ALL_REDUCE, KernelClass.COMPUTE): 1.0, (CollectiveType.ALL_TO_ALL, KernelClass.COMPUTE): 3.0}, {}
)


def travel(seconds: float, *, after: tuple[int, ...]) -> Step:
    return Stream.EP, CollectiveTask(exchange("ep", seconds, CollectiveType.ALL_TO_ALL), after)


@pytest.mark.parametrize("coalesce", [True, False])
def test_beside_both_kernels_go_at_the_slower_pace(coalesce: bool) -> None:
    """From 2 to 6 s a quarter of a second each, so 1 s is done; to 8 s another; the other 10 s alone, to 18 s."""
    steps = [meet(8.0), compute(1.0), travel(4.0, after=(1,)), compute(4.0, 4.0, 4.0)]
    made = replicated(steps, 2, {"dp": [[0, 1]], "ep": [[0, 1]]})
    unit, classes = UnitCost(made), singleton_classes(made)
    cost = SegmentCost(made, DeviceModels.uniform(DeviceModel(unit, SLOWED), 2), unit)
    trace, written = simulate_program(made, classes, cost, coalesce=coalesce)
    first, block = (trace.rank_events(0, Stream.COMPUTE)[place] for place in (0, 1))
    assert (trace.end[first], trace.start[block], trace.end[block]) == (2.0, 2.0, 18.0)
    assert trace.slowed[block] == 4.0
    spans = OperationTraceReader(made, classes, cost, None, trace, written).rank_spans(0, {3})
    assert np.allclose(spans.start, [2.0, 10.0, 14.0])
    assert np.allclose(spans.end, [10.0, 14.0, 18.0])
