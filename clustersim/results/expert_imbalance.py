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
class FullestRank:
    """layer: rows of a layer's fullest rank over the mean, averaged over layers; rank, rows: the fullest of all."""

    layer: float
    rank: int
    rows: float


def fullest_rank(program: Program) -> FullestRank | None:
    """The fullest rank of a program; None where ranks have equal loads."""
    factors = program.expert_loads.factors
    if not len(factors):
        return None
    rows = np.ones(program.world_size)
    for kind, rank_program in enumerate(program.programs):
        own, numbers = np.flatnonzero(program.program_index == kind), _numbers(rank_program)
        if len(numbers):
            rows[own] = _mean(factors, numbers, own)
    rank = int(rows.argmax())
    return FullestRank(float(factors.max(axis=1).mean()), rank, float(rows[rank]))


def _numbers(program: RankProgram) -> IntArray:
    """The loads that a rank meets, each once."""
    blocks = dict.fromkeys(task.segment for task in program.tasks if isinstance(task, ComputeTask))
    found = {
        operation.load_index for block in blocks for operation in block.operations if operation.load_index is not None
    }
    return np.array(sorted(found), dtype=np.int64)


def _mean(factors: FloatArray, numbers: IntArray, ranks: IntArray) -> FloatArray:
    mean: FloatArray = factors[np.ix_(numbers, ranks)].mean(axis=0)
    return mean
