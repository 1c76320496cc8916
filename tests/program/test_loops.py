"""Loops in a rank's task list are found, for all period lengths."""

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from clustersim.program.loops import MIN_SAVED_TASKS, SIMULATED_ITERATIONS, Loop, find_loops
from tests.conftest import examples


def loops_in_tasks(*tasks: int) -> tuple[tuple[Loop, ...], tuple[Loop, ...]]:
    return find_loops(np.array(tasks))


def test_no_loops_without_repetition() -> None:
    assert loops_in_tasks(*range(100)) == ((), ())


@pytest.mark.parametrize("period", [1, 2, 3, 7, 40])
def test_periods_between_other_tasks(period: int) -> None:
    """Tasks 0 to 99 once, then a period of tasks that occur nowhere else, 60 times, then others."""
    preceding, following = range(100), range(500, 550)
    repeated = [*range(200, 200 + period)] * 60
    outer, inner = loops_in_tasks(*preceding, *repeated, *following)
    assert outer == (Loop(100, 100 + 60 * period, period),)
    assert inner == ()


def test_layers_within_microbatches() -> None:
    """Ten microbatches: an embedding (1), forty layers (2, 3 each), a head (4)."""
    outer, inner = loops_in_tasks(0, *[1, *[2, 3] * 40, 4] * 10, 5)
    assert outer == (Loop(1, 821, 82),)
    assert inner == tuple(Loop(2 + 82 * time, 82 + 82 * time, 2) for time in range(10))


@given(st.lists(st.integers(0, 3), max_size=300))
@examples(200)
def test_tasks_of_a_loop_equal_those_one_period_before(tasks: list[int]) -> None:
    outer, inner = loops_in_tasks(*tasks)
    for loop in (*outer, *inner):
        loop_tasks = tasks[loop.begin : loop.end]
        assert loop_tasks[loop.period :] == loop_tasks[: -loop.period]
        assert len(loop_tasks) - SIMULATED_ITERATIONS * loop.period >= MIN_SAVED_TASKS
    assert all(loop_before.end <= loop_after.begin for loop_before, loop_after in pairwise(outer))
