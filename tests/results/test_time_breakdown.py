"""Breakdown of the step time into categories, on traces small enough to compute by hand."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from clustersim.program.task import ComputeTask, Stream
from clustersim.results.time_breakdown import TimeBreakdown, compute_breakdown
from clustersim.results.time_categories import BUBBLE_CATEGORIES, TIME_CATEGORIES, TimeCategory
from tests.results.random_trace_cases import MIXED, MIXED_TIMING, trace_cases
from tests.results.trace_cases import (
    BACKWARD,
    FORWARD,
    OPTIMIZER_STEP,
    SpanEvent,
    TraceCase,
    collective_task,
    nonzero,
    receive_task,
)

DATA, RECEIVE = Stream.DP, Stream.RECEIVE


def category_seconds(case: TraceCase, rank: int = 0) -> dict[str, float]:
    return nonzero(time_breakdown(case).rank_seconds(rank))


def time_breakdown(case: TraceCase) -> TimeBreakdown:
    return compute_breakdown(case.trace_table, case.segment_timing)


@given(trace_cases())
def test_categories_sum_to_the_makespan_on_every_rank_and_in_the_mean(case: TraceCase) -> None:
    breakdown = time_breakdown(case)
    makespan = case.trace.makespan
    for rank in range(len(case.representative)):
        assert sum(breakdown.rank_seconds(rank).values()) == pytest.approx(makespan, rel=1e-12, abs=1e-12)
    assert sum(breakdown.mean_seconds().values()) == pytest.approx(makespan, rel=1e-12, abs=1e-12)


@given(trace_cases())
def test_no_category_is_negative(case: TraceCase) -> None:
    assert (time_breakdown(case).seconds >= -1e-12 * (1 + case.trace.makespan)).all()


@given(trace_cases(), st.floats(0.0, 1.0), st.floats(0.0, 1.0))
def test_categories_of_a_time_span_sum_to_it_and_idle_time_is_additive(
    case: TraceCase, first_fraction: float, second_fraction: float
) -> None:
    """Idle categories add up exactly over adjacent spans, since they do not depend on a segment's mean duration."""
    makespan = case.trace.makespan
    since, until = (fraction * makespan for fraction in sorted((first_fraction, second_fraction)))
    spans = ((0.0, since), (since, until), (until, makespan))
    span_seconds = [compute_breakdown(case.trace_table, case.segment_timing, span).seconds for span in spans]
    for (begin, end), seconds in zip(spans, span_seconds, strict=True):
        assert seconds.sum(axis=1) == pytest.approx(end - begin, rel=1e-9, abs=1e-12)
        assert (seconds >= -1e-12 * (1 + makespan)).all()
    idle_indices = [category.index for category in BUBBLE_CATEGORIES]
    total_seconds = time_breakdown(case).seconds
    assert sum(span_seconds)[:, idle_indices] == pytest.approx(total_seconds[:, idle_indices], rel=1e-9, abs=1e-12)
    assert sum(span_seconds).sum(axis=1) == pytest.approx(total_seconds.sum(axis=1), rel=1e-9, abs=1e-12)


def test_operations_of_a_segment_count_in_their_own_categories() -> None:
    """Kernels by their work type; communication, and what an overlapped operation leaves exposed, by its axis."""
    case = TraceCase((SpanEvent(ComputeTask(MIXED), 0, 9),), timings={MIXED: MIXED_TIMING})
    assert category_seconds(case) == {
        "compute": 5.0, "recompute": 1.5, "optimizer": 0.75, "exposed tp": 1.25, "exposed cp": 0.5,
    }  # fmt: skip


def test_launch_stalls_have_their_own_category() -> None:
    """Three kernels of 3 s, 1.5 s and 0.75 s include launch stalls of 1 s, 0.5 s and 0.25 s."""
    launch_bound = replace(MIXED_TIMING, launch_stalls=np.array([1.0, 0.0, 0.0, 0.5, 0.0, 0.25]))
    case = TraceCase((SpanEvent(ComputeTask(MIXED), 0, 9),), timings={MIXED: launch_bound})
    assert category_seconds(case) == {
        "compute": 4.0, "recompute": 1.0, "optimizer": 0.5, "kernel launch": 1.75, "exposed tp": 1.25,
        "exposed cp": 0.5,
    }  # fmt: skip


def test_wait_and_overlap_delay_within_a_segment_have_their_own_categories() -> None:
    """9 s of work in 12 s: 2 s of waiting for group members, 1 s of delay by overlapping communication."""
    case = TraceCase((SpanEvent(ComputeTask(MIXED), 0, 12, waited=2.0, slowed=1.0),), timings={MIXED: MIXED_TIMING})
    assert category_seconds(case)["wait"] == 2.0
    assert category_seconds(case)["slowed by communication"] == 1.0
    assert category_seconds(case)["compute"] == 5.0


def test_a_shorter_event_shortens_only_the_kernels() -> None:
    """7.25 s of kernels, 5 s of them compute, and 1.75 s of communication; in 4.5 s, kernels took 2.75 s."""
    case = TraceCase((SpanEvent(ComputeTask(MIXED), 0, 4.5),), timings={MIXED: MIXED_TIMING})
    assert category_seconds(case)["compute"] == pytest.approx(5.0 * 2.75 / 7.25)
    assert category_seconds(case)["exposed tp"] == pytest.approx(1.25)
    assert "wait" not in category_seconds(case)


def test_waiting_for_activations_is_bubble_until_their_transfer_starts() -> None:
    """Idle for 5 s; the message that ends the gap is transferred in the last 2 s."""
    case = TraceCase((SpanEvent(receive_task(), 3, 5, -1, RECEIVE), SpanEvent(FORWARD, 5, 6, 0)), has_pipeline=True)
    assert category_seconds(case) == {"bubble warm-up": 3.0, "exposed pp": 2.0, "compute": 1.0}


def test_only_the_share_of_a_transfer_within_the_gap_is_exposed() -> None:
    """A message is transferred from 1 to 5, overlapping a forward until 3: 2 s of it are hidden."""
    case = TraceCase(
        (SpanEvent(FORWARD, 0, 3), SpanEvent(receive_task(), 1, 5, -1, RECEIVE), SpanEvent(BACKWARD, 5, 6, 1)),
        has_pipeline=True,
    )
    assert category_seconds(case) == {"compute": 4.0, "exposed pp": 2.0}


def test_bubbles_have_phases() -> None:
    """1 s idle before each of F F B F B: warm-up up to the first B, cool-down after the last F."""
    tasks = [FORWARD, FORWARD, BACKWARD, FORWARD, BACKWARD]
    events: list[SpanEvent] = []
    for index, task in enumerate(tasks):
        events.append(SpanEvent(receive_task(), 2 * index + 1, 2 * index + 1, -1, RECEIVE))
        events.append(SpanEvent(task, 2 * index + 1, 2 * index + 2, 2 * index))
    assert category_seconds(TraceCase(tuple(events), has_pipeline=True)) == {
        "compute": 5.0, "bubble warm-up": 3.0, "bubble steady": 1.0, "bubble cool-down": 1.0,
    }  # fmt: skip


def test_a_queued_collective_exposes_all_transfers_of_its_stream() -> None:
    """Idle from 10 to 20 for a reduction transferred in 16..20, queued behind one transferred in 8..13.

    3 s and 4 s of them are exposed; in the 3 s between, the stream waited for other ranks.
    """
    events = (
        SpanEvent(BACKWARD, 0, 10),
        SpanEvent(collective_task("dp", "first"), 8, 13, -1, DATA),
        SpanEvent(collective_task("dp", "second"), 16, 20, 1, DATA),
        SpanEvent(OPTIMIZER_STEP, 20, 21, 2),
    )
    assert category_seconds(TraceCase(events)) == {"compute": 10.0, "exposed dp": 7.0, "wait": 3.0, "optimizer": 1.0}


def test_waiting_for_all_stages_is_bubble_in_a_pipeline_and_wait_without_one() -> None:
    """The last stage ends its backward 5 s before the first, and waits for it in the reduction of the gradient norm."""
    events = (
        SpanEvent(FORWARD, 0, 1),
        SpanEvent(BACKWARD, 1, 2),
        SpanEvent(collective_task("world"), 7, 8, -1, DATA),
        SpanEvent(OPTIMIZER_STEP, 8, 9, 2),
    )
    expected = {"compute": 2.0, "exposed dp": 1.0, "optimizer": 1.0}
    assert category_seconds(TraceCase(events, has_pipeline=True)) == {**expected, "bubble cool-down": 5.0}
    assert category_seconds(TraceCase(events)) == {**expected, "wait": 5.0}


def test_idle_time_at_the_end_counts_for_the_dp_stream_then_for_the_pipeline() -> None:
    """Rank 0 ends computing at 10 of 20; its DP stream transfers in 8..12 and 15..16, waiting for a replica from 12."""
    events = (
        SpanEvent(BACKWARD, 0, 10),
        SpanEvent(collective_task("dp", "first"), 8, 12, -1, DATA),
        SpanEvent(collective_task("dp", "second"), 15, 16, 1, DATA),
        SpanEvent(BACKWARD, 0, 20, rank=1),
    )
    expected = {"compute": 10.0, "exposed dp": 3.0}
    assert category_seconds(TraceCase(events, (0, 1), has_pipeline=True)) == {
        **expected,
        "wait": 3.0,
        "bubble cool-down": 4.0,
    }
    assert category_seconds(TraceCase(events, (0, 1))) == {**expected, "wait": 7.0}


def test_communication_overlapped_by_compute_is_hidden() -> None:
    events = (SpanEvent(BACKWARD, 0, 10), SpanEvent(collective_task("dp"), 2, 9, -1, DATA))
    assert category_seconds(TraceCase(events)) == {"compute": 10.0}


def test_a_collective_on_the_compute_stream_is_exposed_after_a_wait() -> None:
    events = (SpanEvent(FORWARD, 0, 1), SpanEvent(collective_task("dp"), 4, 6), SpanEvent(OPTIMIZER_STEP, 6, 7, 1))
    assert category_seconds(TraceCase(events)) == {"compute": 1.0, "wait": 3.0, "exposed dp": 2.0, "optimizer": 1.0}


def test_a_gap_without_an_awaited_communication_is_wait() -> None:
    events = (SpanEvent(FORWARD, 0, 1), SpanEvent(BACKWARD, 4, 5, 0))
    assert category_seconds(TraceCase(events, has_pipeline=True)) == {"compute": 2.0, "wait": 3.0}


def test_another_ranks_communication_explains_no_gap() -> None:
    events = (SpanEvent(receive_task(), 1, 4, -1, RECEIVE, rank=1), SpanEvent(FORWARD, 4, 5, 0))
    assert category_seconds(TraceCase(events, (0, 1), has_pipeline=True)) == {"compute": 1.0, "wait": 4.0}


def test_a_rank_without_tasks_waits() -> None:
    events = (SpanEvent(FORWARD, 0, 3),)
    assert category_seconds(TraceCase(events, (0, 1)), 1) == {"wait": 3.0}
    assert category_seconds(TraceCase(events, (0, 1), has_pipeline=True), 1) == {"bubble cool-down": 3.0}


def test_an_empty_trace_has_no_seconds() -> None:
    assert category_seconds(TraceCase(())) == {}


def test_the_mean_is_weighted_by_the_ranks_of_a_class() -> None:
    """Ranks 0, 2 and 3 compute 4 s, rank 1 computes 8 s as a class of one: mean compute (3 x 4 + 8) / 4 = 5."""
    breakdown = time_breakdown(TraceCase((SpanEvent(FORWARD, 0, 4), SpanEvent(FORWARD, 0, 8, rank=1)), (0, 1, 0, 0)))
    assert breakdown.ranks.tolist() == [0, 1]
    assert breakdown.weights.tolist() == [3, 1]
    assert nonzero(breakdown.mean_seconds()) == {"compute": 5.0, "wait": 3.0}
    assert breakdown.rank_seconds(3) == breakdown.rank_seconds(0)
    assert breakdown.category_total(TimeCategory.COMPUTE, TimeCategory.WAIT) == 8.0
    assert breakdown.category_total(*BUBBLE_CATEGORIES) == 0.0


def test_categories_are_listed_in_order() -> None:
    assert list(time_breakdown(TraceCase((SpanEvent(FORWARD, 0, 4),))).mean_seconds()) == [
        category.value for category in TIME_CATEGORIES
    ]
    assert [category.index for category in TIME_CATEGORIES] == np.arange(len(TIME_CATEGORIES)).tolist()
