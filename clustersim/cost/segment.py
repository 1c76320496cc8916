"""How long does a block of operations take, and when does each operation inside it run?

Operations of a block run back to back, so their offsets are running sums. A block is timed for one rank, because ranks
may have different machines, and exchanges of different groups may differ; ranks for which all of this is equal share a
timing.

A kernel that runs beside an exchange of its own block (`Overlap`) is slowed by it while both run, and slows it.

The host launches a block's kernels and collectives while earlier ones run; where it is late, the GPU waits
(`cost.host_launch`).
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Final, TypeVar

import numpy as np

from clustersim.common.arrays import FloatArray, IntArray
from clustersim.common.units import Seconds
from clustersim.cost.device_models import Machine, Machines
from clustersim.cost.imbalanced_kernels import LoadedKernels
from clustersim.cost.interference import CLASSES, Paces, class_of
from clustersim.cost.timing import Bound, ExchangeCost, ExchangeTiming, Provenance, Timing
from clustersim.model.kernels import Kernel, KernelKind
from clustersim.program.program import Program
from clustersim.program.task import CollectiveType, CommOp, CommOverlap, Operation, Segment, Stream
from clustersim.symmetry.labels import label_rows, pair_labels

_Some = TypeVar("_Some", float, FloatArray)
"""Seconds of one kernel, or of many."""


@dataclass(frozen=True, slots=True)
class SideBySide:
    """A kernel and an exchange that are one operation (`Overlap`).

    exchange: seconds that it takes alone; interference, hindrance: the parts by which the kernel and the exchange take
    longer while both run. So whoever ends first has been slowed all the time, the other for as long.
    """

    overlap: CommOverlap
    exchange: Seconds
    interference: float
    hindrance: float = 0.0

    def slowed(self, kernel: Seconds, exchange: Seconds) -> Seconds:
        """By how much an exchange of so many seconds slows a kernel: until either ends."""
        return self._slowed(kernel, exchange, min)

    def moves(self, kernel: Seconds, exchange: Seconds) -> Seconds:
        """How long an exchange moves data that takes so many seconds alone, beside a kernel."""
        return exchange + self._hindered(kernel, exchange, min)

    def runs(self, kernel: Seconds, exchange: Seconds) -> Seconds:
        """How long a kernel runs beside an exchange of so many seconds; what is left of `of` is exposed."""
        return kernel + self.slowed(kernel, exchange)

    def seconds(self, kernels: FloatArray) -> FloatArray:
        """How long each of some kernels and the exchange take, from what they take alone: any shape."""
        return self._both(kernels, self.exchange, np.minimum, np.maximum)

    def of(self, kernel: Seconds, exchange: Seconds) -> Seconds:
        """`seconds` of one kernel, beside an exchange that takes so long."""
        return self._both(kernel, exchange, min, max)

    def _slowed(self, kernel: _Some, exchange: Seconds, least: Callable[[_Some, Any], _Some]) -> _Some:
        longest = exchange * (1.0 + self.hindrance)
        return least(kernel * self.interference, longest * self.interference / (1.0 + self.interference))

    def _hindered(self, kernel: _Some, exchange: Seconds, least: Callable[[_Some, Any], _Some]) -> _Some:
        longest = kernel * (1.0 + self.interference)
        return least(longest * self.hindrance / (1.0 + self.hindrance), exchange * self.hindrance)

    def _both(
        self,
        kernel: _Some,
        exchange: Seconds,
        least: Callable[[_Some, Any], _Some],
        most: Callable[[_Some, Any], _Some],
    ) -> _Some:
        runs = kernel + self._slowed(kernel, exchange, least)
        moves = exchange + self._hindered(kernel, exchange, least) if self.hindrance else exchange
        chunks = self.overlap.chunk_count
        if self.overlap.is_ring:
            return most(runs, moves + runs / chunks)
        return most(runs, moves) + least(runs, moves) / chunks


@dataclass(frozen=True, slots=True)
class BlockTiming:
    """Timing of every operation of a block, in the block's order.

    durations: [operations] seconds; offsets: [operations + 1] seconds from the block's start, their running sum;
    exposed: [operations] the part of each that is communication not hidden by a kernel (all of an exchange's time,
    none of a kernel's); slowed: [operations] the part by which an exchange of the same operation slows its kernel;
    launching: [operations] the part of each kernel's time in which the GPU waits for the host;
    together: operations that are a kernel and an exchange side by side, by place; provenance, bound, error, longer: one
    per operation.
    """

    durations: tuple[Seconds, ...]
    offsets: FloatArray
    exposed: FloatArray
    slowed: FloatArray
    launching: FloatArray
    together: Mapping[int, SideBySide]
    provenance: tuple[Provenance, ...]
    bound: tuple[Bound, ...]
    error: tuple[float | None, ...]
    longer: tuple[float, ...]

    @property
    def seconds(self) -> Seconds:
        """Duration of the whole block."""
        return float(self.offsets[-1])

    @property
    def kernels(self) -> FloatArray:
        """[operations] what the kernels of each take alone, launched by their host."""
        return np.array(self.durations) - self.exposed - self.slowed

    def rest(self, kernels: FloatArray) -> FloatArray:
        """What operations last longer than their kernels, where these take other times: [.., operations] both."""
        rest = self.exposed + self.slowed
        if self.together:
            rest = np.broadcast_to(rest, kernels.shape).copy()
        for place, both in self.together.items():
            kernel = kernels[..., place]
            rest[..., place] = both.seconds(kernel) - kernel
        return rest


class BlockCost:
    """Times blocks and exchanges for the ranks of one program."""

    def __init__(self, program: Program, machines: Machines, exchanges: ExchangeCost) -> None:
        self.program = program
        self.machines = machines
        self._exchanges = exchanges
        self._rows = program.group_indices
        self._loads = [np.unique(factor, return_inverse=True)[1].reshape(-1) for factor in program.expert_loads.factors]
        self._first: dict[Segment, Segment] = {}
        self._alike: dict[tuple[int, ...], Segment] = {}
        self._numbers: dict[Segment, IntArray] = {}
        self._timings: dict[tuple[Segment, int], BlockTiming] = {}
        self._operations: dict[tuple[int, int], _Timed] = {}
        self._kernels: dict[tuple[int, int], Timing] = {}
        self._loaded = [LoadedKernels(kind.kernels) for kind in machines.kinds]
        outside = (exchange.collective for rank_program in program.programs for exchange in rank_program.task_comm_ops)
        together = any(Stream.EP in item.streams for item in program.programs)
        self._paces = Paces([kind.interference for kind in machines.kinds], dict.fromkeys(outside), together=together)
        self._slowings: dict[tuple[Segment, int], FloatArray] = {}
        self._speeds: dict[tuple[int, Segment, CollectiveType], float] = {}

    def __getstate__(self) -> dict[str, Any]:
        """Without what is known by identities, which are others elsewhere."""
        return {**vars(self), "_alike": {}, "_operations": {}, "_kernels": {}}

    def block(self, rank: int, block: Segment) -> BlockTiming:
        """Timing of a block on one rank."""
        block = self._first_of(block)
        key = block, int(self.numbers(block)[rank])
        if key not in self._timings:
            self._time(rank, block)
        return self._timings[key]

    def _first_of(self, block: Segment) -> Segment:
        """The first block that was asked for with the same operations: it is timed for all of them.

        Operations are told by their identity: layers share them, and to compare them takes longer than to time them.
        """
        known = self._first.get(block)
        if known is None:
            key = block.interleaved, *map(id, block.operations)
            known = self._first[block] = self._alike.setdefault(key, block)
        return known

    def numbers(self, block: Segment) -> IntArray:
        """[ranks] ranks with equal numbers share the block's timing."""
        block = self._first_of(block)
        known = self._numbers.get(block)
        if known is None:
            known = self._numbers[block] = self._numbered(block)
        return known

    @property
    def apart(self) -> IntArray:
        """[ranks] ranks with equal numbers have equal machines, and equal loads."""
        return (
            pair_labels(self.machines.of, label_rows(np.stack(self._loads, axis=1)))
            if self._loads
            else self.machines.of
        )

    def _numbered(self, block: Segment) -> IntArray:
        numbers = self.machines.of
        for load in dict.fromkeys(distinct_operation.load_index for distinct_operation in block.distinct_operations):
            if load is not None:
                numbers = pair_labels(numbers, self._loads[load])
        for exchange in block.distinct_comm_ops:
            seconds = self._exchanges.exchange(exchange).seconds
            if (seconds == seconds[0]).all():
                continue
            speeds = np.unique(seconds, return_inverse=True)[1].reshape(-1)[self._rows[exchange.comm_group]]
            numbers = np.unique(numbers * (len(seconds) + 1) + speeds, return_inverse=True)[1].reshape(-1)
        return numbers

    def exchange(self, rank: int, exchange: CommOp) -> Timing:
        """Duration of an exchange in the group of one rank (its first member, for pairs)."""
        timing = self._exchanges.exchange(exchange)
        row = self._rows[exchange.comm_group][rank]
        return Timing(float(timing.seconds[row]), timing.provenance, timing.bound, timing.error)

    def exchange_timing(self, exchange: CommOp) -> ExchangeTiming:
        """Duration of an exchange in every group of its role."""
        return self._exchanges.exchange(exchange)

    def exchange_seconds(self, ranks: IntArray, exchange: CommOp) -> FloatArray:
        """Seconds of an exchange in the group of each of some ranks (their first members, for pairs)."""
        seconds: FloatArray = self._exchanges.exchange(exchange).seconds[self._rows[exchange.comm_group][ranks]]
        return seconds

    def pace(self, exchange: CommOp) -> int:
        """At which pace kernels go while a collective of the data stream is beside them; 0 is alone."""
        return self._paces.number(exchange.collective)

    def pace_of_both(self, first: int, second: int) -> int:
        """At which pace kernels go beside two collectives of different streams; 0 is none."""
        return self._paces.both(first, second)

    def slowing(self, rank: int, block: Segment) -> FloatArray:
        """The part by which kernels of a rank's block take longer at each pace from 1 on: [paces - 1, operations]."""
        block, machine = self._first_of(block), int(self.machines.of[rank])
        known = self._slowings.get((block, machine))
        if known is None:
            kernels = (distinct_operation.kernel for distinct_operation in block.distinct_operations)
            places = np.array([0 if kernel is None else _PLACES[kernel.kind] for kernel in kernels], dtype=np.int64)
            rows = np.array([row[machine] for row in self._paces.rows], dtype=np.float64).reshape(-1, len(CLASSES))
            known = self._slowings[block, machine] = rows[:, places[block.operation_index]]
        return known

    @cached_property
    def hinders(self) -> bool:
        """Whether kernels slow any collective of the data stream."""
        tables = [kind.interference.collectives for kind in self.machines.kinds]
        return any(
            table[kind, kernel_class] > 0.0
            for table in tables
            for kind in self._paces.kinds
            for kernel_class in CLASSES
        )

    def speed(self, rank: int, block: Segment, exchange: CommOp) -> float:
        """At which part of its own pace a collective goes beside a rank's block, on average over all of that."""
        key = int(self.numbers(block)[rank]), block, exchange.collective
        if key not in self._speeds:
            self._speeds[key] = self._speed(rank, block, exchange)
        return self._speeds[key]

    def _speed(self, rank: int, block: Segment, exchange: CommOp) -> float:
        timing, table = self.block(rank, block), self._machine(rank).interference.collectives
        kernels = timing.kernels * (1.0 + self.slowing(rank, block)[self.pace(exchange) - 1])
        rest = timing.rest(timing.kernels)
        kinds = (
            KernelKind.MATMUL if operation.kernel is None else operation.kernel.kind for operation in block.operations
        )
        longer = np.array([table[exchange.collective, class_of(kind)] for kind in kinds])
        whole = float((kernels + rest).sum())
        return float((kernels / (1.0 + longer) + rest).sum()) / whole if whole > 0.0 else 1.0

    def slows(self, ranks: IntArray) -> bool:
        """Whether a collective of the data stream slows any kernel of these ranks."""
        machines = np.unique(self.machines.of[ranks]).tolist()
        return any(part > 0.0 for row in self._paces.rows for machine in machines for part in row[machine])

    def _machine(self, rank: int) -> Machine:
        return self.machines.kinds[int(self.machines.of[rank])]

    def _time(self, rank: int, block: Segment) -> None:
        """Time a block on a rank, and where ranks have unlike loads on all of equal machines, since most will ask."""
        numbers, machine = self.numbers(block), int(self.machines.of[rank])
        ranks = [rank]
        if any(distinct_operation.load_index is not None for distinct_operation in block.distinct_operations):
            same = np.flatnonzero(self.machines.of == machine)
            ranks = same[np.unique(numbers[same], return_index=True)[1]].tolist()
        parts = [self._parts(item, block) for item in ranks]
        seconds = np.stack([element.seconds for element in parts])
        waits = self.machines.kinds[machine].launching.waits(block, seconds)
        for entry, part, own, launching in zip(ranks, parts, seconds, waits, strict=True):
            self._timings[block, int(numbers[entry])] = part.timing(own, launching)

    def _parts(self, rank: int, block: Segment) -> "_Parts":
        return _Parts(
            [self._operation(rank, operation) for operation in block.distinct_operations], block.operation_index
        )

    def _operation(self, rank: int, operation: Operation) -> "_Timed":
        """An operation of the program's on a rank, remembered by its identity: blocks share many of them."""
        key = rank, id(operation)
        known = self._operations.get(key)
        if known is None:
            known = self._operations[key] = self._time_operation(rank, operation)
        return known

    def _time_operation(self, rank: int, operation: Operation) -> "_Timed":
        machine = int(self.machines.of[rank])
        match operation.body:
            case CommOp() as exchange:
                timing = self.exchange(rank, exchange)
                return timing, (timing.seconds, 0.0), None
            case CommOverlap() as overlap:
                return self._overlapped(rank, overlap)
            case kernel if operation.load_index is not None:
                rows = float(self.program.expert_loads.factors[operation.load_index, rank])
                return self._loaded[machine].kernel(kernel, rows), _ALL_KERNEL, None
            case kernel:
                return self._kernel(machine, kernel), _ALL_KERNEL, None

    def _kernel(self, machine: int, kernel: Kernel) -> Timing:
        """A kernel of the program's, remembered by its identity: to hash it takes longer."""
        key = machine, id(kernel)
        known = self._kernels.get(key)
        if known is None:
            known = self._kernels[key] = self.machines.kinds[machine].kernels.kernel(kernel)
        return known

    def _overlapped(self, rank: int, overlap: CommOverlap) -> "_Timed":
        """Timing of a kernel and an exchange side by side."""
        machine, exchange = self._machine(rank), self.exchange(rank, overlap.comm_op)
        kernel = _in_pieces(machine, overlap.kernel, overlap.chunk_count)
        pair = overlap.comm_op.collective, class_of(overlap.kernel.kind)
        slowing = machine.interference
        both = SideBySide(overlap, exchange.seconds, slowing.kernels[pair], slowing.collectives[pair])
        slowed = both.slowed(kernel.seconds, exchange.seconds)
        seconds = both.of(kernel.seconds, exchange.seconds)
        moves = both.moves(kernel.seconds, exchange.seconds)
        longer = exchange if moves > kernel.seconds + slowed else kernel
        return replace(longer, seconds=seconds), (seconds - kernel.seconds - slowed, slowed), both


_Timed = tuple[Timing, tuple[Seconds, Seconds], SideBySide | None]
"""An operation on one rank: its timing, of it exposed communication and what that slows, and both if they are two."""
_ALL_KERNEL: Final = 0.0, 0.0
"""Nothing of it is communication."""
_PLACES: Final = {kind: CLASSES.index(class_of(kind)) for kind in KernelKind}
"""The place of each kind's class."""


@dataclass(frozen=True, slots=True)
class _Parts:
    """A block's operations on one rank. timed: the different ones; which: [operations] of these each is."""

    timed: list[_Timed]
    which: IntArray

    @property
    def seconds(self) -> FloatArray:
        """[operations] seconds of each."""
        return np.array([timing.seconds for timing, _, _ in self.timed], dtype=np.float64)[self.which]

    def timing(self, seconds: FloatArray, launching: FloatArray) -> BlockTiming:
        """Put together; seconds: those of each; launching: [operations], as `BlockTiming` has it."""
        durations, which = (seconds + launching).tolist(), self.which.tolist()
        parts = np.array([part for _, part, _ in self.timed], dtype=np.float64).reshape(-1, 2)[self.which]
        timings = [self.timed[number][0] for number in which]
        return BlockTiming(
            durations=tuple(durations),
            offsets=np.concatenate(([0.0], np.cumsum(durations))),
            exposed=parts[:, 0],
            slowed=parts[:, 1],
            launching=launching,
            together=self._together(which),
            provenance=tuple([timing.provenance for timing in timings]),
            bound=tuple([timing.bottleneck for timing in timings]),
            error=tuple([timing.error for timing in timings]),
            longer=tuple([timing.in_situ_slowdown for timing in timings]),
        )

    def _together(self, which: list[int]) -> dict[int, SideBySide]:
        """Operations that are two, by their place."""
        there = {number: both for number, (_, _, both) in enumerate(self.timed) if both is not None}
        return {place: there[number] for place, number in enumerate(which) if number in there} if there else {}


def _in_pieces(machine: Machine, kernel: Kernel, chunks: float) -> Timing:
    """A kernel that is run in so many pieces, one after the other; in one where it need not be cut."""
    if math.isinf(chunks):
        return machine.kernels.kernel(kernel)
    pieces = int(chunks)
    timing = machine.kernels.kernel(kernel.piece(pieces))
    return replace(timing, seconds=timing.seconds * pieces)
