"""How long does a block of operations take, and when does each operation inside it run?

Operations of a block run back to back, so their offsets are running sums. A block is timed for one rank, because ranks
may have different machines, and exchanges of different groups may differ; ranks for which all of this is equal share a
timing.

A kernel that runs beside an exchange of its own block (`Overlap`) is slowed by it while both run.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

import numpy as np
from numpy.typing import NDArray

from clustersim.cost.machines import Machine, Machines
from clustersim.cost.timing import Bound, ExchangeCost, ExchangeTiming, Provenance, Timing
from clustersim.program.program import Program
from clustersim.program.task import Block, Exchange, Operation, Overlap
from clustersim.units import Seconds
from clustersim.workload.kernels import Kernel

FloatArray = NDArray[np.float64]
IntArray = NDArray[np.int64]

NOTHING: Final = Timing(0.0, Provenance.ROOFLINE, Bound.LATENCY)


@dataclass(frozen=True, slots=True)
class BlockTiming:
    """Timing of every operation of a block, in the block's order.

    durations: [operations] seconds; offsets: [operations + 1] seconds from the block's start, their running sum;
    exposed: [operations] the part of each that is communication not hidden by a kernel (all of an exchange's time,
    none of a kernel's); slowed: [operations] the part by which an exchange of the same operation slows its kernel;
    provenance, bound: one per operation.
    """

    durations: tuple[Seconds, ...]
    offsets: FloatArray
    exposed: FloatArray
    slowed: FloatArray
    provenance: tuple[Provenance, ...]
    bound: tuple[Bound, ...]

    @property
    def seconds(self) -> Seconds:
        """Duration of the whole block."""
        return float(self.offsets[-1])

    @property
    def kernels(self) -> FloatArray:
        """[operations] what the kernels of each take alone."""
        return np.array(self.durations) - self.exposed - self.slowed


class BlockCost:
    """Times blocks and exchanges for the ranks of one program."""

    def __init__(self, program: Program, machines: Machines, exchanges: ExchangeCost) -> None:
        self.program = program
        self.machines = machines
        self._exchanges = exchanges
        self._rows = program.rows
        self._numbers: dict[Block, IntArray] = {}
        self._timings: dict[tuple[Block, int], BlockTiming] = {}

    def block(self, rank: int, block: Block) -> BlockTiming:
        """Timing of a block on one rank."""
        number = int(self.numbers(block)[rank])
        timing = self._timings.get((block, number))
        if timing is None:
            timing = self._timings[block, number] = self._timed(rank, block)
        return timing

    def numbers(self, block: Block) -> IntArray:
        """[ranks] ranks with equal numbers share the block's timing."""
        known = self._numbers.get(block)
        if known is None:
            known = self._numbers[block] = self._numbered(block)
        return known

    def _numbered(self, block: Block) -> IntArray:
        numbers = self.machines.of
        for exchange in dict.fromkeys(block.exchanges):
            seconds = self._exchanges.exchange(exchange).seconds
            if (seconds == seconds[0]).all():
                continue
            speeds = np.unique(seconds, return_inverse=True)[1].reshape(-1)[self._rows[exchange.group]]
            numbers = np.unique(numbers * (len(seconds) + 1) + speeds, return_inverse=True)[1].reshape(-1)
        return numbers

    def exchange(self, rank: int, exchange: Exchange) -> Timing:
        """Duration of an exchange in the group of one rank (its first member, for pairs)."""
        timing = self._exchanges.exchange(exchange)
        row = self._rows[exchange.group][rank]
        return Timing(float(timing.seconds[row]), timing.provenance, timing.bound)

    def exchange_timing(self, exchange: Exchange) -> ExchangeTiming:
        """Duration of an exchange in every group of its role."""
        return self._exchanges.exchange(exchange)

    def exchange_seconds(self, ranks: IntArray, exchange: Exchange) -> FloatArray:
        """Seconds of an exchange in the group of each of some ranks (their first members, for pairs)."""
        seconds: FloatArray = self._exchanges.exchange(exchange).seconds[self._rows[exchange.group][ranks]]
        return seconds

    def longer(self, rank: int, operation: Operation, seconds: Seconds) -> Seconds:
        """How much longer an operation of a rank takes if its exchange takes `seconds` instead of its own time."""
        if operation.exchange is None:
            return 0.0
        alone = self.exchange(rank, operation.exchange)
        usual = self._operation(rank, operation, alone)[0].seconds
        return self._operation(rank, operation, replace(alone, seconds=seconds))[0].seconds - usual

    def interference(self, rank: int) -> float:
        """The part by which kernels of a rank take longer beside a collective."""
        return self._machine(rank).interference

    def _machine(self, rank: int) -> Machine:
        return self.machines.kinds[int(self.machines.of[rank])]

    def _timed(self, rank: int, block: Block) -> BlockTiming:
        pieces = [self._operation(rank, each, self._exchange_of(rank, each)) for each in block.operations]
        return timing_of([timing for timing, _, _ in pieces], [part[1:] for part in pieces])

    def _exchange_of(self, rank: int, operation: Operation) -> Timing:
        """Duration of an operation's exchange, if it has one."""
        return NOTHING if operation.exchange is None else self.exchange(rank, operation.exchange)

    def _operation(self, rank: int, operation: Operation, beside: Timing) -> tuple[Timing, Seconds, Seconds]:
        """Timing of an operation whose exchange takes so long.

        Also how much of it is exposed communication, and by how much its kernel is slowed.
        """
        match operation.does:
            case Exchange():
                return beside, beside.seconds, 0.0
            case Overlap(_, kernel, chunks) as overlap:
                machine = self._machine(rank)
                alone = _in_pieces(machine, kernel, chunks)
                slowed = _beside(alone.seconds, beside.seconds, machine.interference)
                timing, exposed = _overlapped(overlap, replace(alone, seconds=alone.seconds + slowed), beside)
                return timing, exposed, slowed
            case kernel:
                return self._machine(rank).kernels.kernel(kernel), 0.0, 0.0


def timing_of(operations: Sequence[Timing], parts: Sequence[tuple[Seconds, Seconds]]) -> BlockTiming:
    """Put timings of operations together; parts: (exposed, slowed) of each."""
    durations = tuple(timing.seconds for timing in operations)
    exposed, slowed = np.array(parts, dtype=np.float64).reshape(-1, 2).T
    return BlockTiming(
        durations=durations,
        offsets=np.concatenate(([0.0], np.cumsum(durations))),
        exposed=exposed,
        slowed=slowed,
        provenance=tuple(timing.provenance for timing in operations),
        bound=tuple(timing.bound for timing in operations),
    )


def _in_pieces(machine: Machine, kernel: Kernel, chunks: float) -> Timing:
    """A kernel that is run in so many pieces, one after the other; in one where it need not be cut."""
    if math.isinf(chunks):
        return machine.kernels.kernel(kernel)
    pieces = int(chunks)
    timing = machine.kernels.kernel(kernel.piece(pieces))
    return replace(timing, seconds=timing.seconds * pieces)


def _beside(kernel: Seconds, exchange: Seconds, interference: float) -> Seconds:
    """By how much a kernel takes longer that starts together with an exchange: until either ends."""
    return min(kernel * interference, exchange * interference / (1.0 + interference))


def _overlapped(overlap: Overlap, kernel: Timing, exchange: Timing) -> tuple[Timing, Seconds]:
    """Timing of a kernel and an exchange side by side, and how much of it is exposed communication."""
    longer = max(kernel, exchange, key=lambda timing: timing.seconds)
    if overlap.local:
        seconds = max(kernel.seconds, exchange.seconds + kernel.seconds / overlap.chunks)
    else:
        seconds = longer.seconds + min(kernel.seconds, exchange.seconds) / overlap.chunks
    return Timing(seconds, longer.provenance, longer.bound), seconds - kernel.seconds
