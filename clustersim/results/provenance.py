"""On what do the answer's durations rest, and how far do they carry?

Every second in which a rank computes or moves data, hidden or not, on all ranks, is counted under the kernel or
exchange that it is spent on, with the provenance and the expected error of its duration; waiting (for other ranks, or
for the host to launch a kernel) has none. An overlapped kernel and exchange count under the longer of the two, as
timed.

A kernel that was timed by itself and takes longer within a step (`cost.sustained_rate`) is no better known than the factor
between the two, which was not measured: how much time that is, is counted apart.

Errors of one answer are taken to have one sign: they add up, so the band is wide rather than narrow.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from clustersim.common.arrays import FloatArray, IntArray
from clustersim.common.units import Seconds
from clustersim.cost.segment import SegmentTiming
from clustersim.cost.timing import LOCALLY_MEASURED, CommTiming, Provenance
from clustersim.model.kernels import Kernel
from clustersim.program.task import CommOp, CommOverlap, Segment
from clustersim.results.trace_table import WHOLE, Rows, Span, TimingOf, block_runs, timings
from clustersim.uncertainty.expected_error import Expectation

Work = Kernel | CommOp | CommOverlap


@dataclass(frozen=True, slots=True)
class Item:
    """All runs of one kernel or exchange whose durations have one source.

    error: the part by which they are expected to differ, None where nothing was measured; longer: how many times longer
    than by themselves they take in a step; seconds: on all ranks.
    """

    does: Work
    provenance: Provenance
    error: float | None
    longer: float
    seconds: Seconds


@dataclass(frozen=True, slots=True)
class InStep:
    """share: of the busy time that was measured on kernels alone, whose pace in a step was not; longer: than alone."""

    share: float
    longer: float


def items(
    rows: Rows, timing_of: TimingOf, exchange_timing: Callable[[CommOp], CommTiming], span: Span = WHOLE
) -> tuple[Item, ...]:
    """What the ranks do, longest first; span: when what counts begins."""
    start, (since, until) = rows.trace.start, span
    keys, row = _Keys(), np.flatnonzero((start >= since) & (start < until))
    found = (*_in_blocks(rows, row, timing_of, keys), *_exchanges(rows, row, exchange_timing, keys))
    which = np.concatenate([np.zeros(0, dtype=np.int64), *(number for number, _ in found)])
    seconds = np.bincount(which, np.concatenate([np.zeros(0), *(spent for _, spent in found)]), minlength=len(keys))
    every = (Item(*key, seconds=spent) for key, spent in zip(keys.numbers, seconds.tolist(), strict=True))
    return tuple(sorted(every, key=lambda item: -item.seconds))


def provenance_share(found: Iterable[Item]) -> dict[str, float]:
    """Share of busy seconds by provenance, summing to 1 (all zero if nothing took any time)."""
    seconds = dict.fromkeys(Provenance, 0.0)
    for item in found:
        seconds[item.provenance] += item.seconds
    whole = sum(seconds.values())
    return {kind.value: part / whole if whole > 0 else 0.0 for kind, part in seconds.items()}


def in_step(found: Sequence[Item]) -> InStep:
    """What was measured alone and takes longer within a step."""
    whole = sum(item.seconds for item in found)
    paced = [item for item in found if item.provenance in LOCALLY_MEASURED and item.longer != 1.0]
    seconds = sum(item.seconds for item in paced)
    alone = sum(item.seconds / item.longer for item in paced)
    return InStep(seconds / whole, seconds / alone) if paced else InStep(0.0, 1.0)


def expectation(found: Sequence[Item]) -> Expectation:
    """By how much the answer is expected to differ, as far as its sources know."""
    whole = sum(item.seconds for item in found)
    if whole <= 0:
        return Expectation(0.0, 1.0)
    known = sum(item.seconds * item.error for item in found if item.error is not None)
    unknown = sum(item.seconds for item in found if item.error is None)
    kernels = [(item.seconds, item.error) for item in found if item.error is not None and isinstance(item.does, Kernel)]
    spent, error = sum(seconds for seconds, _ in kernels), sum(seconds * element for seconds, element in kernels)
    return Expectation(known / whole, unknown / whole, spent / whole, error / whole)


_Key = tuple[Work, Provenance, float | None, float]
_Spent = tuple[IntArray, FloatArray]
"""[n] numbers of keys, which may come again, and the seconds that are spent on each."""


@dataclass(frozen=True, slots=True)
class _Keys:
    """Numbers of what is counted apart; known by identity, too, since it takes longer to hash kernels."""

    numbers: dict[_Key, int] = field(default_factory=dict)
    _known: dict[tuple[int, int, float | None, float], int] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.numbers)

    def of(self, key: _Key) -> int:
        """The number of one."""
        return self.numbers.setdefault(key, len(self.numbers))

    def of_block(self, block: Segment, timing: SegmentTiming) -> IntArray:
        """Those of the operations of a block: [operations]."""
        sources = zip(timing.provenance, timing.error, timing.in_situ_slowdown, strict=True)
        numbers: list[int] = []
        for operation, (source, error, longer) in zip(block.operations, sources, strict=True):
            place = id(operation.body), id(source), error, longer
            number = self._known.get(place)
            if number is None:
                number = self._known[place] = self.of((operation.body, source, error, longer))
            numbers.append(number)
        return np.array(numbers, dtype=np.int64)


def _in_blocks(rows: Rows, row: IntArray, timing_of: TimingOf, keys: _Keys) -> Iterator[_Spent]:
    trace = rows.trace
    runs = block_runs(rows, row, trace.end[row] - trace.start[row])
    different, which = timings(rows, runs, timing_of)
    times = np.bincount(which, runs.runs * rows.weights[runs.owner], minlength=len(different))
    for (block, timing), count in zip(different, times.tolist(), strict=True):
        yield keys.of_block(block, timing), (np.array(timing.durations) - timing.launch_stalls) * count


def _exchanges(
    rows: Rows, row: IntArray, exchange_timing: Callable[[CommOp], CommTiming], keys: _Keys
) -> Iterator[_Spent]:
    trace, exchange = rows.trace, rows.exchange
    chosen = row[exchange[row] >= 0]
    busy = (trace.end - trace.start)[chosen] * rows.weights[rows.owner[chosen]]
    timed = ((comm_op, exchange_timing(comm_op)) for comm_op in rows.exchanges)
    numbers = [keys.of((item, timing.provenance, timing.error, 1.0)) for item, timing in timed]
    seconds = np.bincount(exchange[chosen], busy, minlength=len(rows.exchanges)).astype(np.float64, copy=False)
    yield np.array(numbers, dtype=np.int64), seconds
