"""How many tokens are routed to each rank's experts?

Experts lie on the ranks of `ep` in order, so a rank holds a contiguous range of them, and the `etp` ranks
that an expert is sharded over share its tokens. Only the total of a rank matters: within it, tokens are
assumed to be spread evenly over its experts. Experts with a capacity process that many tokens, whatever the
routing, so there all ranks are equal.
"""

from collections.abc import Iterator

import numpy as np

from clustersim.common.arrays import FloatArray
from clustersim.model.moe_expert_load import ExpertLoad
from clustersim.parallel.mesh import EXPERT
from clustersim.parallel.plan import Plan
from clustersim.program.program import BALANCED_LOADS, ExpertLoads


def build_load_factors(plan: Plan, steps: int = 1) -> ExpertLoads:
    """Load factors of ranks by MoE layer, and by step where steps differ, indexed as `Plan.load_indices` has them."""
    load = plan.expert_load
    if load is None:
        return BALANCED_LOADS
    distinct_steps, ep_coordinates = steps if load.varies_by_step else 1, plan.layout.rank_coordinates(EXPERT)
    factors_by_layer = [
        factors[ep_coordinates] for step in range(distinct_steps) for factors in layer_load_factors(plan, load, step)
    ]
    return ExpertLoads(
        np.stack(factors_by_layer), loads_per_step=len(factors_by_layer) // distinct_steps if load.varies_by_step else 0
    )


def layer_load_factors(plan: Plan, load: ExpertLoad, step: int = 0) -> Iterator[FloatArray]:
    """For each layer with its own load: tokens of each expert-parallel rank relative to the mean, [ep]."""
    ep, moe_layers = plan.layout.ep, plan.model.moe_layers
    for layer_index, moe in enumerate(moe_layers if load.varies_by_layer else moe_layers[:1]):
        shares_by_rank = load.expert_shares(moe.experts, layer_index, step).reshape(ep, -1)
        yield shares_by_rank.sum(axis=1) * ep


def most_loaded_factor(plan: Plan, steps: int) -> float:
    """Tokens of the most loaded rank relative to the mean, averaged over the MoE layers of its stages; at least 1."""
    load = plan.expert_load
    if load is None:
        return 1.0
    factors_by_step = [
        list(layer_load_factors(plan, load, step)) for step in range(steps if load.varies_by_step else 1)
    ]
    indices_by_rank = [list(_rank_load_indices(plan, rank)) for rank in range(plan.layout.pp)]
    means = (
        np.mean([factors[index] for index in indices], axis=0)
        for factors in factors_by_step
        for indices in indices_by_rank
        if indices
    )
    return max(1.0, *(float(mean.max()) for mean in means))


def _rank_load_indices(plan: Plan, rank: int) -> Iterator[int]:
    """Load indices of the MoE layers on a pipeline rank."""
    for stage in plan.stages_on_rank(rank):
        yield from (index for index in plan.load_indices(stage) if index is not None)
