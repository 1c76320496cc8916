"""Blocks on many ranks as arrays: outlines, collectives beside them, and what waiting and slowing add up to."""

import numpy as np
import pytest
from hypothesis import event, given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from clustersim.common.arrays import FloatArray
from clustersim.engine.vectorized.group_sync import GroupSync
from clustersim.engine.vectorized.segment_eval import (
    OverlapInterval,
    OverlapIntervals,
    SegmentDurations,
    SegmentRun,
    blocking_ranks,
    evaluate_operations,
    evaluate_segment,
    overlapping_intervals,
    summarize_segment,
)

SECONDS = st.sampled_from([0.0, 0.25, 0.5, 1.0, 2.0])

KINDS = ["kernel", "kernel", "exchange", "both"]


def array(*seconds: float) -> FloatArray:
    return np.array(seconds, dtype=float)


@st.composite
def made(draw: st.DrawFn, *, roles: int = 1) -> SegmentDurations:
    """Blocks of up to six operations on up to six ranks that meet in groups of so many roles.

    Kernels are slowed at two paces, all by the same part or each by its own.
    """
    ranks, operations = draw(st.integers(1, 6)), draw(st.integers(0, 6))
    rows = draw(st.sampled_from([1, ranks]))
    meet = [GroupSync.from_groups(np.array(draw(_groups(ranks)))) for _ in range(roles)]
    meetings = tuple(draw(st.sampled_from([None, *meet])) for _ in range(operations))
    kernels, rest = (draw(hnp.arrays(float, (rows, operations), elements=SECONDS)) for _ in range(2))
    which = np.array(draw(st.lists(st.sampled_from(KINDS), min_size=operations, max_size=operations)), dtype=object)
    kernels, rest = kernels * (which != "exchange"), rest * (which != "kernel")
    shape = (2, draw(st.sampled_from([1, ranks])), draw(st.sampled_from([1, operations])))
    slowing = draw(hnp.arrays(float, shape, elements=st.sampled_from([0.0, 0.5, 1.0])))
    return SegmentDurations(ranks, kernels, rest, np.broadcast_to(slowing, (*shape[:2], operations)), meetings)


def slowed(
    kernels: FloatArray, rest: FloatArray, slowdown: FloatArray, meetings: tuple[GroupSync | None, ...]
) -> SegmentDurations:
    """A block whose kernels a collective slows alike; slowdown: [ranks]."""
    slowing = np.broadcast_to(slowdown[None, :, None], (1, len(slowdown), len(meetings)))
    return SegmentDurations(len(slowdown), kernels, rest, slowing, meetings)


def _groups(ranks: int) -> st.SearchStrategy[list[int]]:
    return st.lists(st.integers(0, 2), min_size=ranks, max_size=ranks)


def starts(pieces: SegmentDurations) -> st.SearchStrategy[FloatArray]:
    return hnp.arrays(float, pieces.rank_count, elements=SECONDS)


@st.composite
def collectives(draw: st.DrawFn, pieces: SegmentDurations) -> OverlapIntervals:
    """Up to three on every rank, one after the other; one of a kind on all of them, or of its own on each."""
    steps = draw(hnp.arrays(float, (draw(st.integers(0, 3)) * 2, pieces.rank_count), elements=SECONDS))
    times = np.cumsum(steps, axis=0)
    paces = st.integers(1, 2) | hnp.arrays(np.int64, pieces.rank_count, elements=st.integers(1, 2))
    return [OverlapInterval(*item, draw(paces)) for item in zip(times[::2], times[1::2], strict=True)]


@given(st.data(), made())
def test_an_outline_is_the_block_played_operation_by_operation(data: st.DataObject, pieces: SegmentDurations) -> None:
    """Exactly, since all seconds are dyadic; meeting inside the groups of one role."""
    start = data.draw(starts(pieces))
    outlined = summarize_segment(pieces)
    assert outlined is not None
    event(f"meets: {outlined.group_sync is not None}")
    whole, played = outlined.evaluate(start), evaluate_segment(start, pieces)
    for name in ("end", "waited", "slowed"):
        assert getattr(whole, name).tolist() == getattr(played, name).tolist()


@given(made(roles=2))
def test_there_is_an_outline_unless_groups_of_several_roles_meet(pieces: SegmentDurations) -> None:
    several = len({id(group_sync) for group_sync in pieces.group_syncs if group_sync is not None}) > 1
    assert (summarize_segment(pieces) is None) == several


@given(st.data(), made(roles=2))
def test_own_time_waiting_and_slowing_add_up(data: st.DataObject, pieces: SegmentDurations) -> None:
    """The end less the start is own time + waited + slowed on every rank, and neither is negative."""
    start = data.draw(starts(pieces))
    run = evaluate_segment(start, pieces, data.draw(collectives(pieces)))
    own = np.broadcast_to((pieces.kernel_seconds + pieces.fixed_seconds).sum(axis=1), pieces.rank_count)
    np.testing.assert_allclose(run.end - start, own + run.waited + run.slowed, atol=1e-12)
    assert (run.waited >= 0).all()
    assert (run.slowed >= 0).all()


@given(st.data(), made(roles=2))
def test_operations_run_at_once_take_what_they_take_one_by_one(data: st.DataObject, pieces: SegmentDurations) -> None:
    """Wherever a block may be cut into pieces of several operations."""
    start, busy = data.draw(starts(pieces)), data.draw(collectives(pieces))
    whole, one_by_one = evaluate_segment(start, pieces, busy), evaluate_operations(start, pieces, busy)[0]
    for name in ("end", "waited", "slowed"):
        np.testing.assert_allclose(getattr(whole, name), getattr(one_by_one, name), atol=1e-12)


@given(st.data(), made(roles=2))
def test_collectives_that_are_left_out_are_not_beside_the_block(data: st.DataObject, pieces: SegmentDurations) -> None:
    """How a block would have run alone tells which of them need not be looked at: none of those that slow it."""
    start, busy = data.draw(starts(pieces)), data.draw(collectives(pieces))
    found = overlapping_intervals(evaluate_segment(start, pieces), start, busy)
    event(f"left out: {len(busy) - len(found)} of {len(busy)}")
    assert evaluate_segment(start, pieces, found).end.tolist() == evaluate_segment(start, pieces, busy).end.tolist()


@given(st.data(), made(roles=2))
def test_ranks_that_meet_go_on_together(data: st.DataObject, pieces: SegmentDurations) -> None:
    start, busy = data.draw(starts(pieces)), data.draw(collectives(pieces))
    run, begins, ends = evaluate_operations(start, pieces, busy)
    come = np.column_stack([start, ends])
    for place, meeting in enumerate(pieces.group_syncs):
        expected = come[:, place] if meeting is None else meeting.group_max(come[:, place])
        assert begins[:, place].tolist() == expected.tolist()
    assert come[:, -1].tolist() == run.end.tolist()


def one(kernel: float, rest: float = 0.0, slowdown: float = 1.0) -> SegmentDurations:
    return slowed(array(kernel)[None], array(rest)[None], array(slowdown), (None,))


@pytest.mark.parametrize(
    ("since", "until", "slowed"),
    [(1, 3, 1), (-5, 2, 1), (0, 8, 4), (-1, 90, 4), (3, 90, 1), (4, 9, 0), (-2, 0, 0)],
)
def test_a_kernel_beside_a_collective(since: float, until: float, slowed: float) -> None:
    """4 s from 0 on, φ = 1: while the collective lasts, half of every second is lost, until the kernel ends."""
    run = evaluate_segment(array(0.0), one(4.0), [OverlapInterval(array(since), array(until))])
    assert run.slowed.tolist() == [slowed]
    assert run.end.tolist() == [4.0 + slowed]


def test_kernels_beside_collectives_of_two_kinds() -> None:
    """A product of 2 s and a norm of 1 s; [0, 2] slows them by 1 and 0, [2, 4.5] by 0.5 and 2, nothing after that.

    The product does 1 s by 2 and its other second by 3.5, the norm a third of a second by 4.5 and the rest by 5 1/6.
    """
    slowing = np.array([[[1.0, 0.0]], [[0.5, 2.0]]])
    pieces = SegmentDurations(1, array(2.0, 1.0)[None], np.zeros((1, 2)), slowing, (None, None))
    busy = [OverlapInterval(array(0.0), array(2.0), 1), OverlapInterval(array(2.0), array(4.5), np.array([2]))]
    run = evaluate_segment(array(0.0), pieces, busy)
    assert run.end.tolist() == pytest.approx([4.5 + 2 / 3])
    assert run.slowed.tolist() == pytest.approx([1.0 + 0.5 + 2 / 3])


def test_collectives_one_after_the_other_add_up() -> None:
    """[0, 1] costs 0.5 s and [2, 4] costs 1; with both, 4 s end at 5.5, so [5, 6] takes another 0.5 of its 1 s."""
    busy = [OverlapInterval(array(since), array(until)) for since, until in ((0.0, 1.0), (2.0, 4.0), (5.0, 6.0))]
    assert evaluate_segment(array(0.0), one(4.0), busy).end.tolist() == [6.0]


def test_exchanges_inside_are_not_slowed_and_overlaps_by_their_kernel_s_part() -> None:
    """With 3 of 4 s the kernel's and φ = 1, a whole overlap beside a collective takes 7 s; 3.5 do half of it."""
    always = [OverlapInterval(array(0.0), array(90.0))]
    assert evaluate_segment(array(0.0), one(0.0, 4.0), always).end.tolist() == [4.0]
    assert evaluate_segment(array(0.0), one(3.0, 1.0), always).end.tolist() == [7.0]
    assert evaluate_segment(array(0.0), one(3.0, 1.0), [OverlapInterval(array(0.0), array(3.5))]).end.tolist() == [5.5]


def test_each_rank_is_slowed_by_its_own_collective_and_as_its_machine_is() -> None:
    pieces = slowed(array(4.0)[None], array(0.0)[None], array(1.0, 1.0, 0.0), (None,))
    run = evaluate_segment(array(0.0, 0.0, 0.0), pieces, [OverlapInterval(array(0.0, 9.0, 0.0), array(2.0, 9.0, 2.0))])
    assert run.end.tolist() == [5.0, 4.0, 4.0]
    assert run.slowed.tolist() == [1.0, 0.0, 0.0]


def test_who_meets_a_slowed_rank_waits_for_it_and_is_not_slowed() -> None:
    """Both have a kernel of 2 s, an exchange of 1 s and a kernel of 2 s; a collective is beside the first rank's first.

    It comes to the exchange at 3, the other at 2. Both go on from there.
    """
    meeting = GroupSync.from_groups(np.array([0, 0]))
    pieces = slowed(array(2.0, 0.0, 2.0)[None], array(0.0, 1.0, 0.0)[None], array(1.0, 1.0), (None, meeting, None))
    run = evaluate_segment(array(0.0, 0.0), pieces, [OverlapInterval(array(0.0, 0.0), array(2.0, 0.0))])
    assert run.end.tolist() == [6.0, 6.0]
    assert run.waited.tolist() == [0.0, 1.0]
    assert run.slowed.tolist() == [1.0, 0.0]


TOUCHES = [(2.0, 3.0, False), (0.0, 1.0, False), (1.5, 9.0, True), (0.0, 1.5, True)]


@pytest.mark.parametrize(("since", "until", "found"), TOUCHES)
def test_collectives_that_only_touch_a_block_are_not_beside_it(since: float, until: float, found: bool) -> None:
    run, busy = SegmentRun(array(2.0), array(0.0), array(0.0)), [OverlapInterval(array(since), array(until))]
    assert overlapping_intervals(run, array(1.0), busy) == (busy if found else ())


def test_a_collective_that_another_one_brings_beside_a_block_counts() -> None:
    """Two ranks meet between kernels of 2 and 5 s; φ = 1. The first collective is beside the first rank from 7 to 8.

    Alone, both would end at 7. But the second collective is beside the second rank's first kernel, until 4: then they
    meet, and their other kernels last until 9, and half a second longer where the first collective is beside.
    """
    both = GroupSync.from_groups(np.array([0, 0]))
    pieces = slowed(array(2.0, 0.0, 5.0)[None], np.zeros((1, 3)), array(1.0, 1.0), (None, both, None))
    start = array(0.0, 0.0)
    busy = [OverlapInterval(array(7.0, 0.0), array(8.0, 0.0)), OverlapInterval(array(8.0, 0.0), array(8.0, 4.0))]
    run = evaluate_segment(start, pieces, overlapping_intervals(evaluate_segment(start, pieces), start, busy))
    assert run.end.tolist() == [9.5, 9.0]
    assert run.slowed.tolist() == [0.5, 2.0]


def test_who_was_waited_for_is_found_through_groups_of_several_roles() -> None:
    """Four ranks in rows (0, 1), (2, 3) and columns (0, 2), (1, 3), of which one waited for nobody."""
    row, column = (GroupSync.from_groups(np.array(groups)) for groups in ([0, 0, 1, 1], [0, 1, 0, 1]))
    nothing = np.zeros((1, 3))
    pieces = slowed(nothing, nothing, np.zeros(4), (row, None, column))
    for slow in range(4):
        waited = np.where(np.arange(4) == slow, 0.0, 1.0)
        assert blocking_ranks(pieces, waited).tolist() == [slow] * 4


def test_those_who_do_not_meet_wait_for_nobody() -> None:
    """Pairs have leaders of their own; a block without meetings has none."""
    pair = GroupSync.from_groups(np.array([0, 0, 1, 1]))
    nothing = np.zeros((1, 1))
    assert blocking_ranks(slowed(nothing, nothing, np.zeros(4), (pair,)), array(1.0, 0.0, 0.5, 2.0)).tolist() == [
        1,
        1,
        2,
        2,
    ]
    alone = slowed(nothing, nothing, np.zeros(4), (None,))
    assert not alone.has_sync
    assert blocking_ranks(alone, array(1.0, 0.0, 0.5, 2.0)).tolist() == [0, 1, 2, 3]
