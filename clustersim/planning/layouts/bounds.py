"""How long does a step take at least? A lower bound from pass times, without simulation.

With pass times (`pass_times`) f forward and b backward, of m microbatches:

- a pipeline rank does all passes of its stages, after one microbatch has passed all stages before its first
  one, and before the last one goes back through these: with p equal stages of 1F1B (p - 1)(f + b) + m (f +
  b);
- a stage does its own passes, after one microbatch has passed all stages before it, and before the last one
  goes back through these: with few microbatches and many stages this bound is higher.

A split backward propagates by its input gradients alone, and weight gradients may fill the waiting time.
Over several sites the links between them bound a step, too (`site_bounds`).

There is no bound if kernels vary (jitter); of several consecutive steps only a rank's compute counts, as
steps overlap.
"""

from dataclasses import dataclass
from typing import Final

import numpy as np

from clustersim.build import build_plan
from clustersim.common.arrays import FloatArray
from clustersim.common.units import Seconds
from clustersim.planning.layouts.pass_times import (
    MATMUL_INDEX,
    MEMORY_BOUND_INDEX,
    cached_pass_times,
    exclusive_seconds,
)
from clustersim.planning.layouts.site_bounds import PassSeconds, site_lower_bound
from clustersim.scenario.resolved import ResolvedScenario

_ROUNDING_MARGIN: Final = 1.0 - 1e-9  # sums are not accumulated in the order of the simulation


@dataclass(frozen=True, slots=True)
class StepLowerBound:
    """Lower bounds in seconds: of a step, and of mean GPU time in matmuls and in memory-bound kernels."""

    seconds: Seconds
    matmul_seconds: Seconds = 0.0
    memory_bound_seconds: Seconds = 0.0


def step_lower_bound(resolved: ResolvedScenario) -> StepLowerBound:
    """Lower bound of the simulated step time."""
    if resolved.jitter is not None:
        return StepLowerBound(0.0)
    plan = build_plan(resolved)
    pass_times, microbatches = cached_pass_times(plan, resolved), plan.microbatches
    unsplit_backward, is_single_step = (
        resolved.effective_schedule.has_whole_backwards,
        resolved.steps == 1,
    )
    forward, both = (
        pass_times.forward,
        pass_times.forward + pass_times.backward,
    )  # [stages, uses] seconds per microbatch
    forward_seconds, total_seconds = exclusive_seconds(forward), exclusive_seconds(both)  # [stages]
    backward_seconds = exclusive_seconds(pass_times.backward) if unsplit_backward else pass_times.propagation_seconds
    fill_seconds, drain_seconds = (
        _exclusive_cumsum(forward_seconds),
        _exclusive_cumsum(backward_seconds),
    )  # [stages] seconds in all stages before each
    bounds = []
    for rank in range(plan.layout.pp):
        stages = list(plan.placement.stages_on_rank(rank))
        ramp_seconds = fill_seconds[min(stages)] + (drain_seconds[min(stages)] if unsplit_backward else 0.0)
        busy_seconds = total_seconds[stages].sum() + pass_times.slowdown_seconds(both[stages].sum(axis=0))
        bounds.append(microbatches * busy_seconds + (ramp_seconds if is_single_step else 0.0))
    if is_single_step:
        bounds += (fill_seconds + microbatches * (forward_seconds + backward_seconds) + drain_seconds).tolist()
        bounds.append(site_lower_bound(resolved, plan, PassSeconds(forward_seconds, backward_seconds)))
    kernel_seconds = microbatches * both.sum(axis=0) / plan.layout.pp
    return StepLowerBound(
        *(
            float(bound) * _ROUNDING_MARGIN
            for bound in (max(bounds), kernel_seconds[MATMUL_INDEX], kernel_seconds[MEMORY_BOUND_INDEX])
        )
    )


def _exclusive_cumsum(times: FloatArray) -> FloatArray:
    """Exclusive cumulative sums."""
    sums: FloatArray = np.cumsum(times) - times
    return sums
