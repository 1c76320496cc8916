"""The chain of events that determines the step time."""

import pytest
from hypothesis import given

from clustersim.program.task import ComputeTask, Stream
from clustersim.results.critical_path import find_critical_path, path_category_totals
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

CHAIN = TraceCase(
    (
        SpanEvent(FORWARD, 0, 2),
        SpanEvent(FORWARD, 0, 1, rank=1),
        SpanEvent(receive_task(), 2, 3, 0, Stream.RECEIVE, rank=1),
        SpanEvent(BACKWARD, 3, 7, 2, rank=1),
        SpanEvent(collective_task("dp"), 7.5, 8, 3, Stream.DP, rank=1),
        SpanEvent(OPTIMIZER_STEP, 8, 9, 4, rank=1),
    ),
    (0, 1),
    has_pipeline=True,
)


def test_the_path_follows_critical_predecessors_across_ranks() -> None:
    assert find_critical_path(CHAIN.trace).tolist() == [0, 2, 3, 4, 5]


def test_the_path_is_summed_by_category_with_explicit_waits() -> None:
    """2 + 4 of segments, 1 of a message, 0.5 of waiting before 0.5 of a reduction, 1 of the optimizer: 9 in all."""
    assert nonzero(path_category_totals(CHAIN.trace_table, CHAIN.segment_timing)) == {
        "compute": 6.0, "optimizer": 1.0, "exposed dp": 0.5, "exposed pp": 1.0, "wait": 0.5,
    }  # fmt: skip


def test_a_segment_on_the_path_is_split_into_its_operations() -> None:
    case = TraceCase((SpanEvent(ComputeTask(MIXED), 1, 10),), timings={MIXED: MIXED_TIMING})
    assert nonzero(path_category_totals(case.trace_table, case.segment_timing)) == {
        "compute": 5.0, "recompute": 1.5, "optimizer": 0.75, "exposed tp": 1.25, "exposed cp": 0.5, "wait": 1.0,
    }  # fmt: skip


def test_the_path_passes_through_the_blocking_rank_until_it_releases_the_others() -> None:
    """Rank 1 waits in a segment for rank 0, which works until 11; rank 1 continues at 7, with a reduction of 10 s."""
    events = (
        SpanEvent(FORWARD, 0, 11),
        SpanEvent(FORWARD, 0, 7, rank=1, waited=3.0, blocking_event=0),
        SpanEvent(collective_task("dp"), 7, 17, 1, Stream.DP, rank=1),
    )
    case = TraceCase(events, (0, 1))
    assert find_critical_path(case.trace).tolist() == [0, 1, 2]
    assert nonzero(path_category_totals(case.trace_table, case.segment_timing)) == {"compute": 7.0, "exposed dp": 10.0}


def test_an_empty_trace_has_an_empty_path() -> None:
    case = TraceCase(())
    assert find_critical_path(case.trace).tolist() == []
    assert nonzero(path_category_totals(case.trace_table, case.segment_timing)) == {}


@given(trace_cases())
def test_the_path_sums_to_the_makespan(case: TraceCase) -> None:
    """Also where predecessors form a cycle or overlap: then events count for the time that they add."""
    total = sum(path_category_totals(case.trace_table, case.segment_timing).values())
    assert total == pytest.approx(case.trace.makespan, rel=1e-12, abs=1e-12)
