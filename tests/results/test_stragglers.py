"""Who is slow, and who waits: from breakdowns made by hand."""

import numpy as np
import pytest

from clustersim.common.arrays import IntArray
from clustersim.program.task import Stream
from clustersim.results.stragglers import LEAST, MOST, Stragglers, find_stragglers, find_waits, moving_seconds
from clustersim.results.time_breakdown import Breakdown
from clustersim.results.time_categories import PARTS, Part
from tests.results.trace_cases import FORWARD, Case, Row, collective, receive, send

KIND = np.array([0, 0, 0, 1, 1, 1])
ONE = np.zeros(6, dtype=np.int64)


def parts(kernels: list[float], representative: list[int] | None = None) -> Breakdown:
    """Ranks that compute so long and wait for the rest of 10 s, half of it in the bubble."""
    represented = np.array(representative or range(len(kernels)))
    ranks, weights = np.unique(represented, return_counts=True)
    seconds = np.zeros((len(ranks), len(PARTS)))
    own = np.array(kernels)[ranks]
    seconds[:, Part.COMPUTE.place] = 0.75 * own
    seconds[:, Part.OPTIMIZER.place] = 0.25 * own
    seconds[:, Part.BUBBLE_STEADY.place] = seconds[:, Part.WAIT.place] = (10.0 - own) / 2
    return Breakdown(ranks, seconds, weights, represented)


def found_in(breakdown: Breakdown, kind: IntArray, moving: dict[int, tuple[float, float]] | None = None) -> Stragglers:
    """Stragglers where collectives and messages of some classes move so long, those of others not at all."""
    seconds = np.zeros((len(breakdown.ranks), 2))
    for place, both in (moving or {}).items():
        seconds[place] = both
    return find_stragglers(breakdown, kind, seconds)


def exposed(part: Part, longer: float, kernels: float = 4.0) -> Breakdown:
    """Six ranks of one program, the last of which is exposed for so long; steps take 10 s."""
    breakdown = parts([4.0] * 5 + [kernels])
    breakdown.seconds[5, part.place] += longer
    breakdown.seconds[5, Part.WAIT.place] -= longer
    return breakdown


def test_a_rank_is_slow_against_the_median_of_its_own_program() -> None:
    found = found_in(parts([4.0, 4.0, 4.0, 6.0, 6.6, 6.0]), KIND)
    (slow,) = found.slowest
    assert (slow.ranks, slow.kind, found.ranks) == ((4,), 1, 1)
    assert (slow.kernels, slow.excess, slow.waits) == pytest.approx((6.6, 0.1, 3.4))


def test_less_than_the_threshold_is_not_slow() -> None:
    assert found_in(parts([4.0, 4.0, 4.0 * (1 + LEAST * 0.99), 6.0, 6.0, 6.0]), KIND).slowest == ()


def test_the_slowest_come_first_and_no_more_than_a_few_are_named() -> None:
    kernels = [4.0] * 30 + [4.0 + 0.1 * place for place in range(1, 21)]
    found = found_in(parts(kernels), np.zeros(50, dtype=np.int64))
    assert found.ranks == 20
    assert [straggler.ranks[0] for straggler in found.slowest] == list(range(49, 49 - MOST, -1))


def test_ranks_of_one_class_are_one_straggler_and_count_as_many_for_the_median() -> None:
    """Ranks 1 and 2 stand behind 0: the median of (4, 4, 4, 5) is 4, not the 4.5 of the two classes."""
    found = found_in(parts([4.0, 4.0, 4.0, 5.0, 5.0], [0, 0, 0, 3, 3]), np.zeros(5, dtype=np.int64))
    assert [straggler.ranks for straggler in found.slowest] == [(3, 4)]
    assert found.slowest[0].excess == pytest.approx(0.25)


def test_waits_are_bubbles_and_wait_from_the_least_to_the_most() -> None:
    waits = find_waits(parts([4.0, 4.0, 7.0, 6.0, 6.0, 6.0], [0, 0, 2, 3, 3, 3]), KIND)
    assert waits.least == pytest.approx([3.0, 4.0])
    assert waits.mean == pytest.approx([5.0, 4.0])
    assert waits.most == pytest.approx([6.0, 4.0])


@pytest.mark.parametrize("part", [Part.EXPOSED_TP, Part.EXPOSED_CP])
def test_a_rank_whose_exchanges_inside_blocks_take_longer_by_a_part_of_the_step_is_a_straggler(part: Part) -> None:
    (slow,) = found_in(exposed(part, 0.3), ONE).slowest
    assert (slow.ranks, slow.delay, slow.computes_slowly) == ((5,), pytest.approx(0.3), False)
    assert found_in(exposed(part, 0.099), ONE).ranks == 0  # less than 1 % of 10 s


@pytest.mark.parametrize(("part", "column"), [(Part.EXPOSED_DP, 0), (Part.EXPOSED_PP, 1)])
def test_what_runs_beside_kernels_counts_as_far_as_it_moves_longer(part: Part, column: int) -> None:
    """Exposed for 0.3 s more. It moves as long as elsewhere: others were late. 0.2 s longer: that much is its own."""
    assert found_in(exposed(part, 0.3), ONE).ranks == 0
    moving = (0.2, 0.0) if column == 0 else (0.0, 0.2)
    (slow,) = found_in(exposed(part, 0.3), ONE, {5: moving}).slowest
    assert slow.delay == pytest.approx(0.2)


def test_communication_that_is_exposed_because_kernels_are_faster_makes_no_straggler() -> None:
    assert found_in(exposed(Part.EXPOSED_TP, 0.3, kernels=3.7), ONE).ranks == 0
    assert found_in(exposed(Part.EXPOSED_TP, 0.5, kernels=3.7), ONE).slowest[0].delay == pytest.approx(0.2)


def test_who_is_slow_in_both_ways_is_one_straggler_and_the_most_seconds_come_first() -> None:
    breakdown = exposed(Part.EXPOSED_TP, 0.3, kernels=4.4)
    breakdown.seconds[4, Part.COMPUTE.place] += 0.5
    first, second = found_in(breakdown, ONE).slowest
    assert (first.ranks, first.computes_slowly, first.delay) == ((5,), True, pytest.approx(0.3))
    assert (second.ranks, second.computes_slowly, second.delay) == ((4,), True, 0.0)


def test_collectives_and_received_messages_move_from_their_start_to_their_end() -> None:
    """Two steps: collectives of 2 and 1 s, one message received in 4 s; sends are their receivers' delay."""
    rows = (
        Row(collective("dp"), 0.0, 2.0, stream=Stream.DP),
        Row(collective("dp"), 3.0, 4.0, stream=Stream.DP),
        Row(receive(), 1.0, 5.0, stream=Stream.RECEIVE),
        Row(send(), 0.0, 9.0, stream=Stream.SEND_NEXT),
        Row(FORWARD, 0.0, 7.0),
    )
    assert moving_seconds(Case(rows, staged=True).trace, steps=2).tolist() == [[1.5, 2.0]]


def test_waits_that_are_only_rounding_are_none() -> None:
    breakdown = parts([10.0 - 1e-12, 4.0, 4.0])
    assert find_waits(breakdown, np.zeros(3, dtype=np.int64)).least.tolist() == [0.0]


def test_ranks_that_compute_nothing_are_not_slow() -> None:
    assert found_in(parts([0.0] * 6), KIND).slowest == ()
