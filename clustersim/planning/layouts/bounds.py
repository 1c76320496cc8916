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
from clustersim.planning.layouts.pass_times import PRODUCTS_OF, STREAMING_OF, Passes, own
from clustersim.scenario.resolved import ResolvedScenario
from clustersim.schedules.breadth_first import BreadthFirst
from clustersim.schedules.gpipe import GPipe
from clustersim.schedules.interleaved import Interleaved
from clustersim.schedules.one_f_one_b import OneFOneB

_WHOLE: Final = (OneFOneB, GPipe, Interleaved, BreadthFirst)  # backward is not in halves
_LESS: Final = 1.0 - 1e-9  # sums are not added up in the order of the simulation


@dataclass(frozen=True, slots=True)
class Least:
    """Seconds of a step at least, and in which GPUs run products and other kernels at least, the mean over them."""

    seconds: Seconds
    products: Seconds = 0.0
    streaming: Seconds = 0.0


def lower_bound(setup: ResolvedScenario) -> Least:
    """What no simulation of the setup's step undercuts."""
    if setup.jitter is not None:
        return Least(0.0)
    plan = build_plan(setup)
    passes, many = Passes(plan, setup), plan.microbatches
    whole, alone = isinstance(setup.effective_schedule, _WHOLE), setup.steps == 1
    forward, both = passes.forward, passes.forward + passes.backward  # [stages, uses] seconds of a microbatch
    there, work = own(forward), own(both)  # [stages]
    back = own(passes.backward) if whole else passes.going_back
    before, behind = _before(there), _before(back)  # [stages] in all stages before each
    found = []
    for rank in range(plan.layout.pp):
        held = list(plan.placement.stages_on_rank(rank))
        around = before[min(held)] + (behind[min(held)] if whole else 0.0)
        busy = work[held].sum() + passes.slowed(both[held].sum(axis=0))
        found.append(many * busy + (around if alone else 0.0))
    if alone:
        found += (before + many * (there + back) + behind).tolist()
    kernels = many * both.sum(axis=0) / plan.layout.pp
    return Least(*(float(item) * _LESS for item in (max(found), kernels[PRODUCTS_OF], kernels[STREAMING_OF])))


def _before(times: FloatArray) -> FloatArray:
    """Sums of what stands before each."""
    sums: FloatArray = np.cumsum(times) - times
    return sums
