"""Which ranks do the others wait for?

A straggler's kernels take longer than those of the other ranks that run the same program, at least `MIN_EXCESS` longer than
their median; or its communication does, by at least `MIN_EXCESS` of the step: a NIC or a link on its way is slow. It waits
least, and who meets it (its tensor-parallel group in every layer, its pipeline in every microbatch, its replicas at the
end) waits for it. Where most ranks of a program are slow together, none is a straggler: then the pipeline waits, which
the breakdown calls bubble.

Communication counts as longer only as far as it moves longer: where a pipeline is late, more of its messages are
exposed, and more of the collectives of those who are early, though none is slow. Nor does it count where it is exposed
because kernels are faster. Jitter makes no stragglers: over the thousands of kernels of a step it evens out, and what
it costs is that everyone waits for the slowest of the moment.
Reference: Jiang et al. 2024 (MegaScale, arXiv:2402.15627) find slow hosts by comparing how long ranks compute.
"""

from dataclasses import dataclass
from typing import Final

import numpy as np

from clustersim.common.arrays import FloatArray, IntArray
from clustersim.common.units import Seconds
from clustersim.parallel.mesh import DATA, PIPELINE
from clustersim.program.task import Stream
from clustersim.results.time_breakdown import TimeBreakdown
from clustersim.results.time_categories import BUBBLE_CATEGORIES, EXPOSED_CATEGORIES, KERNEL_CATEGORIES, TimeCategory
from clustersim.trace.trace import Trace

MIN_EXCESS: Final = 0.01
"""Part of the median by which a straggler's kernels take longer at least, part of the step by which communication."""
MAX_STRAGGLERS: Final = 8
"""Stragglers that are named: ranks of one class count as one."""
_IN_LAYER_CATEGORIES: Final = tuple(part for axis, part in EXPOSED_CATEGORIES.items() if axis.within_layer)
_TRANSFER_STREAMS: Final = ((Stream.DP, EXPOSED_CATEGORIES[DATA]), (Stream.RECEIVE, EXPOSED_CATEGORIES[PIPELINE]))
_WAIT_CATEGORIES: Final = (*BUBBLE_CATEGORIES, TimeCategory.WAIT)
_ROUNDING: Final = 1e-9  # of the step: what sums of times are off by


@dataclass(frozen=True, slots=True)
class Straggler:
    """Ranks of one class that are slow.

    kind: their program; kernels, waits: seconds; excess: part of the median by which kernels take longer; delay:
    seconds by which exposed communication takes longer than the median, 0 where that is less than `MIN_EXCESS` of the step.
    """

    ranks: tuple[int, ...]
    program_index: int
    kernel_seconds: Seconds
    kernel_excess: float
    wait_seconds: Seconds
    comm_delay: Seconds = 0.0

    @property
    def has_slow_kernels(self) -> bool:
        """Whether its kernels take longer."""
        return self.kernel_excess >= MIN_EXCESS


@dataclass(frozen=True, slots=True)
class StragglerReport:
    """slowest: those that are slow, the slowest first, at most `MAX_STRAGGLERS`; ranks: how many ranks are slow in all."""

    slowest: tuple[Straggler, ...]
    rank_count: int

    @property
    def listed_ranks(self) -> set[int]:
        """The ranks of those that are named."""
        return {rank for straggler in self.slowest for rank in straggler.ranks}


@dataclass(frozen=True, slots=True)
class WaitTimes:
    """Seconds in which the ranks of each program wait for others, bubbles included: [kinds] each."""

    minimum: FloatArray
    mean: FloatArray
    maximum: FloatArray

    @property
    def max_range(self) -> Seconds:
        """By how much ranks of one program differ at most."""
        return float((self.maximum - self.minimum).max(initial=0.0))


def transfer_seconds(trace: Trace, step_count: int = 1) -> FloatArray:
    """How long a step's collectives beside kernels and received messages move on simulated ranks: [classes, 2]."""
    ranks = trace.simulated_ranks
    seconds = np.zeros((len(ranks), len(_TRANSFER_STREAMS)))
    for column, (stream, _) in enumerate(_TRANSFER_STREAMS):
        events = np.flatnonzero(trace.stream == stream)
        np.add.at(
            seconds[:, column], np.searchsorted(ranks, trace.rank[events]), trace.end[events] - trace.start[events]
        )
    return seconds / step_count


def find_stragglers(breakdown: TimeBreakdown, program_index: IntArray, transfers: FloatArray) -> StragglerReport:
    """The ranks that compute or communicate longest for what they do.

    kind: [ranks] which program each runs; moving: as by `transfer_seconds`.
    """
    class_of_rank = np.searchsorted(breakdown.ranks, breakdown.representative)
    class_program = program_index[breakdown.ranks]
    kernel_seconds, wait_seconds = _category_seconds(breakdown, KERNEL_CATEGORIES), _wait_seconds(breakdown)
    medians = _program_medians(kernel_seconds, program_index, class_of_rank)[class_program]
    excess = np.divide(kernel_seconds, medians, out=np.ones(len(kernel_seconds)), where=medians > 0) - 1.0
    delay = _comm_delays(breakdown, program_index, transfers)
    slow_classes = np.flatnonzero((excess >= MIN_EXCESS) | (delay > 0))
    excess_seconds = np.maximum(kernel_seconds - medians, 0.0) + delay
    order = np.lexsort(
        (
            breakdown.ranks[slow_classes],
            -np.round(excess_seconds[slow_classes] / breakdown.seconds.sum(axis=1)[slow_classes], 6),
        )
    )
    slowest = tuple(
        Straggler(
            tuple(np.flatnonzero(class_of_rank == item).tolist()), int(class_program[item]), float(kernel_seconds[item]), float(excess[item]),
            float(wait_seconds[item]), float(delay[item]),
        )
        for item in slow_classes[order][:MAX_STRAGGLERS].tolist()
    )  # fmt: skip
    return StragglerReport(slowest, int(breakdown.weights[slow_classes].sum()))


def slowest_ranks(breakdown: TimeBreakdown, program_index: IntArray, report: StragglerReport, count: int) -> list[int]:
    """Stragglers first, then by how much longer a rank's kernels take than the median of its program."""
    class_of_rank, kernel_seconds = (
        np.searchsorted(breakdown.ranks, breakdown.representative),
        _category_seconds(breakdown, KERNEL_CATEGORIES),
    )
    position = np.full(len(program_index), len(report.slowest))
    for index, straggler in enumerate(report.slowest):
        position[list(straggler.ranks)] = index
    excess_seconds = (
        kernel_seconds[class_of_rank] - _program_medians(kernel_seconds, program_index, class_of_rank)[program_index]
    )
    shares = np.round(excess_seconds / breakdown.seconds.sum(axis=1)[class_of_rank], 9)  # rounding is no difference
    order: list[int] = np.lexsort((np.arange(len(program_index)), -shares, position)).tolist()
    return order[:count]


def compute_wait_times(breakdown: TimeBreakdown, program_index: IntArray) -> WaitTimes:
    """How long the ranks of each program wait. kind: [ranks] which program each runs."""
    waits = _wait_seconds(breakdown)[np.searchsorted(breakdown.ranks, breakdown.representative)]
    by_program = [waits[program_index == index] for index in range(int(program_index.max()) + 1)]
    minimum, mean, maximum = (np.array([fold(item) for item in by_program]) for fold in (np.min, np.mean, np.max))
    return WaitTimes(minimum, mean, maximum)


def _comm_delays(breakdown: TimeBreakdown, program_index: IntArray, transfers: FloatArray) -> FloatArray:
    """By how much exposed communication of every class takes longer than is usual, where it is much: [classes]."""
    class_of_rank, class_program = (
        np.searchsorted(breakdown.ranks, breakdown.representative),
        program_index[breakdown.ranks],
    )

    def excess_seconds(seconds: FloatArray) -> FloatArray:
        above: FloatArray = np.maximum(
            seconds - _program_medians(seconds, program_index, class_of_rank)[class_program], 0.0
        )
        return above

    delay = excess_seconds(_category_seconds(breakdown, _IN_LAYER_CATEGORIES))
    for column, (_, category) in enumerate(_TRANSFER_STREAMS):
        delay += np.minimum(
            excess_seconds(_category_seconds(breakdown, (category,))), excess_seconds(transfers[:, column])
        )
    delay = np.minimum(
        delay, excess_seconds(_category_seconds(breakdown, (*KERNEL_CATEGORIES, *EXPOSED_CATEGORIES.values())))
    )
    return np.where(delay >= MIN_EXCESS * breakdown.seconds.sum(axis=1), delay, 0.0)


def _wait_seconds(breakdown: TimeBreakdown) -> FloatArray:
    """Seconds in which every class waits, none where that is only rounding: [classes]."""
    waits = _category_seconds(breakdown, _WAIT_CATEGORIES)
    return np.where(waits > _ROUNDING * breakdown.seconds.sum(axis=1), waits, 0.0)


def _category_seconds(breakdown: TimeBreakdown, categories: tuple[TimeCategory, ...]) -> FloatArray:
    """Seconds of some parts together: [classes]."""
    total: FloatArray = breakdown.seconds[:, [category.index for category in categories]].sum(axis=1)
    return total


def _program_medians(seconds: FloatArray, program_index: IntArray, class_of_rank: IntArray) -> FloatArray:
    """The median over the ranks of each program: [kinds]. seconds: [classes]; owner: [ranks] the class of each."""
    rank_seconds = [seconds[class_of_rank[program_index == index]] for index in range(int(program_index.max()) + 1)]
    return np.array([float(np.median(item)) if len(item) else 0.0 for item in rank_seconds])
