"""Groups of rows and runs of values that differ by no more than is allowed, on random ones."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from clustersim.results.tolerance_groups import group_within_tolerance, smooth_runs

VALUES = st.lists(st.floats(0.0, 1.0), min_size=0, max_size=30)


@given(VALUES, st.floats(0.0, 0.5))
def test_each_row_is_in_one_group_and_no_group_is_wider_than_allowed(values: list[float], within: float) -> None:
    rows = np.array([[value, 1.0 - value] for value in values]).reshape(len(values), 2)
    groups = group_within_tolerance(rows, within)
    assert sorted(np.concatenate([np.zeros(0, dtype=np.int64), *groups]).tolist()) == list(range(len(values)))
    assert all(np.ptp(rows[group], axis=0).max() <= within for group in groups)
    firsts = [int(group[0]) for group in groups]
    assert firsts == sorted(firsts)


@given(VALUES, st.floats(0.0, 0.5))
def test_steady_values_are_no_further_off_than_allowed_and_have_the_same_mean(
    values: list[float], within: float
) -> None:
    found = smooth_runs(np.array(values), within)
    assert np.all(np.abs(found - values) <= within + 1e-12)
    assert np.isclose(found.sum(), sum(values))
    if values and np.ptp(values) <= within:
        assert len(set(found.tolist())) == 1
