"""Vectorized segment evaluation: max-plus summaries, overlapping collectives, waiting and slowdown."""

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

OPERATION_KINDS = ["kernel", "kernel", "exchange", "both"]


def array(*seconds: float) -> FloatArray:
    return np.array(seconds, dtype=float)


@st.composite
def segment_durations(draw: st.DrawFn, *, group_types: int = 1) -> SegmentDurations:
    """Segments of up to six operations on up to six ranks that synchronize in groups of given number of types.

    Kernels are slowed at two interference levels, all by the same fraction or each by its own.
    """
    ranks, operations = draw(st.integers(1, 6)), draw(st.integers(0, 6))
    row_count = draw(st.sampled_from([1, ranks]))
    syncs = [GroupSync.from_groups(np.array(draw(_groups(ranks)))) for _ in range(group_types)]
    group_syncs = tuple(draw(st.sampled_from([None, *syncs])) for _ in range(operations))
    kernels, fixed = (draw(hnp.arrays(float, (row_count, operations), elements=SECONDS)) for _ in range(2))
    kinds = np.array(
        draw(st.lists(st.sampled_from(OPERATION_KINDS), min_size=operations, max_size=operations)), dtype=object
    )
    kernels, fixed = kernels * (kinds != "exchange"), fixed * (kinds != "kernel")
    shape = (2, draw(st.sampled_from([1, ranks])), draw(st.sampled_from([1, operations])))
    slowdown = draw(hnp.arrays(float, shape, elements=st.sampled_from([0.0, 0.5, 1.0])))
    return SegmentDurations(ranks, kernels, fixed, np.broadcast_to(slowdown, (*shape[:2], operations)), group_syncs)


def slowed_segment(
    kernels: FloatArray, fixed: FloatArray, slowdown: FloatArray, group_syncs: tuple[GroupSync | None, ...]
) -> SegmentDurations:
    """A segment whose kernels a collective slows equally; slowdown: [ranks]."""
    slowdown_table = np.broadcast_to(slowdown[None, :, None], (1, len(slowdown), len(group_syncs)))
    return SegmentDurations(len(slowdown), kernels, fixed, slowdown_table, group_syncs)


def _groups(ranks: int) -> st.SearchStrategy[list[int]]:
    return st.lists(st.integers(0, 2), min_size=ranks, max_size=ranks)


def start_times(durations: SegmentDurations) -> st.SearchStrategy[FloatArray]:
    return hnp.arrays(float, durations.rank_count, elements=SECONDS)


@st.composite
def overlapping_collectives(draw: st.DrawFn, durations: SegmentDurations) -> OverlapIntervals:
    """Up to three on every rank in sequence; with one level for all ranks, or one per rank."""
    steps = draw(hnp.arrays(float, (draw(st.integers(0, 3)) * 2, durations.rank_count), elements=SECONDS))
    times = np.cumsum(steps, axis=0)
    levels = st.integers(1, 2) | hnp.arrays(np.int64, durations.rank_count, elements=st.integers(1, 2))
    return [OverlapInterval(*item, draw(levels)) for item in zip(times[::2], times[1::2], strict=True)]


@given(st.data(), segment_durations())
def test_a_max_plus_summary_equals_the_full_evaluation(data: st.DataObject, durations: SegmentDurations) -> None:
    """Exactly, since all seconds are dyadic; synchronization inside the groups of one type."""
    start = data.draw(start_times(durations))
    summary = summarize_segment(durations)
    assert summary is not None
    event(f"meets: {summary.group_sync is not None}")
    summarized, evaluated = summary.evaluate(start), evaluate_segment(start, durations)
    for name in ("end", "waited", "slowed"):
        assert getattr(summarized, name).tolist() == getattr(evaluated, name).tolist()


@given(segment_durations(group_types=2))
def test_summaries_exist_for_groups_of_one_type_only(durations: SegmentDurations) -> None:
    several = len({id(group_sync) for group_sync in durations.group_syncs if group_sync is not None}) > 1
    assert (summarize_segment(durations) is None) == several


@given(st.data(), segment_durations(group_types=2))
def test_work_waiting_and_slowdown_add_up(data: st.DataObject, durations: SegmentDurations) -> None:
    """The end less the start is work + waited + slowed on every rank, and neither is negative."""
    start = data.draw(start_times(durations))
    run = evaluate_segment(start, durations, data.draw(overlapping_collectives(durations)))
    work = np.broadcast_to((durations.kernel_seconds + durations.fixed_seconds).sum(axis=1), durations.rank_count)
    np.testing.assert_allclose(run.end - start, work + run.waited + run.slowed, atol=1e-12)
    assert (run.waited >= 0).all()
    assert (run.slowed >= 0).all()


@given(st.data(), segment_durations(group_types=2))
def test_batched_operations_equal_single_steps(data: st.DataObject, durations: SegmentDurations) -> None:
    """Wherever a segment may be split into sub-segments of several operations."""
    start, busy = data.draw(start_times(durations)), data.draw(overlapping_collectives(durations))
    evaluated, stepped = evaluate_segment(start, durations, busy), evaluate_operations(start, durations, busy)[0]
    for name in ("end", "waited", "slowed"):
        np.testing.assert_allclose(getattr(evaluated, name), getattr(stepped, name), atol=1e-12)


@given(st.data(), segment_durations(group_types=2))
def test_dropped_collectives_do_not_overlap_the_segment(data: st.DataObject, durations: SegmentDurations) -> None:
    """The segment's run without overlap decides which collectives can be dropped: none of those that slow it."""
    start, busy = data.draw(start_times(durations)), data.draw(overlapping_collectives(durations))
    overlapping = overlapping_intervals(evaluate_segment(start, durations), start, busy)
    event(f"left out: {len(busy) - len(overlapping)} of {len(busy)}")
    assert (
        evaluate_segment(start, durations, overlapping).end.tolist()
        == evaluate_segment(start, durations, busy).end.tolist()
    )


@given(st.data(), segment_durations(group_types=2))
def test_ranks_of_a_group_continue_together(data: st.DataObject, durations: SegmentDurations) -> None:
    start, busy = data.draw(start_times(durations)), data.draw(overlapping_collectives(durations))
    run, begins, ends = evaluate_operations(start, durations, busy)
    arrivals = np.column_stack([start, ends])
    for index, group_sync in enumerate(durations.group_syncs):
        expected = arrivals[:, index] if group_sync is None else group_sync.group_max(arrivals[:, index])
        assert begins[:, index].tolist() == expected.tolist()
    assert arrivals[:, -1].tolist() == run.end.tolist()


def one_kernel(kernel: float, fixed: float = 0.0, slowdown: float = 1.0) -> SegmentDurations:
    return slowed_segment(array(kernel)[None], array(fixed)[None], array(slowdown), (None,))


@pytest.mark.parametrize(
    ("since", "until", "slowed"),
    [(1, 3, 1), (-5, 2, 1), (0, 8, 4), (-1, 90, 4), (3, 90, 1), (4, 9, 0), (-2, 0, 0)],
)
def test_a_kernel_overlapping_a_collective(since: float, until: float, slowed: float) -> None:
    """4 s from 0 on, φ = 1: during the collective, half of every second is lost, until the kernel ends."""
    run = evaluate_segment(array(0.0), one_kernel(4.0), [OverlapInterval(array(since), array(until))])
    assert run.slowed.tolist() == [slowed]
    assert run.end.tolist() == [4.0 + slowed]


def test_kernels_overlapping_two_kinds_of_collectives() -> None:
    """A matmul of 2 s and a norm of 1 s; [0, 2] slows them by 1 and 0, [2, 4.5] by 0.5 and 2, nothing after that.

    The matmul does 1 s by 2 and its other second by 3.5, the norm a third of a second by 4.5 and the rest by 5
    1/6.
    """
    slowdown = np.array([[[1.0, 0.0]], [[0.5, 2.0]]])
    durations = SegmentDurations(1, array(2.0, 1.0)[None], np.zeros((1, 2)), slowdown, (None, None))
    busy = [OverlapInterval(array(0.0), array(2.0), 1), OverlapInterval(array(2.0), array(4.5), np.array([2]))]
    run = evaluate_segment(array(0.0), durations, busy)
    assert run.end.tolist() == pytest.approx([4.5 + 2 / 3])
    assert run.slowed.tolist() == pytest.approx([1.0 + 0.5 + 2 / 3])


def test_consecutive_collectives_add_up() -> None:
    """[0, 1] costs 0.5 s and [2, 4] costs 1; with both, 4 s end at 5.5, so [5, 6] takes another 0.5 of its 1 s."""
    busy = [OverlapInterval(array(since), array(until)) for since, until in ((0.0, 1.0), (2.0, 4.0), (5.0, 6.0))]
    assert evaluate_segment(array(0.0), one_kernel(4.0), busy).end.tolist() == [6.0]


def test_overlaps_are_slowed_by_their_kernel_share() -> None:
    """With 3 of 4 s the kernel's and φ = 1, a fully overlapped operation takes 7 s; 3.5 do half of it."""
    always = [OverlapInterval(array(0.0), array(90.0))]
    assert evaluate_segment(array(0.0), one_kernel(0.0, 4.0), always).end.tolist() == [4.0]
    assert evaluate_segment(array(0.0), one_kernel(3.0, 1.0), always).end.tolist() == [7.0]
    assert evaluate_segment(
        array(0.0), one_kernel(3.0, 1.0), [OverlapInterval(array(0.0), array(3.5))]
    ).end.tolist() == [5.5]


def test_each_rank_has_its_own_overlap_and_slowdown() -> None:
    durations = slowed_segment(array(4.0)[None], array(0.0)[None], array(1.0, 1.0, 0.0), (None,))
    run = evaluate_segment(
        array(0.0, 0.0, 0.0), durations, [OverlapInterval(array(0.0, 9.0, 0.0), array(2.0, 9.0, 2.0))]
    )
    assert run.end.tolist() == [5.0, 4.0, 4.0]
    assert run.slowed.tolist() == [1.0, 0.0, 0.0]


def test_peers_of_a_slowed_rank_wait_and_are_not_slowed() -> None:
    """Both have kernels of 2 s around a collective of 1 s; a DP collective overlaps the first rank's first kernel.

    It reaches the collective at 3, the other at 2. Both continue from there.
    """
    group_sync = GroupSync.from_groups(np.array([0, 0]))
    durations = slowed_segment(
        array(2.0, 0.0, 2.0)[None], array(0.0, 1.0, 0.0)[None], array(1.0, 1.0), (None, group_sync, None)
    )
    run = evaluate_segment(array(0.0, 0.0), durations, [OverlapInterval(array(0.0, 0.0), array(2.0, 0.0))])
    assert run.end.tolist() == [6.0, 6.0]
    assert run.waited.tolist() == [0.0, 1.0]
    assert run.slowed.tolist() == [1.0, 0.0]


OVERLAP_CASES = [(2.0, 3.0, False), (0.0, 1.0, False), (1.5, 9.0, True), (0.0, 1.5, True)]


@pytest.mark.parametrize(("since", "until", "overlaps"), OVERLAP_CASES)
def test_adjacent_collectives_do_not_overlap(since: float, until: float, overlaps: bool) -> None:
    run, busy = SegmentRun(array(2.0), array(0.0), array(0.0)), [OverlapInterval(array(since), array(until))]
    assert overlapping_intervals(run, array(1.0), busy) == (busy if overlaps else ())


def test_indirectly_overlapping_collectives_are_kept() -> None:
    """Ranks synchronize between kernels of 2 and 5 s; φ = 1. The first collective overlaps the first rank in [7, 8].

    Without overlap both would end at 7. But the second collective overlaps the second rank's first kernel, until
    4: then they synchronize, and their other kernels last until 9, and half a second longer where the first one
    overlaps.
    """
    group_sync = GroupSync.from_groups(np.array([0, 0]))
    durations = slowed_segment(array(2.0, 0.0, 5.0)[None], np.zeros((1, 3)), array(1.0, 1.0), (None, group_sync, None))
    start = array(0.0, 0.0)
    busy = [OverlapInterval(array(7.0, 0.0), array(8.0, 0.0)), OverlapInterval(array(8.0, 0.0), array(8.0, 4.0))]
    run = evaluate_segment(start, durations, overlapping_intervals(evaluate_segment(start, durations), start, busy))
    assert run.end.tolist() == [9.5, 9.0]
    assert run.slowed.tolist() == [0.5, 2.0]


def test_leaders_are_found_through_groups_of_several_types() -> None:
    """Four ranks in rows (0, 1), (2, 3) and columns (0, 2), (1, 3), of which one waited for nobody."""
    row_sync, column_sync = (GroupSync.from_groups(np.array(groups)) for groups in ([0, 0, 1, 1], [0, 1, 0, 1]))
    zeros = np.zeros((1, 3))
    durations = slowed_segment(zeros, zeros, np.zeros(4), (row_sync, None, column_sync))
    for slow in range(4):
        waited = np.where(np.arange(4) == slow, 0.0, 1.0)
        assert blocking_ranks(durations, waited).tolist() == [slow] * 4


def test_ranks_without_group_sync_have_no_leader() -> None:
    """Pairs have leaders of their own; a segment without synchronization has none."""
    pair_sync = GroupSync.from_groups(np.array([0, 0, 1, 1]))
    zeros = np.zeros((1, 1))
    assert blocking_ranks(
        slowed_segment(zeros, zeros, np.zeros(4), (pair_sync,)), array(1.0, 0.0, 0.5, 2.0)
    ).tolist() == [
        1,
        1,
        2,
        2,
    ]
    unsynchronized = slowed_segment(zeros, zeros, np.zeros(4), (None,))
    assert not unsynchronized.has_sync
    assert blocking_ranks(unsynchronized, array(1.0, 0.0, 0.5, 2.0)).tolist() == [0, 1, 2, 3]
