"""Synchronization of members of many groups, against loops over groups."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from clustersim.common.arrays import FloatArray, IntArray
from clustersim.engine.vectorized.group_sync import GroupSync

TIMES = st.sampled_from([0.0, 0.5, 1.0, 2.5, 7.0])
"""Few values, so that members arrive at equal times."""


def groups() -> st.SearchStrategy[IntArray]:
    return st.lists(st.integers(0, 4), min_size=1, max_size=12).map(np.array)


@st.composite
def grouped_times(draw: st.DrawFn, columns: bool = False) -> tuple[IntArray, FloatArray]:
    """Groups of members, and their times: [members], or [members, columns]."""
    group = draw(groups())
    shape = (len(group), draw(st.integers(1, 3))) if columns else (len(group),)
    return group, draw(hnp.arrays(float, shape, elements=TIMES))


@given(grouped_times())
def test_a_group_continues_at_its_latest_member(groups_and_times: tuple[IntArray, FloatArray]) -> None:
    group, times = groups_and_times
    latest = GroupSync.from_groups(group).group_max(times)
    assert latest.tolist() == [max(times[group == group_id]) for group_id in group]


@given(grouped_times(columns=True))
def test_columns_are_synchronized_independently(groups_and_times: tuple[IntArray, FloatArray]) -> None:
    group, times = groups_and_times
    latest = GroupSync.from_groups(group).group_max(times)
    assert latest.shape == times.shape
    assert latest.tolist() == [times[group == mine].max(axis=0).tolist() for mine in group]


@given(grouped_times())
def test_the_leader_is_the_first_of_the_latest_members(groups_and_times: tuple[IntArray, FloatArray]) -> None:
    group, times = groups_and_times
    group_sync = GroupSync.from_groups(group)
    last = group_sync.last_arriver(times, group_sync.group_max(times))
    for mine, leader in zip(group, last, strict=True):
        members = [member for member in range(len(group)) if group[member] == mine]
        assert leader == max(members, key=lambda member: (times[member], -member))


@given(groups())
def test_singleton_groups_are_detected(group: IntArray) -> None:
    assert GroupSync.from_groups(group).is_trivial == (len(set(group.tolist())) == len(group))
