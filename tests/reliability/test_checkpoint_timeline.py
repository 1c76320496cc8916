"""Checkpoints in closed form, held against a walk through the seconds."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from clustersim.reliability.checkpoint_timeline import Saving

SAVINGS = st.builds(
    Saving,
    st.floats(1.0, 100.0),
    st.floats(0.0, 10.0),
    st.floats(0.0, 50.0),
    st.floats(0.0, 5.0),
    st.integers(1, 5),
)


def walked(saving: Saving, snapshots: int) -> list[tuple[float, float, float]]:
    """Wall time at which work is paused for each snapshot, at which it goes on, and when it is safe in storage."""
    found, now = [], 0.0
    for number in range(1, snapshots + 1):
        now += saving.compute + (saving.drag if number > saving.stored_every else 0.0)
        found.append((now, now + saving.block, now + saving.block + saving.drain))
        now += saving.block
    return found


@given(SAVINGS, st.integers(1, 40), st.floats(0.0, 1.0))
def test_closed_forms_are_the_walk(saving: Saving, many: int, part: float) -> None:
    points = walked(saving, many + 1)
    for number, (begins, goes_on, _) in enumerate(points, 1):
        assert saving.begins(number) == pytest.approx(begins)
        assert saving.work(goes_on) == pytest.approx(number * saving.compute)
    begins, goes_on = points[-2][1], points[-1][0]  # of the last piece of work
    wall = begins + part * (goes_on - begins)
    work = saving.work(wall)
    assert work == pytest.approx((many + part) * saving.compute, rel=1e-6)
    assert saving.work(saving.wall(work)) == pytest.approx(work, rel=1e-6)


@given(SAVINGS, st.integers(1, 40), st.floats(-0.4, 0.4))
def test_what_is_safe_was_written_by_then(saving: Saving, many: int, part: float) -> None:
    """Asked somewhere off the edges: every snapshot that is safe by then, and no other."""
    wall = saving.begins(many) + saving.block + part * saving.compute
    points = walked(saving, many + 2)
    edge = 1e-6 * wall
    if any(abs(wall - item) < edge for point in points for item in point):
        return
    stored = [number for number, point in enumerate(points, 1) if point[2] <= wall and not number % saving.stored_every]
    assert saving.safe(wall, stored=True) == max(stored, default=0)
    assert saving.safe(wall, stored=False) == max(
        (n for n, point in enumerate(points, 1) if point[1] <= wall), default=0
    )
    assert saving.begun(wall) == max((n for n, point in enumerate(points, 1) if point[0] <= wall), default=0)
