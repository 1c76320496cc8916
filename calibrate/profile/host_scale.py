"""How much faster is the host without a profiler?

The profiler records every operator on the host, which slows that, and hardly slows the GPU. So where a step without a
profiler is known to be faster, the host's time of each launch and the GPU's waiting for it are less by one factor: the
one with which the record predicts that step, between none of it and all. Where the kernels alone take longer than the
step, the GPU was slower under the profiler, too (clocks); kernel times stay as they were traced.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Final

from clustersim.common.units import Seconds
from clustersim.cost.calibration_record import CalibrationRecord
from clustersim.scenario import Scenario
from clustersim.simulation import simulate

_HALVINGS: Final = 12  # of the interval of factors: to 1/4096


def fit_host_scale(
    scaled_record: Callable[[float], CalibrationRecord], scenario: Scenario, step_time: Seconds
) -> float:
    """The factor with which a record predicts a step time, at most 1. scaled_record: the record with a factor."""

    def predicted(scale: float) -> Seconds:
        return simulate(replace(scenario, cost=replace(scenario.cost, record=scaled_record(scale)))).step_time

    low, high = 0.0, 1.0
    if predicted(high) <= step_time:
        return high
    for _ in range(_HALVINGS):
        middle = (low + high) / 2.0
        if predicted(middle) < step_time:
            low = middle
        else:
            high = middle
    return high
