"""Who is slow, and who waits: from breakdowns made by hand."""

import numpy as np
import pytest

from clustersim.analysis.breakdown import Breakdown
from clustersim.analysis.parts import PARTS, Part
from clustersim.analysis.stragglers import LEAST, MOST, find_stragglers, find_waits

KIND = np.array([0, 0, 0, 1, 1, 1])


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


def test_a_rank_is_slow_against_the_median_of_its_own_program() -> None:
    found = find_stragglers(parts([4.0, 4.0, 4.0, 6.0, 6.6, 6.0]), KIND)
    (slow,) = found.slowest
    assert (slow.ranks, slow.kind, found.ranks) == ((4,), 1, 1)
    assert (slow.kernels, slow.excess, slow.waits) == pytest.approx((6.6, 0.1, 3.4))


def test_less_than_the_threshold_is_not_slow() -> None:
    assert find_stragglers(parts([4.0, 4.0, 4.0 * (1 + LEAST * 0.99), 6.0, 6.0, 6.0]), KIND).slowest == ()


def test_the_slowest_come_first_and_no_more_than_a_few_are_named() -> None:
    kernels = [4.0] * 30 + [4.0 + 0.1 * place for place in range(1, 21)]
    found = find_stragglers(parts(kernels), np.zeros(50, dtype=np.int64))
    assert found.ranks == 20
    assert [each.ranks[0] for each in found.slowest] == list(range(49, 49 - MOST, -1))


def test_ranks_of_one_class_are_one_straggler_and_count_as_many_for_the_median() -> None:
    """Ranks 1 and 2 stand behind 0: the median of (4, 4, 4, 5) is 4, not the 4.5 of the two classes."""
    found = find_stragglers(parts([4.0, 4.0, 4.0, 5.0, 5.0], [0, 0, 0, 3, 3]), np.zeros(5, dtype=np.int64))
    assert [each.ranks for each in found.slowest] == [(3, 4)]
    assert found.slowest[0].excess == pytest.approx(0.25)


def test_waits_are_bubbles_and_wait_from_the_least_to_the_most() -> None:
    waits = find_waits(parts([4.0, 4.0, 7.0, 6.0, 6.0, 6.0], [0, 0, 2, 3, 3, 3]), KIND)
    assert waits.least == pytest.approx([3.0, 4.0])
    assert waits.mean == pytest.approx([5.0, 4.0])
    assert waits.most == pytest.approx([6.0, 4.0])


def test_ranks_that_compute_nothing_are_not_slow() -> None:
    assert find_stragglers(parts([0.0] * 6), KIND).slowest == ()
