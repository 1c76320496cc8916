"""Where does every second of a rank's step go?

Every instant from 0 to the makespan gets exactly one part on every rank, by what its compute stream does: while it
runs a block, the operations of the block say it (kernels by why they run, communication that is not hidden by a
kernel by its axis); what a block lasts longer than its own time is waiting inside it for other ranks, so wait; while
a collective runs on the compute stream itself, it is exposed; while the stream stands still, `idle` says what for.
So the parts of a rank sum to the makespan. Communication on other streams beside a running block is hidden: it costs
the step nothing and has no part.
"""

from dataclasses import dataclass

import numpy as np

from clustersim.analysis.idle import Queue, compute_queue, idle_seconds
from clustersim.analysis.parts import PARTS, Part, block_parts
from clustersim.analysis.rows import BlockRuns, FloatArray, IntArray, Rows, TimingOf, block_runs
from clustersim.trace.store import Trace
from clustersim.units import Seconds

_ROUNDING = 1e-9  # relative: differences of timestamps are not exact


@dataclass(frozen=True, slots=True)
class Breakdown:
    """Seconds of every class of ranks and part.

    ranks: [classes] the simulated ranks; seconds: [classes, parts]; weights: [classes] how many ranks each stands for;
    representative: [ranks] which simulated rank stands for each rank.
    """

    ranks: IntArray
    seconds: FloatArray
    weights: IntArray
    representative: IntArray

    def of(self, rank: int) -> dict[str, Seconds]:
        """Seconds of every part on one rank, by the part's name; they sum to the makespan."""
        return _named(self.seconds[np.searchsorted(self.ranks, self.representative[rank])])

    def mean(self) -> dict[str, Seconds]:
        """Seconds of every part, the mean over all ranks; they sum to the makespan."""
        return _named(self._mean())

    def total(self, *parts: Part) -> Seconds:
        """Seconds of some parts together, the mean over all ranks."""
        return float(self._mean()[[part.place for part in parts]].sum())

    def _mean(self) -> FloatArray:
        mean: FloatArray = self.weights @ self.seconds / self.weights.sum()
        return mean


def breakdown(rows: Rows, timing_of: TimingOf) -> Breakdown:
    """Fold a trace into seconds per class and part. timing_of(rank, block): the block's timing on that rank."""
    trace = rows.trace
    queue = compute_queue(trace, rows)
    seconds = idle_seconds(trace, rows.program, rows, queue)
    runs = block_runs(rows, np.arange(len(trace)), trace.end - trace.start)
    np.add.at(seconds, runs.owner, run_parts(rows, runs, timing_of))
    _add_exchanges(seconds, trace, rows, queue)
    return Breakdown(rows.ranks, seconds, rows.weights, trace.representative)


def run_parts(rows: Rows, runs: BlockRuns, timing_of: TimingOf) -> FloatArray:
    """Parts of the runs of every class and block: [pairs, parts], each row summing to its seconds.

    What runs lasted longer than their block's own time is wait; a difference of rounding is spread.
    """
    parts = np.zeros((len(runs.owner), len(PARTS)))
    for pair, (owner, number) in enumerate(zip(runs.owner.tolist(), runs.block.tolist(), strict=True)):
        block = rows.blocks[number]
        parts[pair] = block_parts(block, timing_of(int(rows.ranks[owner]), block)) * runs.runs[pair]
    own = parts.sum(axis=1)
    spread = (own > 0) & (runs.seconds <= own * (1 + _ROUNDING))
    parts[spread] *= (runs.seconds[spread] / own[spread])[:, None]
    parts[~spread, Part.WAIT.place] += (runs.seconds - own)[~spread]
    return parts


def _add_exchanges(seconds: FloatArray, trace: Trace, rows: Rows, queue: Queue) -> None:
    chosen = rows.exchange[queue.row] >= 0
    row = queue.row[chosen]
    np.add.at(seconds, (rows.owner[row], rows.part[row]), trace.end[row] - queue.start[chosen])


def _named(seconds: FloatArray) -> dict[str, Seconds]:
    return {part.value: float(value) for part, value in zip(PARTS, seconds, strict=True)}
