"""Expert load imbalance: which ranks' experts get the most tokens?

In each layer the most loaded rank determines when outputs are combined; summed over the layers of a rank,
loads partly even out. So both are reported: the maximum load per layer, averaged over layers, and the rank
with the highest mean load over its layers.
"""

from dataclasses import dataclass

import numpy as np

from clustersim.common.arrays import FloatArray, IntArray
from clustersim.program.program import Program, RankProgram
from clustersim.program.task import ComputeTask


@dataclass(frozen=True, slots=True)
class MostLoadedExpertRank:
    """Expert imbalance, as ratios of tokens to the mean.

    layer_max_ratio: of a layer's most loaded rank, averaged over layers; rank, rank_ratio: the rank with the
    highest mean load over its layers, and that load.
    """

    layer_max_ratio: float
    rank: int
    rank_ratio: float


def most_loaded_expert_rank(program: Program) -> MostLoadedExpertRank | None:
    """The most loaded rank of a program; None where loads are balanced."""
    factors = program.expert_loads.factors
    if not len(factors):
        return None
    load_ratios = np.ones(program.world_size)
    for program_index, rank_program in enumerate(program.programs):
        ranks, load_indices = np.flatnonzero(program.program_index == program_index), _load_indices(rank_program)
        if len(load_indices):
            load_ratios[ranks] = _mean_factors(factors, load_indices, ranks)
    rank = int(load_ratios.argmax())
    return MostLoadedExpertRank(float(factors.max(axis=1).mean()), rank, float(load_ratios[rank]))


def _load_indices(program: RankProgram) -> IntArray:
    """Distinct load indices of a rank's operations."""
    segments = dict.fromkeys(task.segment for task in program.tasks if isinstance(task, ComputeTask))
    indices = {
        operation.load_index
        for segment in segments
        for operation in segment.operations
        if operation.load_index is not None
    }
    return np.array(sorted(indices), dtype=np.int64)


def _mean_factors(factors: FloatArray, load_indices: IntArray, ranks: IntArray) -> FloatArray:
    mean: FloatArray = factors[np.ix_(load_indices, ranks)].mean(axis=0)
    return mean
