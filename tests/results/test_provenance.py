"""On what do the durations rest?"""

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
from tests.results.random_trace_cases import MIXED, cases
from tests.results.trace_cases import FORWARD, Case, Row, collective, nonzero, timing

P = Provenance


def published(_: CommOp) -> CommTiming:
    return CommTiming(np.ones(1), P.PUBLISHED, Bottleneck.BANDWIDTH, "ring", "leaf")


def shares_of(case: Case) -> dict[str, float]:
    return provenance_shares(busy_time_items(case.joined, case.timing_of, published))


def test_busy_seconds_of_all_ranks_are_shared_out() -> None:
    """Three ranks like rank 0, and rank 1.

    Rank 0: 2 s measured, 2 s by roofline and 4 s of a reduction, published, half of it hidden; rank 1: 8 s by roofline.
    In all 6 measured, 6 + 8 roofline, 12 published of 32; waiting counts nowhere.
    """
    pair = timing((2, 0), (2, 0), (0, 0), (0, 0), (0, 0), (0, 0), provenance=(P.MEASURED,) + (P.ROOFLINE,) * 5)
    rows = (
        Row(ComputeTask(MIXED), 0, 5),
        Row(FORWARD, 0, 8, rank=1),
        Row(collective("dp"), 3, 7, -1, Stream.DP),
    )
    case = Case(rows, (0, 1, 0, 0), timings={MIXED: pair})
    assert shares_of(case) == {
        "measured": 6 / 32, "interpolated": 0.0, "fitted": 0.0, "derived": 0.0,
        "published": 12 / 32, "roofline": 14 / 32,
    }  # fmt: skip


def test_a_kernel_whose_host_is_late_counts_for_what_it_takes_itself() -> None:
    """Two kernels of 4 s, the measured one 3 s late: 1 s of 5 is measured."""
    pair = timing((4, 0), (4, 0), (0, 0), (0, 0), (0, 0), (0, 0), provenance=(P.MEASURED,) + (P.ROOFLINE,) * 5)
    late = replace(pair, launch_stalls=np.array([3.0, 0, 0, 0, 0, 0]))
    shares = shares_of(Case((Row(ComputeTask(MIXED), 0, 8),), timings={MIXED: late}))
    assert (shares["measured"], shares["roofline"]) == (1 / 5, 4 / 5)


@given(cases())
def test_shares_sum_to_one_unless_nothing_took_time(case: Case) -> None:
    shares = shares_of(case)
    assert sum(shares.values()) == pytest.approx(1.0) or not nonzero(shares)


@given(cases(), st.floats(0.0, 1.0))
def test_what_begins_before_a_time_and_behind_it_is_all(case: Case, part: float) -> None:
    at = part * case.trace.makespan
    whole, *parts = (
        Counter(
            {
                (busy_time_item.body, busy_time_item.provenance): busy_time_item.seconds
                for busy_time_item in busy_time_items(case.joined, case.timing_of, published, span)
            }
        )
        for span in (FULL_RUN, (0.0, at), (at, math.inf))
    )
    both = {item: parts[0][item] + parts[1][item] for item in whole}
    assert both == pytest.approx(dict(whole))
    assert not (parts[0].keys() | parts[1].keys()) - whole.keys()


def test_an_empty_trace_rests_on_nothing() -> None:
    case = Case(())
    assert not nonzero(shares_of(case))
    assert expected_error(busy_time_items(case.joined, case.timing_of, published)).unknown_share == 1


def test_measured_kernels_that_a_step_slows_are_counted_apart() -> None:
    """Of 16 s 4 were measured as 3.2 s alone and 2 s as they are; a modelled kernel's pace needs no word."""
    three = timing((4, 0), (2, 0), (2, 0), (8, 0), (0, 0), (0, 0), provenance=(P.MEASURED,) * 3 + (P.ROOFLINE,) * 3)
    paced = replace(three, in_situ_slowdown=(1.25, 1.0, 1.0, 1.25, 1.0, 1.0))
    case = Case((Row(ComputeTask(MIXED), 0, 16),), timings={MIXED: paced})
    assert in_situ_share(busy_time_items(case.joined, case.timing_of, published)) == InSituShare(4 / 16, 1.25)


def test_a_step_that_slows_nothing_measured_says_so() -> None:
    case = Case((Row(FORWARD, 0, 8),))
    assert in_situ_share(busy_time_items(case.joined, case.timing_of, published)) == InSituShare(0.0, 1.0)
