"""Checkpoint times in closed form, against an enumeration of the snapshots."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from clustersim.reliability.checkpoint_timeline import CheckpointTimeline

TIMELINES = st.builds(
    CheckpointTimeline,
    st.floats(1.0, 100.0),
    st.floats(0.0, 10.0),
    st.floats(0.0, 50.0),
    st.floats(0.0, 5.0),
    st.integers(1, 5),
)


def enumerated_snapshots(timeline: CheckpointTimeline, snapshots: int) -> list[tuple[float, float, float]]:
    """Wall time at which work pauses for each snapshot, at which it resumes, and when it is safe in storage."""
    snapshot_times, time = [], 0.0
    for snapshot_id in range(1, snapshots + 1):
        time += timeline.interval + (timeline.slowdown_seconds if snapshot_id > timeline.stored_every else 0.0)
        snapshot_times.append(
            (time, time + timeline.block_seconds, time + timeline.block_seconds + timeline.drain_seconds)
        )
        time += timeline.block_seconds
    return snapshot_times


@given(TIMELINES, st.integers(1, 40), st.floats(0.0, 1.0))
def test_closed_forms_match_the_enumeration(timeline: CheckpointTimeline, snapshot_count: int, fraction: float) -> None:
    snapshots = enumerated_snapshots(timeline, snapshot_count + 1)
    for snapshot_id, (start, resume, _) in enumerate(snapshots, 1):
        assert timeline.snapshot_begin(snapshot_id) == pytest.approx(start)
        assert timeline.work_after(resume) == pytest.approx(snapshot_id * timeline.interval)
    start, resume = snapshots[-2][1], snapshots[-1][0]  # of the last interval of work
    wall = start + fraction * (resume - start)
    work = timeline.work_after(wall)
    assert work == pytest.approx((snapshot_count + fraction) * timeline.interval, rel=1e-6)
    assert timeline.work_after(timeline.wall_time_of(work)) == pytest.approx(work, rel=1e-6)


@given(TIMELINES, st.integers(1, 40), st.floats(-0.4, 0.4))
def test_safe_snapshots_were_complete_by_then(
    timeline: CheckpointTimeline, snapshot_count: int, fraction: float
) -> None:
    """Away from the edges: every snapshot that is safe by then, and no other."""
    wall = timeline.snapshot_begin(snapshot_count) + timeline.block_seconds + fraction * timeline.interval
    snapshots = enumerated_snapshots(timeline, snapshot_count + 2)
    work, tolerance = timeline.work_after(wall), 1e-6 * wall
    if any(abs(wall - item) < tolerance for snapshot in snapshots for item in snapshot):
        return
    stored = [
        snapshot_id
        for snapshot_id, snapshot in enumerate(snapshots, 1)
        if snapshot[2] <= wall and not snapshot_id % timeline.stored_every
    ]
    assert timeline.last_safe_snapshot(wall, work, in_storage=True) == max(stored, default=0)
    assert timeline.last_safe_snapshot(wall, work, in_storage=False) == max(
        (snapshot_id for snapshot_id, snapshot in enumerate(snapshots, 1) if snapshot[1] <= wall), default=0
    )
    assert timeline.last_begun_snapshot(wall) == max(
        (snapshot_id for snapshot_id, snapshot in enumerate(snapshots, 1) if snapshot[0] <= wall), default=0
    )
