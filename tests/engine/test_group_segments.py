"""A segment that members of a group run online ends as if all overlapping collectives had been known in advance."""

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import simpy
from hypothesis import event, given
from hypothesis import strategies as st

from clustersim.common.arrays import FloatArray
from clustersim.engine.kernel.environment import SimEnvironment
from clustersim.engine.scalar.group_durations import GroupDurations
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
from tests.engine.test_segment_eval import (
    array,
    overlapping_collectives,
    segment_durations,
    slowed_segment,
    start_times,
)


def run_group_segment(start: FloatArray, durations: SegmentDurations, busy: OverlapIntervals) -> SegmentRun:
    """Let members arrive one after the other, each notified when overlapping collectives begin and end."""
    environment = SimEnvironment()
    group_run = GroupSegmentRun(environment, GroupDurations(durations, summarize_segment(durations)))
    result = SegmentRun(*np.full((3, durations.rank_count), np.nan))
    for member in range(durations.rank_count):
        participants: list[Participant] = []
        environment.process(
            _member_process(group_run, participants, member, start[member], result, _member_intervals(busy, member))
        )
        environment.process(_overlap_process(group_run, participants, _member_intervals(busy, member)))
    environment.run()
    assert group_run.is_complete
    return result


MemberInterval = tuple[float, float, int]
"""A collective that overlaps one member: begin, end, and interference level."""


def _member_intervals(busy: OverlapIntervals, member: int) -> list[MemberInterval]:
    """The collectives that overlap one member; adjacent ones of the same level are merged."""
    intervals: list[MemberInterval] = []
    for overlap in busy:
        level = overlap.level if isinstance(overlap.level, int) else int(overlap.level[member])
        since, until = float(overlap.begin[member]), float(overlap.end[member])
        if since == until:
            continue
        if intervals and (since, level) == intervals[-1][1:]:
            since = intervals.pop()[0]
        intervals.append((since, until, level))
    return intervals


def _member_process(
    run: GroupSegmentRun,
    participants: list[Participant],
    member: int,
    start: float,
    result: SegmentRun,
    intervals: list[MemberInterval],
) -> Iterator[simpy.Event]:
    yield run.environment.timeout(start)
    participant = run.arrive(member, level=sum(level for since, until, level in intervals if since < start < until))
    participants.append(participant)
    yield participant.done
    participants.clear()  # a rank that has ended the segment notifies it of nothing
    result.end[member] = run.environment.now
    result.waited[member], result.slowed[member] = participant.loss.waited, participant.loss.slowed


def _overlap_process(
    run: GroupSegmentRun, participants: list[Participant], intervals: list[MemberInterval]
) -> Iterator[simpy.Event]:
    for since, until, level in intervals:
        for time, new_level in ((since, level), (until, 0)):
            yield run.environment.timeout(time - run.environment.now)
            for participant in participants:
                if new_level or participant.overlaps:
                    participant.set_level(new_level)


@st.composite
def synchronized_segments(draw: st.DrawFn) -> SegmentDurations:
    """Segments in which all ranks synchronize at least once, and within groups of one type only."""
    durations = draw(segment_durations().filter(lambda durations: durations.group_syncs))
    all_ranks, sync_index = (
        GroupSync.from_groups(np.zeros(durations.rank_count, np.int64)),
        draw(st.integers(0, len(durations.group_syncs) - 1)),
    )
    has_sync = [group_sync is not None or index == sync_index for index, group_sync in enumerate(durations.group_syncs)]
    return replace(durations, group_syncs=tuple(all_ranks if item else None for item in has_sync))


@given(st.data(), synchronized_segments(), st.floats(0.5, 2.0))
@examples(400)
def test_plain_numbers_give_the_times_of_arrays(data: st.DataObject, pieces: SegmentDurations, scale: float) -> None:
    """To the bit, whatever the seconds are; with overlapping collectives and without."""
    pieces = replace(pieces, kernel_seconds=pieces.kernel_seconds * scale, fixed_seconds=pieces.fixed_seconds / scale)
    start, busy = data.draw(start_times(pieces)), data.draw(overlapping_collectives(pieces))
    summary = summarize_segment(pieces)
    assert summary is not None
    expected = evaluate_segment(start, pieces, busy) if busy else summary.evaluate(start)
    overlaps = [_overlaps_of(busy, member) for member in range(pieces.rank_count)]
    ends = GroupDurations(pieces, summary).ends(start.tolist(), overlaps)
    assert [end for end, _ in ends] == expected.end.tolist()
    assert [(loss.waited, loss.slowed) for _, loss in ends] == [*zip(expected.waited, expected.slowed, strict=True)]


def _overlaps_of(busy: OverlapIntervals, member: int) -> list[MemberInterval]:
    """The collectives that overlap one member."""
    return [
        (float(begin[member]), float(end[member]), level if isinstance(level, int) else int(level[member]))
        for begin, end, level in busy
    ]


@given(st.data(), synchronized_segments())
@examples(400)
def test_a_group_run_equals_the_offline_evaluation(data: st.DataObject, pieces: SegmentDurations) -> None:
    """The online run is notified of collectives as they begin and end; the offline evaluation knows all of them."""
    start, busy = data.draw(start_times(pieces)), data.draw(overlapping_collectives(pieces))
    expected = evaluate_segment(start, pieces, busy)
    event(f"slowed: {bool(expected.slowed.any())}")
    result = run_group_segment(start, pieces, busy)
    for name in ("end", "waited", "slowed"):
        np.testing.assert_allclose(getattr(result, name), getattr(expected, name), atol=1e-12)


def test_members_wait_for_a_late_one_inside_the_segment() -> None:
    """Two have a kernel of 2 s, a collective of 1 s and a kernel of 2 s, and begin at 0 and at 3. φ = 1.

    They synchronize at 5 and end at 8. A collective overlapping the first from 1 to 4 costs it half of its second
    second; it still arrives in time, at 3. One overlapping the second from 6.5 to 7.5 costs that half a second of
    its last kernel.
    """
    group_sync = GroupSync.from_groups(np.array([0, 0]))
    durations = slowed_segment(
        array(2.0, 0.0, 2.0)[None], array(0.0, 1.0, 0.0)[None], array(1.0, 1.0), (None, group_sync, None)
    )
    run = run_group_segment(array(0.0, 3.0), durations, [OverlapInterval(array(1.0, 6.5), array(4.0, 7.5))])
    assert run.end.tolist() == [8.0, 8.5]
    assert run.waited.tolist() == [2.0, 0.0]
    assert run.slowed.tolist() == [1.0, 0.5]
