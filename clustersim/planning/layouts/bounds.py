"""How long does a step take at least?

From what passes take (`layouts.pass_times`), f forward and b backward: of m microbatches

- a pipeline rank does all passes of its stages, after one microbatch has passed all stages before its first one, and
  before the last one goes back through these: with p equal stages of 1F1B (p - 1)(f + b) + m (f + b), its own time;
- a stage does its own, after one has passed all stages before it, and before the last one goes back through these: of
  few microbatches in many stages this is more.

Backward in halves goes back by its input gradients alone, and a rank may do weight gradients meanwhile. No bound is
known where kernels vary (jitter); of several steps in a row only what a rank computes counts, as they overlap.
"""

from dataclasses import dataclass
from typing import Final

import numpy as np

from clustersim.build import build_plan
from clustersim.common.arrays import FloatArray
from clustersim.common.units import Seconds
from clustersim.planning.layouts.pass_times import MATMUL_INDEX, MEMORY_BOUND_INDEX, PassTimes, exclusive_seconds
from clustersim.scenario.resolved import ResolvedScenario
from clustersim.schedules.breadth_first import BreadthFirst
from clustersim.schedules.gpipe import GPipe
from clustersim.schedules.interleaved import Interleaved
from clustersim.schedules.one_f_one_b import OneFOneB

_UNSPLIT_BACKWARD_SCHEDULES: Final = (OneFOneB, GPipe, Interleaved, BreadthFirst)  # backward is not in halves
_ROUNDING_MARGIN: Final = 1.0 - 1e-9  # sums are not added up in the order of the simulation


@dataclass(frozen=True, slots=True)
class StepLowerBound:
    """Seconds of a step at least, and in which GPUs run products and other kernels at least, the mean over them."""

    seconds: Seconds
    matmul_seconds: Seconds = 0.0
    memory_bound_seconds: Seconds = 0.0


def step_lower_bound(resolved: ResolvedScenario) -> StepLowerBound:
    """What no simulation of the setup's step undercuts."""
    if resolved.jitter is not None:
        return StepLowerBound(0.0)
    plan = build_plan(resolved)
    pass_times, microbatches = PassTimes(plan, resolved), plan.microbatches
    unsplit_backward, is_single_step = (
        isinstance(resolved.effective_schedule, _UNSPLIT_BACKWARD_SCHEDULES),
        resolved.steps == 1,
    )
    forward, both = (
        pass_times.forward,
        pass_times.forward + pass_times.backward,
    )  # [stages, uses] seconds of a microbatch
    forward_seconds, total_seconds = exclusive_seconds(forward), exclusive_seconds(both)  # [stages]
    backward_seconds = exclusive_seconds(pass_times.backward) if unsplit_backward else pass_times.propagation_seconds
    fill_seconds, drain_seconds = (
        _exclusive_cumsum(forward_seconds),
        _exclusive_cumsum(backward_seconds),
    )  # [stages] in all stages before each
    bounds = []
    for rank in range(plan.layout.pp):
        stages = list(plan.placement.stages_on_rank(rank))
        ramp_seconds = fill_seconds[min(stages)] + (drain_seconds[min(stages)] if unsplit_backward else 0.0)
        busy_seconds = total_seconds[stages].sum() + pass_times.slowdown_seconds(both[stages].sum(axis=0))
        bounds.append(microbatches * busy_seconds + (ramp_seconds if is_single_step else 0.0))
    if is_single_step:
        bounds += (fill_seconds + microbatches * (forward_seconds + backward_seconds) + drain_seconds).tolist()
    kernel_seconds = microbatches * both.sum(axis=0) / plan.layout.pp
    return StepLowerBound(
        *(
            float(item) * _ROUNDING_MARGIN
            for item in (max(bounds), kernel_seconds[MATMUL_INDEX], kernel_seconds[MEMORY_BOUND_INDEX])
        )
    )


def _exclusive_cumsum(times: FloatArray) -> FloatArray:
    """Sums of what stands before each."""
    sums: FloatArray = np.cumsum(times) - times
    return sums
