"""On what do the answer's durations rest?

Every second in which a rank computes or moves data, hidden or not, on all ranks, is counted under the provenance of
its duration; waiting has none. An overlapped kernel and exchange count under the longer of the two, as timed.
"""

from collections.abc import Callable

import numpy as np

from clustersim.analysis.rows import FloatArray, Rows, TimingOf, block_runs, timings
from clustersim.cost.block import BlockTiming
from clustersim.cost.timing import Provenance
from clustersim.program.task import Exchange
from clustersim.trace.store import Trace

_KINDS = tuple(Provenance)


def provenance_share(
    rows: Rows,
    timing_of: TimingOf,
    exchange_provenance: Callable[[Exchange], Provenance],
) -> dict[str, float]:
    """Share of busy seconds by provenance, summing to 1 (all zero if nothing took any time)."""
    seconds = _block_seconds(rows.trace, rows, timing_of) + _exchange_seconds(rows.trace, rows, exchange_provenance)
    whole = float(seconds.sum())
    return {kind.value: float(part) / whole if whole > 0 else 0.0 for kind, part in zip(_KINDS, seconds, strict=True)}


def _block_seconds(trace: Trace, rows: Rows, timing_of: TimingOf) -> FloatArray:
    runs = block_runs(rows, np.arange(len(trace)), trace.end - trace.start)
    different, which = timings(rows, runs, timing_of)
    times = np.bincount(which, runs.runs * rows.weights[runs.owner], minlength=len(different))
    seconds = np.zeros(len(_KINDS))
    for (_, timing), count in zip(different, times.tolist(), strict=True):
        seconds += _by_provenance(timing) * count
    return seconds


def _by_provenance(timing: BlockTiming) -> FloatArray:
    seconds = np.zeros(len(_KINDS))
    for provenance, duration in zip(timing.provenance, timing.durations, strict=True):
        seconds[_KINDS.index(provenance)] += duration
    return seconds


def _exchange_seconds(trace: Trace, rows: Rows, exchange_provenance: Callable[[Exchange], Provenance]) -> FloatArray:
    places = np.array([_KINDS.index(exchange_provenance(exchange)) for exchange in rows.exchanges], dtype=np.int64)
    exchange = rows.exchange
    chosen = exchange >= 0
    busy = (trace.end - trace.start)[chosen] * rows.weights[rows.owner[chosen]]
    seconds = np.zeros(len(_KINDS))
    np.add.at(seconds, places[exchange[chosen]], busy)
    return seconds
