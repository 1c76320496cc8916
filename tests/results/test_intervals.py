"""Arrays of intervals: assigned to tracks, and summed over time."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from clustersim.results.intervals import assign_tracks, last_per_time, sum_over_time

_INTERVALS = st.lists(st.tuples(st.integers(0, 9), st.integers(1, 5), st.integers(0, 1000)), max_size=12)


def test_a_key_has_as_many_tracks_as_concurrent_intervals() -> None:
    start, end = np.array([0.0, 0.0, 1.0, 2.0, 2.5]), np.array([2.0, 3.0, 2.0, 4.0, 3.0])
    assert assign_tracks(np.array([1, 1, 1, 1, 1]), start, end).tolist() == [0, 1, 2, 0, 2]
    assert assign_tracks(np.array([0, 1, 2, 3, 4]), start, end).tolist() == [0] * 5


@given(_INTERVALS)
def test_the_sum_over_time_is_of_the_active_intervals(intervals: list[tuple[int, int, int]]) -> None:
    """At every time, the sum over intervals that have started and not ended; each time is listed once."""
    start, length, value = np.array(intervals, dtype=np.int64).reshape(-1, 3).T
    times, sums = sum_over_time(start, start + length, value / 8.0)
    assert times.tolist() == sorted({*start.tolist(), *(start + length).tolist()})
    for time, total in zip(times.tolist(), sums.tolist(), strict=True):
        assert total == sum(value[(start <= time) & (time < start + length)]) / 8.0


def test_the_last_value_at_a_time_is_kept() -> None:
    times, values = last_per_time(np.array([0, 2, 2, 3]), np.array([1.0, 5.0, 4.0, 0.5]))
    assert (times.tolist(), values.tolist()) == ([0, 2, 3], [1.0, 4.0, 0.5])
