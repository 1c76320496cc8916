"""Which ranks do the others wait for?

A straggler's kernels take longer than those of the other ranks that run the same program, at least `LEAST` longer than
their median; or its communication does, by at least `LEAST` of the step: a NIC or a link on its way is slow. It waits
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
from clustersim.results.time_breakdown import Breakdown
from clustersim.results.time_categories import BUBBLES, EXPOSED, KERNELS, Part
from clustersim.trace.trace import Trace

LEAST: Final = 0.01
"""Part of the median by which a straggler's kernels take longer at least, part of the step by which communication."""
MOST: Final = 8
"""Stragglers that are named: ranks of one class count as one."""
_INSIDE: Final = tuple(part for axis, part in EXPOSED.items() if axis.within_layer)
_MOVING: Final = ((Stream.DP, EXPOSED[DATA]), (Stream.RECEIVE, EXPOSED[PIPELINE]))
_WAITS: Final = (*BUBBLES, Part.WAIT)
_ROUNDING: Final = 1e-9  # of the step: what sums of times are off by


@dataclass(frozen=True, slots=True)
class Straggler:
    """Ranks of one class that are slow.

    kind: their program; kernels, waits: seconds; excess: part of the median by which kernels take longer; delay:
    seconds by which exposed communication takes longer than the median, 0 where that is less than `LEAST` of the step.
    """

    ranks: tuple[int, ...]
    kind: int
    kernels: Seconds
    excess: float
    waits: Seconds
    delay: Seconds = 0.0

    @property
    def computes_slowly(self) -> bool:
        """Whether its kernels take longer."""
        return self.excess >= LEAST


@dataclass(frozen=True, slots=True)
class Stragglers:
    """slowest: those that are slow, the slowest first, at most `MOST`; ranks: how many ranks are slow in all."""

    slowest: tuple[Straggler, ...]
    ranks: int

    @property
    def named(self) -> set[int]:
        """The ranks of those that are named."""
        return {rank for straggler in self.slowest for rank in straggler.ranks}


@dataclass(frozen=True, slots=True)
class Waits:
    """Seconds in which the ranks of each program wait for others, bubbles included: [kinds] each."""

    least: FloatArray
    mean: FloatArray
    most: FloatArray

    @property
    def spread(self) -> Seconds:
        """By how much ranks of one program differ at most."""
        return float((self.most - self.least).max(initial=0.0))


def moving_seconds(trace: Trace, steps: int = 1) -> FloatArray:
    """How long a step's collectives beside kernels and received messages move on simulated ranks: [classes, 2]."""
    ranks = trace.simulated_ranks
    seconds = np.zeros((len(ranks), len(_MOVING)))
    for column, (stream, _) in enumerate(_MOVING):
        rows = np.flatnonzero(trace.stream == stream)
        np.add.at(seconds[:, column], np.searchsorted(ranks, trace.rank[rows]), trace.end[rows] - trace.start[rows])
    return seconds / steps


def find_stragglers(parts: Breakdown, kind: IntArray, moving: FloatArray) -> Stragglers:
    """The ranks that compute or communicate longest for what they do.

    kind: [ranks] which program each runs; moving: as by `moving_seconds`.
    """
    owner = np.searchsorted(parts.ranks, parts.representative)
    of = kind[parts.ranks]
    kernels, waits = _seconds(parts, KERNELS), _waits(parts)
    medians = _medians(kernels, kind, owner)[of]
    excess = np.divide(kernels, medians, out=np.ones(len(kernels)), where=medians > 0) - 1.0
    delay = _delays(parts, kind, moving)
    slow = np.flatnonzero((excess >= LEAST) | (delay > 0))
    longer = np.maximum(kernels - medians, 0.0) + delay
    order = np.lexsort((parts.ranks[slow], -np.round(longer[slow] / parts.seconds.sum(axis=1)[slow], 6)))
    slowest = tuple(
        Straggler(
            tuple(np.flatnonzero(owner == item).tolist()), int(of[item]), float(kernels[item]), float(excess[item]),
            float(waits[item]), float(delay[item]),
        )
        for item in slow[order][:MOST].tolist()
    )  # fmt: skip
    return Stragglers(slowest, int(parts.weights[slow].sum()))


def slowest_ranks(parts: Breakdown, kind: IntArray, stragglers: Stragglers, count: int) -> list[int]:
    """Stragglers first, then by how much longer a rank's kernels take than the median of its program."""
    owner, kernels = np.searchsorted(parts.ranks, parts.representative), _seconds(parts, KERNELS)
    place = np.full(len(kind), len(stragglers.slowest))
    for number, straggler in enumerate(stragglers.slowest):
        place[list(straggler.ranks)] = number
    longer = kernels[owner] - _medians(kernels, kind, owner)[kind]
    shares = np.round(longer / parts.seconds.sum(axis=1)[owner], 9)  # rounding is no difference
    order: list[int] = np.lexsort((np.arange(len(kind)), -shares, place)).tolist()
    return order[:count]


def find_waits(parts: Breakdown, kind: IntArray) -> Waits:
    """How long the ranks of each program wait. kind: [ranks] which program each runs."""
    waits = _waits(parts)[np.searchsorted(parts.ranks, parts.representative)]
    by_kind = [waits[kind == index] for index in range(int(kind.max()) + 1)]
    least, mean, most = (np.array([fold(item) for item in by_kind]) for fold in (np.min, np.mean, np.max))
    return Waits(least, mean, most)


def _delays(parts: Breakdown, kind: IntArray, moving: FloatArray) -> FloatArray:
    """By how much exposed communication of every class takes longer than is usual, where it is much: [classes]."""
    owner, of = np.searchsorted(parts.ranks, parts.representative), kind[parts.ranks]

    def longer(seconds: FloatArray) -> FloatArray:
        above: FloatArray = np.maximum(seconds - _medians(seconds, kind, owner)[of], 0.0)
        return above

    delay = longer(_seconds(parts, _INSIDE))
    for column, (_, part) in enumerate(_MOVING):
        delay += np.minimum(longer(_seconds(parts, (part,))), longer(moving[:, column]))
    delay = np.minimum(delay, longer(_seconds(parts, (*KERNELS, *EXPOSED.values()))))
    return np.where(delay >= LEAST * parts.seconds.sum(axis=1), delay, 0.0)


def _waits(parts: Breakdown) -> FloatArray:
    """Seconds in which every class waits, none where that is only rounding: [classes]."""
    waits = _seconds(parts, _WAITS)
    return np.where(waits > _ROUNDING * parts.seconds.sum(axis=1), waits, 0.0)


def _seconds(parts: Breakdown, which: tuple[Part, ...]) -> FloatArray:
    """Seconds of some parts together: [classes]."""
    together: FloatArray = parts.seconds[:, [part.place for part in which]].sum(axis=1)
    return together


def _medians(seconds: FloatArray, kind: IntArray, owner: IntArray) -> FloatArray:
    """The median over the ranks of each program: [kinds]. seconds: [classes]; owner: [ranks] the class of each."""
    of_ranks = [seconds[owner[kind == index]] for index in range(int(kind.max()) + 1)]
    return np.array([float(np.median(of_rank)) if len(of_rank) else 0.0 for of_rank in of_ranks])
