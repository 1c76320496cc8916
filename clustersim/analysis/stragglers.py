"""Which ranks do the others wait for?

A straggler's kernels take longer than those of the other ranks that run the same program: at least `LEAST` longer than
their median. It waits least, and who meets it (its tensor-parallel group in every layer, its pipeline in every
microbatch, its replicas at the end) waits for it. Where most ranks of a program are slow together, none is a straggler:
then the pipeline waits, which the breakdown calls bubble.

Jitter makes no stragglers: over the thousands of kernels of a step it evens out, and what it costs is that everyone
waits for the slowest of the moment.
Reference: Jiang et al. 2024 (MegaScale, arXiv:2402.15627) find slow hosts by comparing how long ranks compute.
"""

from dataclasses import dataclass
from typing import Final

import numpy as np

from clustersim.analysis.breakdown import Breakdown
from clustersim.analysis.parts import BUBBLES, Part
from clustersim.analysis.rows import FloatArray, IntArray
from clustersim.units import Seconds

LEAST: Final = 0.01
"""Part of the median by which a straggler's kernels take longer at least."""
MOST: Final = 8
"""Stragglers that are named: ranks of one class count as one."""
_KERNELS: Final = (Part.COMPUTE, Part.RECOMPUTE, Part.OPTIMIZER)
_WAITS: Final = (*BUBBLES, Part.WAIT)


@dataclass(frozen=True, slots=True)
class Straggler:
    """Ranks of one class that are slow.

    kind: their program; kernels, waits: seconds; excess: part of the median by which kernels take longer.
    """

    ranks: tuple[int, ...]
    kind: int
    kernels: Seconds
    excess: float
    waits: Seconds


@dataclass(frozen=True, slots=True)
class Stragglers:
    """slowest: those that are slow, the slowest first, at most `MOST`; ranks: how many ranks are slow in all."""

    slowest: tuple[Straggler, ...]
    ranks: int


@dataclass(frozen=True, slots=True)
class Waits:
    """Seconds in which the ranks of each program wait for others, bubbles included: [kinds] each."""

    least: FloatArray
    mean: FloatArray
    most: FloatArray


def find_stragglers(parts: Breakdown, kind: IntArray) -> Stragglers:
    """The ranks that compute longest for what they do. kind: [ranks] which program each runs."""
    owner = np.searchsorted(parts.ranks, parts.representative)
    kernels = _seconds(parts, _KERNELS)
    medians = np.array([_median(kernels[owner[kind == each]]) for each in range(int(kind.max()) + 1)])
    of = kind[parts.ranks]
    excess = np.divide(kernels, medians[of], out=np.ones(len(kernels)), where=medians[of] > 0) - 1.0
    slow = np.flatnonzero(excess >= LEAST)
    waits = _seconds(parts, _WAITS)
    chosen = slow[np.lexsort((parts.ranks[slow], -np.round(excess[slow], 6)))][:MOST]
    slowest = tuple(
        Straggler(
            tuple(np.flatnonzero(owner == each).tolist()), int(of[each]), float(kernels[each]), float(excess[each]),
            float(waits[each]),
        )
        for each in chosen.tolist()
    )  # fmt: skip
    return Stragglers(slowest, int(parts.weights[slow].sum()))


def find_waits(parts: Breakdown, kind: IntArray) -> Waits:
    """How long the ranks of each program wait. kind: [ranks] which program each runs."""
    waits = _seconds(parts, _WAITS)[np.searchsorted(parts.ranks, parts.representative)]
    by_kind = [waits[kind == each] for each in range(int(kind.max()) + 1)]
    least, mean, most = (np.array([fold(each) for each in by_kind]) for fold in (np.min, np.mean, np.max))
    return Waits(least, mean, most)


def _seconds(parts: Breakdown, which: tuple[Part, ...]) -> FloatArray:
    """Seconds of some parts together: [classes]."""
    together: FloatArray = parts.seconds[:, [part.place for part in which]].sum(axis=1)
    return together


def _median(seconds: FloatArray) -> float:
    return float(np.median(seconds)) if len(seconds) else 0.0
