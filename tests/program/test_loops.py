"""Where a rank does the same again and again is found, however long its periods are."""

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from clustersim.program.loops import RUN, WORTH, Region, regions
from tests.conftest import examples


def found(*tasks: int) -> tuple[tuple[Region, ...], tuple[Region, ...]]:
    return regions(np.array(tasks))


def test_nothing_where_nothing_repeats() -> None:
    assert found(*range(100)) == ((), ())


@pytest.mark.parametrize("period", [1, 2, 3, 7, 40])
def test_periods_between_other_tasks(period: int) -> None:
    """Tasks 0 to 99 once, then a period of tasks that there are nowhere else, 60 times, then others."""
    ahead, behind = range(100), range(500, 550)
    again = [*range(200, 200 + period)] * 60
    outer, inner = found(*ahead, *again, *behind)
    assert outer == (Region(100, 100 + 60 * period, period),)
    assert inner == ()


def test_layers_within_microbatches() -> None:
    """Ten microbatches: an embedding (1), forty layers (2, 3 each), a head (4)."""
    outer, inner = found(0, *[1, *[2, 3] * 40, 4] * 10, 5)
    assert outer == (Region(1, 821, 82),)
    assert inner == tuple(Region(2 + 82 * time, 82 + 82 * time, 2) for time in range(10))


@given(st.lists(st.integers(0, 3), max_size=300))
@examples(200)
def test_each_task_of_a_region_is_like_that_a_period_before(tasks: list[int]) -> None:
    outer, inner = found(*tasks)
    for region in (*outer, *inner):
        inside = tasks[region.first : region.last]
        assert inside[region.period :] == inside[: -region.period]
        assert len(inside) - RUN * region.period >= WORTH
    assert all(one.last <= other.first for one, other in pairwise(outer))
