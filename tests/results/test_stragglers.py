"""Which ranks are stragglers, and which ranks wait: from hand-made breakdowns."""

import numpy as np
import pytest

from clustersim.common.arrays import IntArray
from clustersim.program.task import Stream
from clustersim.results.stragglers import (
    MAX_STRAGGLERS,
    MIN_EXCESS,
    StragglerReport,
    compute_wait_times,
    find_stragglers,
    transfer_seconds,
)
from clustersim.results.time_breakdown import TimeBreakdown
from clustersim.results.time_categories import TIME_CATEGORIES, TimeCategory
from tests.results.trace_cases import FORWARD, SpanEvent, TraceCase, collective_task, receive_task, send_task

PROGRAM_INDEX = np.array([0, 0, 0, 1, 1, 1])
SAME_PROGRAM = np.zeros(6, dtype=np.int64)


def breakdown_of_kernels(kernel_seconds: list[float], representative: list[int] | None = None) -> TimeBreakdown:
    """Ranks with these kernel seconds that wait for the remainder of 10 s, half of it in the bubble."""
    represented = np.array(representative or range(len(kernel_seconds)))
    ranks, weights = np.unique(represented, return_counts=True)
    seconds = np.zeros((len(ranks), len(TIME_CATEGORIES)))
    class_kernel_seconds = np.array(kernel_seconds)[ranks]
    seconds[:, TimeCategory.COMPUTE.index] = 0.75 * class_kernel_seconds
    seconds[:, TimeCategory.OPTIMIZER.index] = 0.25 * class_kernel_seconds
    seconds[:, TimeCategory.BUBBLE_STEADY.index] = seconds[:, TimeCategory.WAIT.index] = (
        10.0 - class_kernel_seconds
    ) / 2
    return TimeBreakdown(ranks, seconds, weights, represented)


def report_stragglers(
    breakdown: TimeBreakdown, program_index: IntArray, transfer_times: dict[int, tuple[float, float]] | None = None
) -> StragglerReport:
    """Stragglers; transfer_times: seconds of collectives and of messages by class, zero for the others."""
    seconds = np.zeros((len(breakdown.ranks), 2))
    for index, class_seconds in (transfer_times or {}).items():
        seconds[index] = class_seconds
    return find_stragglers(breakdown, program_index, seconds)


def exposed_breakdown(category: TimeCategory, delay: float, kernel_seconds: float = 4.0) -> TimeBreakdown:
    """Six ranks of one program, the last of which has more exposed communication; steps take 10 s."""
    breakdown = breakdown_of_kernels([4.0] * 5 + [kernel_seconds])
    breakdown.seconds[5, category.index] += delay
    breakdown.seconds[5, TimeCategory.WAIT.index] -= delay
    return breakdown


def test_a_straggler_is_slow_against_the_median_of_its_program() -> None:
    report = report_stragglers(breakdown_of_kernels([4.0, 4.0, 4.0, 6.0, 6.6, 6.0]), PROGRAM_INDEX)
    (slow,) = report.slowest
    assert (slow.ranks, slow.program_index, report.rank_count) == ((4,), 1, 1)
    assert (slow.kernel_seconds, slow.kernel_excess, slow.wait_seconds) == pytest.approx((6.6, 0.1, 3.4))


def test_an_excess_below_the_threshold_is_no_straggler() -> None:
    assert (
        report_stragglers(
            breakdown_of_kernels([4.0, 4.0, 4.0 * (1 + MIN_EXCESS * 0.99), 6.0, 6.0, 6.0]), PROGRAM_INDEX
        ).slowest
        == ()
    )


def test_stragglers_are_sorted_and_truncated() -> None:
    kernel_seconds = [4.0] * 30 + [4.0 + 0.1 * index for index in range(1, 21)]
    report = report_stragglers(breakdown_of_kernels(kernel_seconds), np.zeros(50, dtype=np.int64))
    assert report.rank_count == 20
    assert [straggler.ranks[0] for straggler in report.slowest] == list(range(49, 49 - MAX_STRAGGLERS, -1))


def test_a_class_is_one_straggler_and_weighted_by_its_ranks_in_the_median() -> None:
    """Rank 0 represents ranks 1 and 2: the median of (4, 4, 4, 5, 5) is 4, not the 4.5 of the two classes."""
    report = report_stragglers(
        breakdown_of_kernels([4.0, 4.0, 4.0, 5.0, 5.0], [0, 0, 0, 3, 3]), np.zeros(5, dtype=np.int64)
    )
    assert [straggler.ranks for straggler in report.slowest] == [(3, 4)]
    assert report.slowest[0].kernel_excess == pytest.approx(0.25)


def test_wait_times_include_bubbles_with_minimum_mean_and_maximum() -> None:
    waits = compute_wait_times(breakdown_of_kernels([4.0, 4.0, 7.0, 6.0, 6.0, 6.0], [0, 0, 2, 3, 3, 3]), PROGRAM_INDEX)
    assert waits.minimum == pytest.approx([3.0, 4.0])
    assert waits.mean == pytest.approx([5.0, 4.0])
    assert waits.maximum == pytest.approx([6.0, 4.0])


@pytest.mark.parametrize("category", [TimeCategory.EXPOSED_TP, TimeCategory.EXPOSED_CP])
def test_slow_tp_or_cp_communication_makes_a_straggler(category: TimeCategory) -> None:
    (slow,) = report_stragglers(exposed_breakdown(category, 0.3), SAME_PROGRAM).slowest
    assert (slow.ranks, slow.comm_delay, slow.has_slow_kernels) == ((5,), pytest.approx(0.3), False)
    assert report_stragglers(exposed_breakdown(category, 0.099), SAME_PROGRAM).rank_count == 0  # less than 1 % of 10 s


@pytest.mark.parametrize(("category", "column"), [(TimeCategory.EXPOSED_DP, 0), (TimeCategory.EXPOSED_PP, 1)])
def test_exposed_dp_and_pp_count_only_as_far_as_transfers_take_longer(category: TimeCategory, column: int) -> None:
    """Exposed for 0.3 s more. With unchanged transfer time other ranks were late; a transfer longer by 0.2 s counts."""
    assert report_stragglers(exposed_breakdown(category, 0.3), SAME_PROGRAM).rank_count == 0
    transfer_times = (0.2, 0.0) if column == 0 else (0.0, 0.2)
    (slow,) = report_stragglers(exposed_breakdown(category, 0.3), SAME_PROGRAM, {5: transfer_times}).slowest
    assert slow.comm_delay == pytest.approx(0.2)


def test_communication_exposed_by_faster_kernels_makes_no_straggler() -> None:
    assert (
        report_stragglers(exposed_breakdown(TimeCategory.EXPOSED_TP, 0.3, kernel_seconds=3.7), SAME_PROGRAM).rank_count
        == 0
    )
    assert report_stragglers(exposed_breakdown(TimeCategory.EXPOSED_TP, 0.5, kernel_seconds=3.7), SAME_PROGRAM).slowest[
        0
    ].comm_delay == pytest.approx(0.2)


def test_slow_compute_and_communication_make_one_straggler() -> None:
    breakdown = exposed_breakdown(TimeCategory.EXPOSED_TP, 0.3, kernel_seconds=4.4)
    breakdown.seconds[4, TimeCategory.COMPUTE.index] += 0.5
    first, second = report_stragglers(breakdown, SAME_PROGRAM).slowest
    assert (first.ranks, first.has_slow_kernels, first.comm_delay) == ((5,), True, pytest.approx(0.3))
    assert (second.ranks, second.has_slow_kernels, second.comm_delay) == ((4,), True, 0.0)


def test_transfer_seconds_are_of_collectives_and_received_messages() -> None:
    """Two steps: collectives of 2 and 1 s, one message received in 4 s; sends are their receivers' delay."""
    events = (
        SpanEvent(collective_task("dp"), 0.0, 2.0, stream=Stream.DP),
        SpanEvent(collective_task("dp"), 3.0, 4.0, stream=Stream.DP),
        SpanEvent(receive_task(), 1.0, 5.0, stream=Stream.RECEIVE),
        SpanEvent(send_task(), 0.0, 9.0, stream=Stream.SEND_NEXT),
        SpanEvent(FORWARD, 0.0, 7.0),
    )
    assert transfer_seconds(TraceCase(events, has_pipeline=True).trace, step_count=2).tolist() == [[1.5, 2.0]]


def test_waits_within_rounding_error_are_zero() -> None:
    breakdown = breakdown_of_kernels([10.0 - 1e-12, 4.0, 4.0])
    assert compute_wait_times(breakdown, np.zeros(3, dtype=np.int64)).minimum.tolist() == [0.0]


def test_ranks_without_compute_are_no_stragglers() -> None:
    assert report_stragglers(breakdown_of_kernels([0.0] * 6), PROGRAM_INDEX).slowest == ()
