"""Where does every second of a rank's step go?

Every instant from 0 to the makespan gets exactly one part on every rank, by what its compute stream does: while it
runs a block, the operations of the block say it (kernels by why they run, communication that is not hidden by a
kernel by its axis), what its kernels last longer because of communication beside them is a part of its own, and what
it waits inside for other ranks is wait; what exchanges inside last longer because they share links counts as they do;
while a collective runs on the compute stream itself, it is exposed; while the stream stands still, `idle` says what
for. So the parts of a rank sum to the makespan (of several steps: to the mean step time). Communication on other
streams beside a running block is hidden and has no part, but for what it slows.
"""

from dataclasses import dataclass

import numpy as np

from clustersim.common.arrays import FloatArray, IntArray
from clustersim.common.units import Seconds
from clustersim.results.idle_time import Queue, compute_queue, idle_seconds
from clustersim.results.time_categories import PARTS, BlockParts, Part
from clustersim.results.trace_table import WHOLE, BlockRuns, Rows, Span, TimingOf, block_runs, timings
from clustersim.trace.trace import Trace


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
        """Seconds of every part on one rank, by the part's name; they sum to the step time."""
        return _named(self.seconds[np.searchsorted(self.ranks, self.representative[rank])])

    def mean(self) -> dict[str, Seconds]:
        """Seconds of every part, the mean over all ranks; they sum to the step time."""
        return _named(self._mean())

    def total(self, *parts: Part) -> Seconds:
        """Seconds of some parts together, the mean over all ranks."""
        return float(self._mean()[[part.place for part in parts]].sum())

    @property
    def launch_share(self) -> float:
        """The part of the step in which GPUs wait for kernel launches."""
        whole = sum(self.mean().values())
        return self.total(Part.LAUNCH) / whole if whole > 0 else 0.0

    def _mean(self) -> FloatArray:
        mean: FloatArray = self.weights @ self.seconds / self.weights.sum()
        return mean


def breakdown(rows: Rows, timing_of: TimingOf, span: Span = WHOLE) -> Breakdown:
    """Fold a trace into seconds per class and part of one step, the mean over steps.

    timing_of(rank, block): the block's timing on that rank; span: the part of the trace that counts.
    """
    trace, (since, until) = rows.trace, span
    queue = compute_queue(trace, rows)
    seconds = idle_seconds(trace, rows.program, rows, queue, span)
    row = np.flatnonzero((trace.start <= until) & (trace.end >= since))
    runs = block_runs(rows, row, np.clip(trace.end[row], *span) - np.clip(trace.start[row], *span))
    np.add.at(seconds, runs.owner, run_parts(rows, runs, timing_of))
    _add_exchanges(seconds, trace, rows, queue, span)
    return Breakdown(rows.ranks, seconds / rows.steps, rows.weights, trace.representative)


def run_parts(rows: Rows, runs: BlockRuns, timing_of: TimingOf) -> FloatArray:
    """Parts of the runs of every class and block: [pairs, parts], each row summing to its seconds.

    What neither exchanges nor waiting nor slowing explains is the kernels' own time, which jitter makes differ from
    what their timings say; it is divided among parts as they say. Runs that count in part do so evenly.
    """
    different, which = timings(rows, runs, timing_of)
    parts_of = {block: BlockParts.of(block) for block in rows.blocks}
    own_parts = [(parts_of[block].kernels(timing), parts_of[block].exchanges(timing)) for block, timing in different]
    kernels, moves = np.array(own_parts).reshape(-1, 2, len(PARTS))[which].swapaxes(0, 1)
    moves = moves * runs.runs[:, None]
    lost = runs.waited + runs.slowed + runs.exposed.sum(axis=1)
    own = np.maximum(runs.full - lost - moves.sum(axis=1), 0.0)
    parts = moves + runs.exposed + _spread(own, kernels)
    parts[:, Part.WAIT.place] += runs.waited
    parts[:, Part.SLOWED.place] += runs.slowed
    return _spread(runs.seconds, parts)


def _spread(seconds: FloatArray, parts: FloatArray) -> FloatArray:
    """Divide seconds in the proportion of parts: [pairs, parts]; where there are none, they are wait."""
    whole = parts.sum(axis=1)
    ratio = np.divide(parts, whole[:, None], out=np.zeros_like(parts), where=whole[:, None] > 0)
    ratio[whole <= 0, Part.WAIT.place] = 1.0
    divided: FloatArray = ratio * seconds[:, None]
    return divided


def _add_exchanges(seconds: FloatArray, trace: Trace, rows: Rows, queue: Queue, span: Span) -> None:
    entry = rows.entry[queue.row]
    chosen = rows.tasks.exchange[entry] >= 0
    row = queue.row[chosen]
    counted = np.clip(trace.end[row], *span) - np.clip(queue.start[chosen], *span)
    np.add.at(seconds, (rows.owner[row], rows.tasks.part[entry[chosen]]), counted)


def _named(seconds: FloatArray) -> dict[str, Seconds]:
    return {part.value: float(value) for part, value in zip(PARTS, seconds, strict=True)}
