"""Loop detection: where does a rank's task list repeat?

Microbatches repeat, and layers within them. A period is found from the distances between tasks of equal
signature; of all repeated ranges, those are chosen that save most tasks when only a few iterations are
simulated, and then the loops within their iterations.
"""

from collections.abc import Iterator
from typing import Final, NamedTuple

import numpy as np

from clustersim.common.arrays import IntArray

SIMULATED_ITERATIONS: Final = 4
"""Iterations that are simulated before a steady state can be detected, with those that follow it."""
MIN_SAVED_TASKS: Final = 24
"""Saved tasks from which a loop is worth fast-forwarding."""
_OCCURRENCE_LAGS: Final = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)
"""Distances are taken to the k-th next equal task: 16 pipeline ranks run a chunk for 16 microbatches."""
_SAMPLED_SIGNATURES: Final = 4
"""Number of rarest, and of most frequent, task signatures whose distances are examined."""


class Loop(NamedTuple):
    """Task ids `begin` to before `end`, each equal to the one `period` before it, except in the first iteration."""

    begin: int
    end: int
    period: int

    @property
    def saved_tasks(self) -> int:
        """Tasks that need not be simulated."""
        return self.end - self.begin - SIMULATED_ITERATIONS * self.period


def find_loops(task_signatures: IntArray) -> tuple[tuple[Loop, ...], tuple[Loop, ...]]:
    """Disjoint outer loops, and the inner loops of each of their iterations.

    task_signatures: [tasks] equal ids for equal tasks (`RankProgram.task_signatures`).
    """
    outer_loops = tuple(_find_loops(task_signatures, 0))
    return outer_loops, tuple(_inner_loops(task_signatures, outer_loops))


def _inner_loops(task_signatures: IntArray, outer_loops: tuple[Loop, ...]) -> Iterator[Loop]:
    for outer in outer_loops:
        for inner in _find_loops(task_signatures[outer.begin : outer.begin + outer.period], 0):
            for begin in range(outer.begin, outer.end - outer.period + 1, outer.period):
                yield Loop(begin + inner.begin, begin + inner.end, inner.period)


def _find_loops(task_signatures: IntArray, offset: int) -> Iterator[Loop]:
    """Disjoint loops of a range of tasks, in order; `offset` is the id of its first task."""
    best = max(_longest_loops(task_signatures), key=lambda loop: (loop.saved_tasks, -loop.period), default=None)
    if best is None or best.saved_tasks < MIN_SAVED_TASKS:
        return
    begin, end, period = best
    yield from _find_loops(task_signatures[:begin], offset)
    yield Loop(offset + begin, offset + end, period)
    yield from _find_loops(task_signatures[end:], offset + end)


def _longest_loops(task_signatures: IntArray) -> Iterator[Loop]:
    """The longest loop of every candidate period."""
    for period in _candidate_periods(task_signatures):
        is_repeated = np.concatenate(([0], task_signatures[period:] == task_signatures[:-period], [0]))
        edges = np.diff(is_repeated)
        begins, ends = np.flatnonzero(edges == 1), np.flatnonzero(edges == -1)
        if len(begins):
            longest = int(np.argmax(ends - begins))
            yield Loop(int(begins[longest]), int(ends[longest]) + period, period)


def _candidate_periods(task_signatures: IntArray) -> set[int]:
    """Most frequent distances between tasks of equal signature: to the next occurrence, the second next, and so on."""
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
