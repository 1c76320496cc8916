"""Groups of rows within a tolerance, and smoothing of runs of values within a tolerance, on random input."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from clustersim.results.tolerance_groups import group_within_tolerance, smooth_runs

VALUES = st.lists(st.floats(0.0, 1.0), min_size=0, max_size=30)


@given(VALUES, st.floats(0.0, 0.5))
def test_groups_partition_the_rows_and_stay_within_tolerance(values: list[float], tolerance: float) -> None:
    rows = np.array([[value, 1.0 - value] for value in values]).reshape(len(values), 2)
    groups = group_within_tolerance(rows, tolerance)
    assert sorted(np.concatenate([np.zeros(0, dtype=np.int64), *groups]).tolist()) == list(range(len(values)))
    assert all(np.ptp(rows[group], axis=0).max() <= tolerance for group in groups)
    first_rows = [int(group[0]) for group in groups]
    assert first_rows == sorted(first_rows)


@given(VALUES, st.floats(0.0, 0.5))
def test_smoothed_runs_stay_within_tolerance_and_keep_the_sum(values: list[float], tolerance: float) -> None:
    smoothed = smooth_runs(np.array(values), tolerance)
    assert np.all(np.abs(smoothed - values) <= tolerance + 1e-12)
    assert np.isclose(smoothed.sum(), sum(values))
    if values and np.ptp(values) <= tolerance:
        assert len(set(smoothed.tolist())) == 1
