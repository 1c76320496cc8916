"""Who is slow, and who waits: from breakdowns made by hand."""

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
from tests.results.trace_cases import FORWARD, Case, Row, collective, receive, send

KIND = np.array([0, 0, 0, 1, 1, 1])
ONE = np.zeros(6, dtype=np.int64)


def parts(kernels: list[float], representative: list[int] | None = None) -> TimeBreakdown:
    """Ranks that compute so long and wait for the rest of 10 s, half of it in the bubble."""
    represented = np.array(representative or range(len(kernels)))
    ranks, weights = np.unique(represented, return_counts=True)
    seconds = np.zeros((len(ranks), len(TIME_CATEGORIES)))
    own = np.array(kernels)[ranks]
    seconds[:, TimeCategory.COMPUTE.index] = 0.75 * own
    seconds[:, TimeCategory.OPTIMIZER.index] = 0.25 * own
    seconds[:, TimeCategory.BUBBLE_STEADY.index] = seconds[:, TimeCategory.WAIT.index] = (10.0 - own) / 2
    return TimeBreakdown(ranks, seconds, weights, represented)


def found_in(
    breakdown: TimeBreakdown, kind: IntArray, moving: dict[int, tuple[float, float]] | None = None
) -> StragglerReport:
    """Stragglers where collectives and messages of some classes move so long, those of others not at all."""
    seconds = np.zeros((len(breakdown.ranks), 2))
    for place, both in (moving or {}).items():
        seconds[place] = both
    return find_stragglers(breakdown, kind, seconds)


def exposed(part: TimeCategory, longer: float, kernels: float = 4.0) -> TimeBreakdown:
    """Six ranks of one program, the last of which is exposed for so long; steps take 10 s."""
    breakdown = parts([4.0] * 5 + [kernels])
    breakdown.seconds[5, part.index] += longer
    breakdown.seconds[5, TimeCategory.WAIT.index] -= longer
    return breakdown


def test_a_rank_is_slow_against_the_median_of_its_own_program() -> None:
    found = found_in(parts([4.0, 4.0, 4.0, 6.0, 6.6, 6.0]), KIND)
    (slow,) = found.slowest
    assert (slow.ranks, slow.program_index, found.rank_count) == ((4,), 1, 1)
    assert (slow.kernel_seconds, slow.kernel_excess, slow.wait_seconds) == pytest.approx((6.6, 0.1, 3.4))


def test_less_than_the_threshold_is_not_slow() -> None:
    assert found_in(parts([4.0, 4.0, 4.0 * (1 + MIN_EXCESS * 0.99), 6.0, 6.0, 6.0]), KIND).slowest == ()


def test_the_slowest_come_first_and_no_more_than_a_few_are_named() -> None:
    kernels = [4.0] * 30 + [4.0 + 0.1 * place for place in range(1, 21)]
    found = found_in(parts(kernels), np.zeros(50, dtype=np.int64))
    assert found.rank_count == 20
    assert [straggler.ranks[0] for straggler in found.slowest] == list(range(49, 49 - MAX_STRAGGLERS, -1))


def test_ranks_of_one_class_are_one_straggler_and_count_as_many_for_the_median() -> None:
    """Ranks 1 and 2 stand behind 0: the median of (4, 4, 4, 5) is 4, not the 4.5 of the two classes."""
    found = found_in(parts([4.0, 4.0, 4.0, 5.0, 5.0], [0, 0, 0, 3, 3]), np.zeros(5, dtype=np.int64))
    assert [straggler.ranks for straggler in found.slowest] == [(3, 4)]
    assert found.slowest[0].kernel_excess == pytest.approx(0.25)


def test_waits_are_bubbles_and_wait_from_the_least_to_the_most() -> None:
    waits = compute_wait_times(parts([4.0, 4.0, 7.0, 6.0, 6.0, 6.0], [0, 0, 2, 3, 3, 3]), KIND)
    assert waits.minimum == pytest.approx([3.0, 4.0])
    assert waits.mean == pytest.approx([5.0, 4.0])
    assert waits.maximum == pytest.approx([6.0, 4.0])


@pytest.mark.parametrize("part", [TimeCategory.EXPOSED_TP, TimeCategory.EXPOSED_CP])
def test_a_rank_whose_exchanges_inside_blocks_take_longer_by_a_part_of_the_step_is_a_straggler(
    part: TimeCategory,
) -> None:
    (slow,) = found_in(exposed(part, 0.3), ONE).slowest
    assert (slow.ranks, slow.comm_delay, slow.has_slow_kernels) == ((5,), pytest.approx(0.3), False)
    assert found_in(exposed(part, 0.099), ONE).rank_count == 0  # less than 1 % of 10 s


@pytest.mark.parametrize(("part", "column"), [(TimeCategory.EXPOSED_DP, 0), (TimeCategory.EXPOSED_PP, 1)])
def test_what_runs_beside_kernels_counts_as_far_as_it_moves_longer(part: TimeCategory, column: int) -> None:
    """Exposed for 0.3 s more. It moves as long as elsewhere: others were late. 0.2 s longer: that much is its own."""
    assert found_in(exposed(part, 0.3), ONE).rank_count == 0
    moving = (0.2, 0.0) if column == 0 else (0.0, 0.2)
    (slow,) = found_in(exposed(part, 0.3), ONE, {5: moving}).slowest
    assert slow.comm_delay == pytest.approx(0.2)


def test_communication_that_is_exposed_because_kernels_are_faster_makes_no_straggler() -> None:
    assert found_in(exposed(TimeCategory.EXPOSED_TP, 0.3, kernels=3.7), ONE).rank_count == 0
    assert found_in(exposed(TimeCategory.EXPOSED_TP, 0.5, kernels=3.7), ONE).slowest[0].comm_delay == pytest.approx(0.2)


def test_who_is_slow_in_both_ways_is_one_straggler_and_the_most_seconds_come_first() -> None:
    breakdown = exposed(TimeCategory.EXPOSED_TP, 0.3, kernels=4.4)
    breakdown.seconds[4, TimeCategory.COMPUTE.index] += 0.5
    first, second = found_in(breakdown, ONE).slowest
    assert (first.ranks, first.has_slow_kernels, first.comm_delay) == ((5,), True, pytest.approx(0.3))
    assert (second.ranks, second.has_slow_kernels, second.comm_delay) == ((4,), True, 0.0)


def test_collectives_and_received_messages_move_from_their_start_to_their_end() -> None:
    """Two steps: collectives of 2 and 1 s, one message received in 4 s; sends are their receivers' delay."""
    rows = (
        Row(collective("dp"), 0.0, 2.0, stream=Stream.DP),
        Row(collective("dp"), 3.0, 4.0, stream=Stream.DP),
        Row(receive(), 1.0, 5.0, stream=Stream.RECEIVE),
        Row(send(), 0.0, 9.0, stream=Stream.SEND_NEXT),
        Row(FORWARD, 0.0, 7.0),
    )
    assert transfer_seconds(Case(rows, staged=True).trace, step_count=2).tolist() == [[1.5, 2.0]]


def test_waits_that_are_only_rounding_are_none() -> None:
    breakdown = parts([10.0 - 1e-12, 4.0, 4.0])
    assert compute_wait_times(breakdown, np.zeros(3, dtype=np.int64)).minimum.tolist() == [0.0]


def test_ranks_that_compute_nothing_are_not_slow() -> None:
    assert found_in(parts([0.0] * 6), KIND).slowest == ()
