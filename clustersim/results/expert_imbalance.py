"""Whose experts get the most rows?

Of each layer the fullest rank sets the pace where results meet; over all layers of a rank one may be full here and
another there. So both are told: how full the fullest is on average over layers, and which rank is fullest over all of
its own.
"""

from dataclasses import dataclass

import numpy as np

from clustersim.common.arrays import FloatArray, IntArray
from clustersim.program.program import Program, RankProgram
from clustersim.program.task import ComputeTask


@dataclass(frozen=True, slots=True)
class MostLoadedExpertRank:
    """layer: rows of a layer's fullest rank over the mean, averaged over layers; rank, rows: the fullest of all."""

    layer_max_ratio: float
    rank: int
    rank_ratio: float


def most_loaded_expert_rank(program: Program) -> MostLoadedExpertRank | None:
    """The fullest rank of a program; None where ranks have equal loads."""
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
    """The loads that a rank meets, each once."""
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
