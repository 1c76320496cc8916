"""What does a rank hold and move while it runs? Curves that a trace shows beside its spans.

Memory held is the ledger's, which follows the first step. What links carry is not kept by a simulation; known is what
the rank's own messages and collectives of data parallelism ask of them: the payload of each over the time that it
takes, as if it moved evenly. A collective's payload is the whole buffer, as nccl-tests count it, so this is its
algorithm bandwidth; what tensor parallelism exchanges inside passes is not in it.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from clustersim.answer import Answer
from clustersim.arrays import FloatArray, IntArray
from clustersim.program.task import Compute, Stream
from clustersim.report.export.ranks import TraceRank
from clustersim.report.export.spans import nanoseconds
from clustersim.units import format_bytes

RATES: Final = (
    ("data parallel collectives: payload per second", (Stream.DATA,)),
    ("tokens to and from experts beside computation: payload per second", (Stream.EXPERTS,)),
    ("messages sent to other stages: bytes per second", (Stream.SEND_NEXT, Stream.SEND_PREVIOUS)),
    ("messages received from other stages: bytes per second", (Stream.RECEIVE,)),
    ("copies to the host: bytes per second", (Stream.TO_HOST,)),
    ("copies from the host: bytes per second", (Stream.FROM_HOST,)),
)
_BYTES: Final = {"unit": "UNIT_SIZE_BYTES"}
_PER_SECOND: Final = {"unit_name": "bytes/s"}


@dataclass(frozen=True, slots=True)
class Counter:
    """A curve of a rank. unit: in Perfetto's words; times: [n] nanoseconds, ascending; values: [n] from then on."""

    name: str
    unit: Mapping[str, str]
    times: IntArray
    values: FloatArray


def counters(result: Answer, ranks: Sequence[TraceRank]) -> Iterator[tuple[TraceRank, Counter]]:
    """The curves of every rank that is written."""
    rates = {number: [*_rates(result, number)] for number in {rank.simulated for rank in ranks}}
    for rank in ranks:
        for counter in (_memory(result, rank.rank), *rates[rank.simulated]):
            yield rank, counter


def _memory(result: Answer, rank: int) -> Counter:
    """What the allocator holds beyond activations does not change; it rounds up what it holds by a part."""
    place = min(int(result.program.kind[rank]), len(result.ledgers) - 1)
    ledger = result.ledgers[place]
    held = ledger.peak - (ledger.peak_activations - ledger.activations) * ledger.fragmentation
    empty = ledger.peak - ledger.peak_activations * ledger.fragmentation
    step = "memory held in the first step" if result.scenario.steps > 1 else "memory held"
    name = f"{step}, of {format_bytes(result.capacities[place])}"
    times = nanoseconds(np.append(0.0, ledger.times))
    return Counter(name, _BYTES, *_last(times, np.append(empty, held)))


def _rates(result: Answer, rank: int) -> Iterator[Counter]:
    trace = result.trace
    mine = np.flatnonzero(trace.rank == rank)
    tasks = result.program.programs[int(result.program.kind[rank])].tasks
    payload = np.array([0.0 if isinstance(task, Compute) else task.exchange.payload for task in tasks])
    for name, streams in RATES:
        rows = mine[np.isin(trace.stream[mine], streams) & (trace.end[mine] > trace.start[mine])]
        if len(rows):
            rate = payload[trace.task[rows]] / (trace.end[rows] - trace.start[rows])
            yield Counter(name, _PER_SECOND, *_sum(nanoseconds(trace.start[rows]), nanoseconds(trace.end[rows]), rate))


def _sum(start: IntArray, end: IntArray, rate: FloatArray) -> tuple[IntArray, FloatArray]:
    """The sum of rates that each last from a start to an end; exactly nothing where none does."""
    times = np.concatenate((start, end))
    order = np.argsort(times, kind="stable")
    running = np.cumsum(np.concatenate((np.ones(len(start)), -np.ones(len(end))))[order])
    value = np.where(running > 0, np.cumsum(np.concatenate((rate, -rate))[order]), 0.0)
    return _last(times[order], value)


def _last(times: IntArray, values: FloatArray) -> tuple[IntArray, FloatArray]:
    """Of several values at one time the last."""
    last = np.append(times[1:] != times[:-1], True)
    return times[last], values[last]
