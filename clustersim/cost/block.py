"""How long does a block of operations take, and when does each operation inside it run?

Operations of a block run back to back, so their offsets are running sums. A block that holds exchanges is timed for
one rank, because exchanges of different groups may differ.
"""

import math
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from clustersim.cost.timing import Bound, ExchangeCost, ExchangeTiming, KernelCost, Provenance, Timing
from clustersim.program.program import Program
from clustersim.program.task import Block, Exchange, Operation, Overlap
from clustersim.units import Seconds
from clustersim.workload.kernels import Kernel

FloatArray = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class BlockTiming:
    """Timing of every operation of a block, in the block's order.

    durations: [operations] seconds; offsets: [operations + 1] seconds from the block's start, their running sum;
    exposed: [operations] the part of each that is communication not hidden by a kernel (all of an exchange's time,
    none of a kernel's); provenance, bound: one per operation.
    """

    durations: tuple[Seconds, ...]
    offsets: FloatArray
    exposed: FloatArray
    provenance: tuple[Provenance, ...]
    bound: tuple[Bound, ...]

    @property
    def seconds(self) -> Seconds:
        """Duration of the whole block."""
        return float(self.offsets[-1])


class BlockCost:
    """Times blocks and exchanges for the ranks of one program.

    A block's timing depends on the rank only through the groups that its exchanges run in; where all groups of those
    roles are equally fast, one timing serves every rank.
    """

    def __init__(self, program: Program, kernels: KernelCost, exchanges: ExchangeCost) -> None:
        self._kernels = kernels
        self._exchanges = exchanges
        self._rows = program.rows
        self._uniform: dict[Block, bool] = {}
        self._timings: dict[tuple[Block, int], BlockTiming] = {}

    def block(self, rank: int, block: Block) -> BlockTiming:
        """Timing of a block on one rank."""
        uniform = self._uniform.get(block)
        if uniform is None:
            uniform = self._uniform[block] = all(map(self._equal_groups, block.exchanges))
        key = (block, -1 if uniform else rank)
        timing = self._timings.get(key)
        if timing is None:
            timing = self._timings[key] = self._timed(rank, block)
        return timing

    def exchange(self, rank: int, exchange: Exchange) -> Timing:
        """Duration of an exchange in the group of one rank (its first member, for pairs)."""
        timing = self._exchanges.exchange(exchange)
        row = self._rows[exchange.group][rank]
        return Timing(float(timing.seconds[row]), timing.provenance, timing.bound)

    def exchange_timing(self, exchange: Exchange) -> ExchangeTiming:
        """Duration of an exchange in every group of its role."""
        return self._exchanges.exchange(exchange)

    def kernel(self, kernel: Kernel) -> Timing:
        """Duration of one kernel."""
        return self._kernels.kernel(kernel)

    def _equal_groups(self, exchange: Exchange) -> bool:
        seconds = self._exchanges.exchange(exchange).seconds
        return bool((seconds == seconds[0]).all())

    def _timed(self, rank: int, block: Block) -> BlockTiming:
        pieces = [self._operation(rank, operation) for operation in block.operations]
        durations = tuple(timing.seconds for timing, _ in pieces)
        return BlockTiming(
            durations=durations,
            offsets=np.concatenate(([0.0], np.cumsum(durations))),
            exposed=np.array([exposed for _, exposed in pieces]),
            provenance=tuple(timing.provenance for timing, _ in pieces),
            bound=tuple(timing.bound for timing, _ in pieces),
        )

    def _operation(self, rank: int, operation: Operation) -> tuple[Timing, Seconds]:
        """Timing of an operation, and how much of it is exposed communication."""
        match operation.does:
            case Exchange() as exchange:
                timing = self.exchange(rank, exchange)
                return timing, timing.seconds
            case Overlap(exchange, kernel, _) as overlap:
                return _overlapped(overlap, self._in_pieces(kernel, overlap.chunks), self.exchange(rank, exchange))
            case kernel:
                return self._kernels.kernel(kernel), 0.0

    def _in_pieces(self, kernel: Kernel, chunks: float) -> Timing:
        """A kernel that is run in so many pieces, one after the other; in one where it need not be cut."""
        if math.isinf(chunks):
            return self._kernels.kernel(kernel)
        pieces = int(chunks)
        timing = self._kernels.kernel(kernel.piece(pieces))
        return replace(timing, seconds=timing.seconds * pieces)


def _overlapped(overlap: Overlap, kernel: Timing, exchange: Timing) -> tuple[Timing, Seconds]:
    """Timing of a kernel and an exchange side by side, and how much of it is exposed communication."""
    longer = max(kernel, exchange, key=lambda timing: timing.seconds)
    if overlap.local:
        seconds = max(kernel.seconds, exchange.seconds + kernel.seconds / overlap.chunks)
    else:
        seconds = longer.seconds + min(kernel.seconds, exchange.seconds) / overlap.chunks
    return Timing(seconds, longer.provenance, longer.bound), seconds - kernel.seconds
