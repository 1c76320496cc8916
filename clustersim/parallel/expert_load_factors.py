"""How many rows come to each rank's experts?

Experts lie on the ranks of `ep` in order, so a rank has the parts of a block of them, and those of `etp` that cut an
expert have its rows together. What counts is a rank's own: within it, rows are taken to be spread evenly over its
experts. Experts with a capacity take that many rows, whoever is chosen, so there all ranks have as many.
"""

from collections.abc import Iterator

import numpy as np

from clustersim.common.arrays import FloatArray
from clustersim.model.moe_expert_load import ExpertLoad
from clustersim.parallel.mesh import EXPERT
from clustersim.parallel.plan import Plan
from clustersim.program.program import BALANCED_LOADS, ExpertLoads


def loads_of(plan: Plan, steps: int = 1) -> ExpertLoads:
    """The loads of ranks by routed layer, and by step where steps differ, numbered as `Plan.load_number` has it."""
    load = plan.uneven
    if load is None:
        return BALANCED_LOADS
    times, place = steps if load.stepped else 1, plan.layout.coordinate(EXPERT)
    every = [factors[place] for step in range(times) for factors in factors_of(plan, load, step)]
    return ExpertLoads(np.stack(every), loads_per_step=len(every) // times if load.stepped else 0)


def factors_of(plan: Plan, load: ExpertLoad, step: int = 0) -> Iterator[FloatArray]:
    """Of each layer with a load of its own, rows of each expert-parallel rank over their mean: [ep] each."""
    ep, mixtures = plan.layout.ep, plan.model.routed
    for number, routed in enumerate(mixtures if load.layered else mixtures[:1]):
        blocks = load.shares(routed.experts, number, step).reshape(ep, -1)
        yield blocks.sum(axis=1) * ep


def hottest(plan: Plan, steps: int = 1) -> float:
    """Rows that come to the fullest rank over their mean, on average over the routed layers of its stages."""
    load = plan.uneven
    if load is None:
        return 1.0
    each = [list(factors_of(plan, load, step)) for step in range(steps if load.stepped else 1)]
    numbers = [list(_numbers(plan, rank)) for rank in range(plan.layout.pp)]
    means = (np.mean([factors[number] for number in own], axis=0) for factors in each for own in numbers if own)
    return max(1.0, *(float(mean.max()) for mean in means))


def _numbers(plan: Plan, rank: int) -> Iterator[int]:
    """The loads of the routed layers on a pipeline rank."""
    for stage in plan.stages_of(rank):
        yield from (number for number in plan.load_numbers(stage) if number is not None)
