"""Which memory-bound calls between two matmuls ran which operators of the plan?

Both are few and in the same order, so that the cheapest division of the calls into runs, one for each operator, is
found by dynamic programming. A call costs how unlikely its name and size are for the operator (`affinity`); a run how
far its number of kernels is from the operator's. Where it is allowed, a call may belong to no operator.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from calibrate.profile.affinity import affinity_cost
from calibrate.profile.anchors import Share
from calibrate.profile.plan_kernels import PlanKernel
from calibrate.profile.step_calls import Call

UNMATCHED: Final = -1
"""Instead of a kernel: a call belongs to none."""
_SKIP_COST: Final = 0.9  # of a call that belongs to no operator
_EMPTY_COST: Final = 1.5  # of an operator without calls
_COUNT_WEIGHT: Final = 0.15  # of the logarithm of a call count relative to the plan's launches
_MAX_SINGLE_CALLS: Final = 150  # in a longer window runs of equal calls are one


@dataclass(frozen=True, slots=True)
class _Choice:
    """The calls between two numbers of calls that an operator takes: how many there are, and which it has."""

    cost: float
    length: int = 0
    members: tuple[int, ...] = ()


def match_window(
    kernels: Sequence[PlanKernel],
    candidates: Sequence[int],
    calls: Sequence[Call],
    window: Sequence[int],
    *,
    can_skip: bool,
) -> list[Share]:
    """Match calls with memory-bound kernels, both as indices in order; can_skip: calls may belong to none."""
    if not candidates:
        return [(index, UNMATCHED, 1.0) for index in window]
    runs = _similar_runs(calls, window)
    skips = [_SKIP_COST * len(run) if can_skip else math.inf for run in runs]
    rows: list[list[_Choice]] = []
    best = [0.0]
    for skip in skips:
        best.append(best[-1] + skip)
    for kernel in candidates:
        costs = [sum(affinity_cost(kernels[kernel], calls[index]) for index in run) for run in runs]
        launches = max(1, kernels[kernel].kernel.launches)
        row = [_best_choice(position, best, costs, skips, runs, launches) for position in range(len(runs) + 1)]
        rows.append(row)
        best = [choice.cost for choice in row]
    assigned, position = [UNMATCHED] * len(runs), len(runs)
    for kernel, row in zip(reversed(candidates), reversed(rows), strict=True):
        for member in row[position].members:
            assigned[member] = kernel
        position -= row[position].length
    return [(index, kernel, 1.0) for run, kernel in zip(runs, assigned, strict=True) for index in run]


def _best_choice(
    position: int,
    previous: Sequence[float],
    costs: Sequence[float],
    skips: Sequence[float],
    runs: Sequence[Sequence[int]],
    launches: int,
) -> _Choice:
    """Which of the calls before a position an operator takes at the least cost. previous: costs without it."""
    best = _Choice(previous[position] + _EMPTY_COST)
    total, count = 0.0, 0
    members: list[int] = []
    for start in range(position - 1, -1, -1):
        if costs[start] <= skips[start]:
            total, count = total + costs[start], count + len(runs[start])
            members.append(start)
        else:
            total += skips[start]
        prior = _COUNT_WEIGHT * abs(math.log(count / launches)) if members else _EMPTY_COST
        if previous[start] + total + prior < best.cost:
            best = _Choice(previous[start] + total + prior, position - start, tuple(members))
    return best


def _similar_runs(calls: Sequence[Call], window: Sequence[int]) -> list[list[int]]:
    """Runs of equal calls; single ones in a short window."""
    runs: list[list[int]] = []
    for index in window:
        is_same = runs and len(window) > _MAX_SINGLE_CALLS and _identity(calls[runs[-1][-1]]) == _identity(calls[index])
        if is_same:
            runs[-1].append(index)
        else:
            runs.append([index])
    return runs


def _identity(call: Call) -> tuple[str, str, bool]:
    return call.operator, call.name, call.update
