"""How long do the operations of each task take on each rank, with its own jitter?"""

import numpy as np

from clustersim.common.arrays import FloatArray
from clustersim.cost.jitter import Jitter
from clustersim.cost.segment import BlockCost, BlockTiming
from clustersim.engine.scalar.fluid_action import Paces, paces
from clustersim.program.program import Program, RankProgram
from clustersim.program.task import Block


class BlockPaces:
    """Paces of blocks; without jitter, ranks that share a block's timing share them (so they are on equal machines)."""

    def __init__(self, program: Program, cost: BlockCost, jitter: Jitter | None) -> None:
        self._program, self._cost, self._jitter = program, cost, jitter
        self._known: dict[int, tuple[BlockTiming, Paces]] = {}
        self._alone: dict[tuple[int, int], tuple[BlockTiming, Paces]] = {}
        self._factors: dict[int, FloatArray] = {}

    def of(self, rank: int, number: int, block: Block) -> Paces:
        """Paces of the block of task `number` of a rank."""
        timing = self._cost.block(rank, block)
        known = self._known.get(id(timing))
        if known is None or self._jitter is not None:
            kernels = self._kernels(rank, number, timing)
            known = timing, paces(kernels, timing.rest(kernels), self._cost.slowing(rank, block))
            self._known[id(timing)] = known
        return known[1]

    def kernel(self, rank: int, number: int, block: Block, place: int) -> Paces:
        """Paces of the kernel alone of one operation of the block."""
        timing, slowing = self._cost.block(rank, block), self._cost.slowing(rank, block)
        if self._jitter is not None:
            return _of_one(self._kernels(rank, number, timing), place, slowing)
        known = self._alone.get((id(timing), place))
        if known is None:
            known = self._alone[id(timing), place] = timing, _of_one(timing.kernels, place, slowing)
        return known[1]

    def _kernels(self, rank: int, number: int, timing: BlockTiming) -> FloatArray:
        """Seconds of the kernels of task `number`: [operations]."""
        if self._jitter is None:
            return timing.kernels
        first = self._program_of(rank).operations_before[number]
        return timing.kernels * self._drawn(self._jitter, rank)[first : first + len(timing.durations)]

    def _drawn(self, jitter: Jitter, rank: int) -> FloatArray:
        """Factors of all operations of a rank's blocks, in the order in which it runs them."""
        if rank not in self._factors:
            self._factors[rank] = jitter.factors(rank, self._program_of(rank).operations_before[-1])
        return self._factors[rank]

    def _program_of(self, rank: int) -> RankProgram:
        return self._program.programs[int(self._program.kind[rank])]


def _of_one(kernels: FloatArray, place: int, slowing: FloatArray) -> Paces:
    return paces(kernels[place : place + 1], np.zeros(1), slowing[:, place : place + 1])
