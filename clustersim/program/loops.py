"""Where does a rank do the same again and again? Stretches of its tasks in which each is like that a period before.

Microbatches repeat, and within them layers. A period is found by how far equal tasks are apart; of all stretches
those are taken that save most if but a few periods are run, and then those within their periods.
"""

from collections.abc import Iterator
from typing import Final, NamedTuple

import numpy as np

from clustersim.common.arrays import IntArray

SIMULATED_ITERATIONS: Final = 4
"""Periods that are run before one is known to be like the one before, with what follows."""
MIN_SAVED_TASKS: Final = 24
"""Tasks that are worth looking for."""
_OCCURRENCE_LAGS: Final = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)
"""How many equal tasks on, distances are looked at: 16 pipeline ranks do each chunk for 16 microbatches in turn."""
_SAMPLED_SIGNATURES: Final = 4
"""Of how many kinds of tasks, the rarest and the most frequent ones, distances are looked at."""


class Loop(NamedTuple):
    """Tasks from `first` to before `last`, each like that `period` before, but for those of the first period."""

    begin: int
    end: int
    period: int

    @property
    def saved_tasks(self) -> int:
        """Tasks that need not be run."""
        return self.end - self.begin - SIMULATED_ITERATIONS * self.period


def find_loops(task_signatures: IntArray) -> tuple[tuple[Loop, ...], tuple[Loop, ...]]:
    """Regions that do not overlap, and those within their periods, again for each period.

    alike: numbers of tasks that do the same are equal: [tasks].
    """
    outer_loops = tuple(_find_loops(task_signatures, 0))
    return outer_loops, tuple(_inner_loops(task_signatures, outer_loops))


def _inner_loops(task_signatures: IntArray, outer_loops: tuple[Loop, ...]) -> Iterator[Loop]:
    for outer in outer_loops:
        for inner in _find_loops(task_signatures[outer.begin : outer.begin + outer.period], 0):
            for begin in range(outer.begin, outer.end - outer.period + 1, outer.period):
                yield Loop(begin + inner.begin, begin + inner.end, inner.period)


def _find_loops(task_signatures: IntArray, offset: int) -> Iterator[Loop]:
    """Regions of some tasks, in order, as they are numbered from `offset` on."""
    best = max(_longest_loops(task_signatures), key=lambda loop: (loop.saved_tasks, -loop.period), default=None)
    if best is None or best.saved_tasks < MIN_SAVED_TASKS:
        return
    begin, end, period = best
    yield from _find_loops(task_signatures[:begin], offset)
    yield Loop(offset + begin, offset + end, period)
    yield from _find_loops(task_signatures[end:], offset + end)


def _longest_loops(task_signatures: IntArray) -> Iterator[Loop]:
    """The longest stretch of every period."""
    for period in _candidate_periods(task_signatures):
        is_repeated = np.concatenate(([0], task_signatures[period:] == task_signatures[:-period], [0]))
        edges = np.diff(is_repeated)
        begins, ends = np.flatnonzero(edges == 1), np.flatnonzero(edges == -1)
        if len(begins):
            longest = int(np.argmax(ends - begins))
            yield Loop(int(begins[longest]), int(ends[longest]) + period, period)


def _candidate_periods(task_signatures: IntArray) -> set[int]:
    """Distances of equal tasks: the most frequent one of a kind of task to the next, to the second next, and so on."""
    order = np.argsort(task_signatures, kind="stable")
    occurrences = np.split(order, np.flatnonzero(np.diff(task_signatures[order])) + 1)
    frequent = sorted((task_ids for task_ids in occurrences if len(task_ids) >= SIMULATED_ITERATIONS), key=len)
    sampled = (
        frequent
        if len(frequent) <= 2 * _SAMPLED_SIGNATURES
        else [*frequent[:_SAMPLED_SIGNATURES], *frequent[-_SAMPLED_SIGNATURES:]]
    )
    gaps = (array[lag:] - array[:-lag] for array in sampled for lag in _OCCURRENCE_LAGS if lag < len(array))
    return {int(np.argmax(np.bincount(gap))) for gap in gaps}
