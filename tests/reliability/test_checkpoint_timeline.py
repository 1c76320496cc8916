"""Checkpoints in closed form, held against a walk through the seconds."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from clustersim.reliability.checkpoint_timeline import CheckpointTimeline

SAVINGS = st.builds(
    CheckpointTimeline,
    st.floats(1.0, 100.0),
    st.floats(0.0, 10.0),
    st.floats(0.0, 50.0),
    st.floats(0.0, 5.0),
    st.integers(1, 5),
)


def walked(saving: CheckpointTimeline, snapshots: int) -> list[tuple[float, float, float]]:
    """Wall time at which work is paused for each snapshot, at which it goes on, and when it is safe in storage."""
    found, now = [], 0.0
    for number in range(1, snapshots + 1):
        now += saving.interval + (saving.slowdown_seconds if number > saving.stored_every else 0.0)
        found.append((now, now + saving.block_seconds, now + saving.block_seconds + saving.drain_seconds))
        now += saving.block_seconds
    return found


@given(SAVINGS, st.integers(1, 40), st.floats(0.0, 1.0))
def test_closed_forms_are_the_walk(saving: CheckpointTimeline, many: int, part: float) -> None:
    points = walked(saving, many + 1)
    for number, (begins, goes_on, _) in enumerate(points, 1):
        assert saving.snapshot_begin(number) == pytest.approx(begins)
        assert saving.work_after(goes_on) == pytest.approx(number * saving.interval)
    begins, goes_on = points[-2][1], points[-1][0]  # of the last piece of work
    wall = begins + part * (goes_on - begins)
    work = saving.work_after(wall)
    assert work == pytest.approx((many + part) * saving.interval, rel=1e-6)
    assert saving.work_after(saving.wall_time_of(work)) == pytest.approx(work, rel=1e-6)


@given(SAVINGS, st.integers(1, 40), st.floats(-0.4, 0.4))
def test_what_is_safe_was_written_by_then(saving: CheckpointTimeline, many: int, part: float) -> None:
    """Asked somewhere off the edges: every snapshot that is safe by then, and no other."""
    wall = saving.snapshot_begin(many) + saving.block_seconds + part * saving.interval
    points = walked(saving, many + 2)
    edge = 1e-6 * wall
    if any(abs(wall - item) < edge for point in points for item in point):
        return
    stored = [number for number, point in enumerate(points, 1) if point[2] <= wall and not number % saving.stored_every]
    assert saving.last_safe_snapshot(wall, in_storage=True) == max(stored, default=0)
    assert saving.last_safe_snapshot(wall, in_storage=False) == max(
        (n for n, point in enumerate(points, 1) if point[1] <= wall), default=0
    )
    assert saving.last_begun_snapshot(wall) == max(
        (n for n, point in enumerate(points, 1) if point[0] <= wall), default=0
    )
