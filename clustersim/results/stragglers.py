"""Stragglers: which ranks do the others wait for?

A straggler's kernels take longer than those of the other ranks that run the same program, by at least
`MIN_EXCESS` of their median; or its communication does, by at least `MIN_EXCESS` of the step: a NIC or a
link on its path is slow. It waits least, and the ranks that synchronize with it (its tensor-parallel group
in every layer, its pipeline in every microbatch, its replicas at the end) wait for it. Where most ranks of
a program are slow together, none is a straggler: then the pipeline waits, which the breakdown calls bubble.

Communication counts as slower only as far as its transfers take longer: in a late pipeline more of its
messages are exposed, and more of the collectives of early ranks, though none is slow. Nor does it count
where it is exposed because kernels are faster. Jitter makes no stragglers: it averages out over the
thousands of kernels of a step, and its cost is that everyone waits for the momentarily slowest rank.
Reference: Jiang et al. 2024 (MegaScale, arXiv:2402.15627) find slow hosts by comparing ranks' compute
times.
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
"""Minimum excess of a straggler's kernels (fraction of the median) or communication (fraction of the step)."""
MAX_STRAGGLERS: Final = 8
"""Maximum number of stragglers that are listed: ranks of one class count as one."""
_IN_LAYER_CATEGORIES: Final = tuple(category for axis, category in EXPOSED_CATEGORIES.items() if axis.within_layer)
_TRANSFER_STREAMS: Final = ((Stream.DP, EXPOSED_CATEGORIES[DATA]), (Stream.RECEIVE, EXPOSED_CATEGORIES[PIPELINE]))
_WAIT_CATEGORIES: Final = (*BUBBLE_CATEGORIES, TimeCategory.WAIT)
_ROUNDING: Final = 1e-9  # fraction of the step: rounding error of sums of times


@dataclass(frozen=True, slots=True)
class Straggler:
    """Ranks of one class that are slow.

    program_index: their program; kernel_seconds, wait_seconds; kernel_excess: relative excess of the kernel
    time over the median; comm_delay: seconds by which exposed communication exceeds the median, 0 below
    `MIN_EXCESS` of the step.
    """

    ranks: tuple[int, ...]
    program_index: int
    kernel_seconds: Seconds
    kernel_excess: float
    wait_seconds: Seconds
    comm_delay: Seconds = 0.0

    @property
    def has_slow_kernels(self) -> bool:
        """Whether its kernels are slow."""
        return self.kernel_excess >= MIN_EXCESS


@dataclass(frozen=True, slots=True)
class StragglerReport:
    """slowest: slow classes, slowest first, at most `MAX_STRAGGLERS`; rank_count: number of all slow ranks."""

    slowest: tuple[Straggler, ...]
    rank_count: int

    @property
    def listed_ranks(self) -> set[int]:
        """Ranks of the listed stragglers."""
        return {rank for straggler in self.slowest for rank in straggler.ranks}


@dataclass(frozen=True, slots=True)
class WaitTimes:
    """Seconds in which the ranks of each program wait for others, bubbles included: [programs] each."""

    minimum: FloatArray
    mean: FloatArray
    maximum: FloatArray

    @property
    def max_range(self) -> Seconds:
        """Largest difference between ranks of one program."""
        return float((self.maximum - self.minimum).max(initial=0.0))


def transfer_seconds(trace: Trace, step_count: int = 1) -> FloatArray:
    """Seconds per step in which DP collectives and received messages are in flight on simulated ranks: [classes, 2]."""
    ranks = trace.simulated_ranks
    seconds = np.zeros((len(ranks), len(_TRANSFER_STREAMS)))
    for column, (stream, _) in enumerate(_TRANSFER_STREAMS):
        events = np.flatnonzero(trace.stream == stream)
        np.add.at(
            seconds[:, column], np.searchsorted(ranks, trace.rank[events]), trace.end[events] - trace.start[events]
        )
    return seconds / step_count


def find_stragglers(breakdown: TimeBreakdown, program_index: IntArray, transfers: FloatArray) -> StragglerReport:
    """The ranks with the slowest kernels or communication relative to their program.

    program_index: [ranks] program of each; transfers: as from `transfer_seconds`.
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
            tuple(np.flatnonzero(class_of_rank == slow_class).tolist()),
            int(class_program[slow_class]),
            float(kernel_seconds[slow_class]),
            float(excess[slow_class]),
            float(wait_seconds[slow_class]),
            float(delay[slow_class]),
        )
        for slow_class in slow_classes[order][:MAX_STRAGGLERS].tolist()
    )
    return StragglerReport(slowest, int(breakdown.weights[slow_classes].sum()))


def slowest_ranks(breakdown: TimeBreakdown, program_index: IntArray, report: StragglerReport, count: int) -> list[int]:
    """Stragglers first, then ranks by the excess of their kernel time over the median of their program."""
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
    shares = np.round(
        excess_seconds / breakdown.seconds.sum(axis=1)[class_of_rank], 9
    )  # so that rounding does not decide
    order: list[int] = np.lexsort((np.arange(len(program_index)), -shares, position)).tolist()
    return order[:count]


def compute_wait_times(breakdown: TimeBreakdown, program_index: IntArray) -> WaitTimes:
    """Wait times of the ranks of each program. program_index: [ranks] program of each."""
    waits = _wait_seconds(breakdown)[np.searchsorted(breakdown.ranks, breakdown.representative)]
    by_program = [waits[program_index == index] for index in range(int(program_index.max()) + 1)]
    minimum, mean, maximum = (np.array([fold(waits) for waits in by_program]) for fold in (np.min, np.mean, np.max))
    return WaitTimes(minimum, mean, maximum)


def _comm_delays(breakdown: TimeBreakdown, program_index: IntArray, transfers: FloatArray) -> FloatArray:
    """Seconds by which exposed communication of every class exceeds the median, where significant: [classes]."""
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
    """Seconds in which every class waits, 0 where that is only rounding: [classes]."""
    waits = _category_seconds(breakdown, _WAIT_CATEGORIES)
    return np.where(waits > _ROUNDING * breakdown.seconds.sum(axis=1), waits, 0.0)


def _category_seconds(breakdown: TimeBreakdown, categories: tuple[TimeCategory, ...]) -> FloatArray:
    """Total seconds of some categories: [classes]."""
    total: FloatArray = breakdown.seconds[:, [category.index for category in categories]].sum(axis=1)
    return total


def _program_medians(seconds: FloatArray, program_index: IntArray, class_of_rank: IntArray) -> FloatArray:
    """Median over the ranks of each program: [programs].

    seconds: [classes]; class_of_rank: [ranks] class of each.
    """
    rank_seconds = [seconds[class_of_rank[program_index == index]] for index in range(int(program_index.max()) + 1)]
    return np.array([float(np.median(seconds)) if len(seconds) else 0.0 for seconds in rank_seconds])
