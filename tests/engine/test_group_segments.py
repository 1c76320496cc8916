"""A block that members of a group run together: whatever comes beside them when, it ends as if all had been known."""

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import simpy
from hypothesis import event, given
from hypothesis import strategies as st

from clustersim.common.arrays import FloatArray
from clustersim.engine.kernel.environment import SimEnvironment
from clustersim.engine.scalar.group_segments import GroupSegmentRun, Participant
from clustersim.engine.vectorized.group_sync import GroupSync
from clustersim.engine.vectorized.segment_eval import (
    OverlapInterval,
    OverlapIntervals,
    SegmentDurations,
    SegmentRun,
    evaluate_segment,
    summarize_segment,
)
from tests.conftest import examples
from tests.engine.test_segment_eval import array, collectives, made, slowed, starts


def joint(start: FloatArray, pieces: SegmentDurations, busy: OverlapIntervals) -> SegmentRun:
    """Let members come one after the other, each told of the collectives beside it when they begin and end."""
    environment = SimEnvironment()
    run = GroupSegmentRun(environment, pieces, summarize_segment(pieces))
    found = SegmentRun(*np.full((3, pieces.rank_count), np.nan))
    for place in range(pieces.rank_count):
        seats: list[Participant] = []
        environment.process(_member(run, seats, place, start[place], found, _within(busy, place)))
        environment.process(_beside(run, seats, _within(busy, place)))
    environment.run_all()
    assert run.is_complete
    return found


Own = tuple[float, float, int]
"""A collective beside one member: from when until when, and the pace of its kernels."""


def _within(busy: OverlapIntervals, place: int) -> list[Own]:
    """The collectives beside one member, those of a kind that follow each other at once as one."""
    joined: list[Own] = []
    for item in busy:
        pace = item.level if isinstance(item.level, int) else int(item.level[place])
        since, until = float(item.begin[place]), float(item.end[place])
        if since == until:
            continue
        if joined and (since, pace) == joined[-1][1:]:
            since = joined.pop()[0]
        joined.append((since, until, pace))
    return joined


def _member(
    run: GroupSegmentRun, seats: list[Participant], place: int, start: float, found: SegmentRun, busy: list[Own]
) -> Iterator[simpy.Event]:
    yield run.environment.timeout(start)
    seat = run.arrive(place, level=sum(pace for since, until, pace in busy if since < start < until))
    seats.append(seat)
    yield seat.done
    seats.clear()  # a rank that has ended the block tells it nothing
    found.end[place] = run.environment.now
    found.waited[place], found.slowed[place] = seat.loss.waited, seat.loss.slowed


def _beside(run: GroupSegmentRun, seats: list[Participant], busy: list[Own]) -> Iterator[simpy.Event]:
    for since, until, pace in busy:
        for moment, beside in ((since, pace), (until, 0)):
            yield run.environment.timeout(moment - run.environment.now)
            for seat in seats:
                if beside or seat.overlaps:
                    seat.set_level(beside)


@st.composite
def blocks(draw: st.DrawFn) -> SegmentDurations:
    """Blocks in which all ranks meet at least once, and in their groups of one role only."""
    pieces = draw(made().filter(lambda pieces: pieces.group_syncs))
    everyone, place = (
        GroupSync.from_groups(np.zeros(pieces.rank_count, np.int64)),
        draw(st.integers(0, len(pieces.group_syncs) - 1)),
    )
    meets = [group_sync is not None or number == place for number, group_sync in enumerate(pieces.group_syncs)]
    return replace(pieces, group_syncs=tuple(everyone if meet else None for meet in meets))


@given(st.data(), blocks())
@examples(400)
def test_a_joint_run_is_the_block_played_with_all_that_was_beside_it(
    data: st.DataObject, pieces: SegmentDurations
) -> None:
    """Members learn of collectives as these begin and end; `play` is told of all of them before."""
    start, busy = data.draw(starts(pieces)), data.draw(collectives(pieces))
    expected = evaluate_segment(start, pieces, busy)
    event(f"slowed: {bool(expected.slowed.any())}")
    found = joint(start, pieces, busy)
    for name in ("end", "waited", "slowed"):
        np.testing.assert_allclose(getattr(found, name), getattr(expected, name), atol=1e-12)


def test_a_member_that_comes_late_is_waited_for_inside() -> None:
    """Two have a kernel of 2 s, an exchange of 1 s and a kernel of 2 s, and begin at 0 and at 3. φ = 1.

    They meet at 5 and end at 8. A collective beside the first from 1 to 4 costs it the other half of its second second;
    it still comes in time, at 3. One beside the second from 6.5 to 7.5 costs that half a second of its last kernel.
    """
    both = GroupSync.from_groups(np.array([0, 0]))
    pieces = slowed(array(2.0, 0.0, 2.0)[None], array(0.0, 1.0, 0.0)[None], array(1.0, 1.0), (None, both, None))
    run = joint(array(0.0, 3.0), pieces, [OverlapInterval(array(1.0, 6.5), array(4.0, 7.5))])
    assert run.end.tolist() == [8.0, 8.5]
    assert run.waited.tolist() == [2.0, 0.0]
    assert run.slowed.tolist() == [1.0, 0.5]
