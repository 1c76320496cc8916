"""Provenance of durations: which share is measured, published, modelled."""

import math
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from clustersim.cost.timing import Bottleneck, CommTiming, Provenance
from clustersim.program.task import CommOp, ComputeTask, Stream
from clustersim.results.provenance import InSituShare, busy_time_items, expected_error, in_situ_share, provenance_shares
from clustersim.results.trace_table import FULL_RUN
from tests.results.random_trace_cases import MIXED, trace_cases
from tests.results.trace_cases import FORWARD, SpanEvent, TraceCase, build_timing, collective_task, nonzero

P = Provenance


def published_timing(_: CommOp) -> CommTiming:
    return CommTiming(np.ones(1), P.PUBLISHED, Bottleneck.BANDWIDTH, "ring", "leaf")


def case_provenance_shares(case: TraceCase) -> dict[str, float]:
    return provenance_shares(busy_time_items(case.trace_table, case.segment_timing, published_timing))


def test_provenance_shares_are_of_the_busy_seconds_of_all_ranks() -> None:
    """Three ranks like rank 0, and rank 1.

    Rank 0: 2 s measured, 2 s by roofline and 4 s of a reduction, published, half of it hidden; rank 1: 8 s by
    roofline. In total 6 measured, 6 + 8 roofline, 12 published of 32; waiting does not count.
    """
    segment_timing = build_timing(
        (2, 0), (2, 0), (0, 0), (0, 0), (0, 0), (0, 0), provenance=(P.MEASURED,) + (P.ROOFLINE,) * 5
    )
    events = (
        SpanEvent(ComputeTask(MIXED), 0, 5),
        SpanEvent(FORWARD, 0, 8, rank=1),
        SpanEvent(collective_task("dp"), 3, 7, -1, Stream.DP),
    )
    case = TraceCase(events, (0, 1, 0, 0), timings={MIXED: segment_timing})
    assert case_provenance_shares(case) == {
        "measured": 6 / 32, "interpolated": 0.0, "fitted": 0.0, "derived": 0.0,
        "published": 12 / 32, "roofline": 14 / 32,
    }  # fmt: skip


def test_launch_stalls_do_not_count_for_provenance() -> None:
    """Two kernels of 4 s, the measured one with a launch stall of 3 s: 1 s of 5 is measured."""
    segment_timing = build_timing(
        (4, 0), (4, 0), (0, 0), (0, 0), (0, 0), (0, 0), provenance=(P.MEASURED,) + (P.ROOFLINE,) * 5
    )
    stalled_timing = replace(segment_timing, launch_stalls=np.array([3.0, 0, 0, 0, 0, 0]))
    shares = case_provenance_shares(TraceCase((SpanEvent(ComputeTask(MIXED), 0, 8),), timings={MIXED: stalled_timing}))
    assert (shares["measured"], shares["roofline"]) == (1 / 5, 4 / 5)


@given(trace_cases())
def test_shares_sum_to_one_unless_all_durations_are_zero(case: TraceCase) -> None:
    shares = case_provenance_shares(case)
    assert sum(shares.values()) == pytest.approx(1.0) or not nonzero(shares)


@given(trace_cases(), st.floats(0.0, 1.0))
def test_items_before_and_after_a_time_sum_to_all(case: TraceCase, fraction: float) -> None:
    split_time = fraction * case.trace.makespan
    full, *halves = (
        Counter(
            {
                (item.body, item.provenance): item.seconds
                for item in busy_time_items(case.trace_table, case.segment_timing, published_timing, span)
            }
        )
        for span in (FULL_RUN, (0.0, split_time), (split_time, math.inf))
    )
    summed = {key: halves[0][key] + halves[1][key] for key in full}
    assert summed == pytest.approx(dict(full))
    assert not (halves[0].keys() | halves[1].keys()) - full.keys()


def test_an_empty_trace_has_no_provenance() -> None:
    case = TraceCase(())
    assert not nonzero(case_provenance_shares(case))
    assert expected_error(busy_time_items(case.trace_table, case.segment_timing, published_timing)).unknown_share == 1


def test_measured_kernels_with_in_situ_slowdown_are_reported() -> None:
    """Of 16 s, 4 were measured as 3.2 s standalone, 2 s without slowdown; modelled kernels do not count."""
    segment_timing = build_timing(
        (4, 0), (2, 0), (2, 0), (8, 0), (0, 0), (0, 0), provenance=(P.MEASURED,) * 3 + (P.ROOFLINE,) * 3
    )
    slowed_timing = replace(segment_timing, in_situ_slowdown=(1.25, 1.0, 1.0, 1.25, 1.0, 1.0))
    case = TraceCase((SpanEvent(ComputeTask(MIXED), 0, 16),), timings={MIXED: slowed_timing})
    assert in_situ_share(busy_time_items(case.trace_table, case.segment_timing, published_timing)) == InSituShare(
        4 / 16, 1.25
    )


def test_without_in_situ_slowdown_the_share_is_zero() -> None:
    case = TraceCase((SpanEvent(FORWARD, 0, 8),))
    assert in_situ_share(busy_time_items(case.trace_table, case.segment_timing, published_timing)) == InSituShare(
        0.0, 1.0
    )
