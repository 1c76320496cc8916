"""Where does a rank do the same again and again? Stretches of its tasks in which each is like that a period before.

Microbatches repeat, and within them layers. A period is found by how far equal tasks are apart; of all stretches
those are taken that save most if but a few periods are run, and then those within their periods.
"""

from collections.abc import Iterator
from typing import Final, NamedTuple

import numpy as np

from clustersim.common.arrays import IntArray

RUN: Final = 4
"""Periods that are run before one is known to be like the one before, with what follows."""
WORTH: Final = 24
"""Tasks that are worth looking for."""
_APART: Final = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)
"""How many equal tasks on, distances are looked at: 16 pipeline ranks do each chunk for 16 microbatches in turn."""
_KINDS: Final = 4
"""Of how many kinds of tasks, the rarest and the most frequent ones, distances are looked at."""


class Region(NamedTuple):
    """Tasks from `first` to before `last`, each like that `period` before, but for those of the first period."""

    first: int
    last: int
    period: int

    @property
    def saved(self) -> int:
        """Tasks that need not be run."""
        return self.last - self.first - RUN * self.period


def regions(alike: IntArray) -> tuple[tuple[Region, ...], tuple[Region, ...]]:
    """Regions that do not overlap, and those within their periods, again for each period.

    alike: numbers of tasks that do the same are equal: [tasks].
    """
    outer = tuple(_regions(alike, 0))
    return outer, tuple(_inner(alike, outer))


def _inner(alike: IntArray, outer: tuple[Region, ...]) -> Iterator[Region]:
    for region in outer:
        for found in _regions(alike[region.first : region.first + region.period], 0):
            for begin in range(region.first, region.last - region.period + 1, region.period):
                yield Region(begin + found.first, begin + found.last, found.period)


def _regions(alike: IntArray, offset: int) -> Iterator[Region]:
    """Regions of some tasks, in order, as they are numbered from `offset` on."""
    best = max(_candidates(alike), key=lambda each: (each.saved, -each.period), default=None)
    if best is None or best.saved < WORTH:
        return
    first, last, period = best
    yield from _regions(alike[:first], offset)
    yield Region(offset + first, offset + last, period)
    yield from _regions(alike[last:], offset + last)


def _candidates(alike: IntArray) -> Iterator[Region]:
    """The longest stretch of every period."""
    for period in _periods(alike):
        same = np.concatenate(([0], alike[period:] == alike[:-period], [0]))
        edges = np.diff(same)
        first, last = np.flatnonzero(edges == 1), np.flatnonzero(edges == -1)
        if len(first):
            longest = int(np.argmax(last - first))
            yield Region(int(first[longest]), int(last[longest]) + period, period)


def _periods(alike: IntArray) -> set[int]:
    """Distances of equal tasks: the most frequent one of a kind of task to the next, to the second next, and so on."""
    order = np.argsort(alike, kind="stable")
    kinds = np.split(order, np.flatnonzero(np.diff(alike[order])) + 1)
    often = sorted((kind for kind in kinds if len(kind) >= RUN), key=len)
    chosen = often if len(often) <= 2 * _KINDS else [*often[:_KINDS], *often[-_KINDS:]]
    gaps = (array[apart:] - array[:-apart] for array in chosen for apart in _APART if apart < len(array))
    return {int(np.argmax(np.bincount(gap))) for gap in gaps}
