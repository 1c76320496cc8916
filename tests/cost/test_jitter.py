"""Jitter factors of kernels: their distributions, and independence between ranks and seeds."""

from math import sqrt

import numpy as np
import pytest

from clustersim.common.arrays import FloatArray
from clustersim.cost.jitter import Distribution, Jitter

DRAWS = 200_000
CASES = [
    (Distribution.NORMAL, 0.05),
    (Distribution.LOGNORMAL, 0.05),
    (Distribution.LOGNORMAL, 0.5),
    (Distribution.EXPONENTIAL, 0.05),
    (Distribution.EXPONENTIAL, 0.5),
]
KURTOSIS = {Distribution.NORMAL: 3.0, Distribution.EXPONENTIAL: 9.0}


def kurtosis(distribution: Distribution, std: float) -> float:
    """Fourth central moment over the squared variance; lognormal: w⁴ + 2w³ + 3w² - 3 with w = 1 + std²."""
    w = 1 + std**2
    return KURTOSIS.get(distribution, w**4 + 2 * w**3 + 3 * w**2 - 3)


def drawn_factors(distribution: Distribution, std: float) -> FloatArray:
    return Jitter(std, distribution, seed=1).rank_factors(3, DRAWS)


@pytest.mark.parametrize(("distribution", "std"), CASES)
def test_the_mean_is_what_the_distribution_says(distribution: Distribution, std: float) -> None:
    """1, or 1 + std where interruptions only ever cost time; within four standard errors std/√n."""
    mean = 1 + std if distribution is Distribution.EXPONENTIAL else 1.0
    assert abs(drawn_factors(distribution, std).mean() - mean) < 4 * std / sqrt(DRAWS)


@pytest.mark.parametrize(("distribution", "std"), CASES)
def test_the_deviation_is_the_requested_one(distribution: Distribution, std: float) -> None:
    """Within four standard errors of a standard deviation, std √((kurtosis - 1)/n)/2."""
    error = std * sqrt((kurtosis(distribution, std) - 1) / DRAWS) / 2
    assert abs(drawn_factors(distribution, std).std() - std) < 4 * error


@pytest.mark.parametrize(
    ("distribution", "skewness"),
    [(Distribution.NORMAL, 0.0), (Distribution.LOGNORMAL, 0.301), (Distribution.EXPONENTIAL, 2.0)],
)
def test_the_shape_is_that_of_the_distribution(distribution: Distribution, skewness: float) -> None:
    """Skewness at std 0.1: 0; (w + 2) √(w - 1) with w = 1 + std² (so 3.01 · 0.1 = 0.301); 2.

    Of n normal draws it errs by √(6/n) = 0.005; the tail of the exponential costs it about ten times as much.
    """
    factors = drawn_factors(distribution, 0.1)
    assert (((factors - factors.mean()) / factors.std()) ** 3).mean() == pytest.approx(skewness, abs=0.05)


def test_interruptions_never_save_time() -> None:
    assert drawn_factors(Distribution.EXPONENTIAL, 0.5).min() >= 1.0


def test_lognormal_factors_are_positive_however_wide() -> None:
    assert drawn_factors(Distribution.LOGNORMAL, 5.0).min() > 0.0


@pytest.mark.parametrize("distribution", Distribution)
def test_without_deviation_nothing_varies(distribution: Distribution) -> None:
    assert Jitter(0.0, distribution).rank_factors(0, 100).tolist() == [1.0] * 100


@pytest.mark.parametrize("distribution", Distribution)
@pytest.mark.parametrize("count", [0, 1, 2, 17, 999])
def test_the_first_factors_do_not_depend_on_the_count(distribution: Distribution, count: int) -> None:
    jitter = Jitter(0.1, distribution, seed=2)
    assert jitter.rank_factors(5, count).tolist() == jitter.rank_factors(5, 1000)[:count].tolist()


@pytest.mark.parametrize("distribution", Distribution)
def test_factors_of_a_rank_do_not_depend_on_other_draws(distribution: Distribution) -> None:
    jitter = Jitter(0.1, distribution)
    expected = jitter.rank_factors(7, 50).tolist()
    for other in (0, 6, 8, 7):
        jitter.rank_factors(other, 100)
    assert jitter.rank_factors(7, 50).tolist() == expected
    assert Jitter(0.1, distribution).rank_factors(7, 50).tolist() == expected


@pytest.mark.parametrize("distribution", Distribution)
def test_ranks_and_seeds_draw_independently(distribution: Distribution) -> None:
    """All pairs of 4 ranks at 3 seeds are uncorrelated, to five of the 1/√n by which a correlation of n draws errs."""
    draws = 20_000
    samples = [Jitter(0.1, distribution, seed).rank_factors(rank, draws) for seed in range(3) for rank in range(4)]
    correlation = np.corrcoef(np.stack(samples)) - np.eye(len(samples))
    assert np.abs(correlation).max() < 5 / sqrt(draws)


def test_successive_draws_of_a_rank_are_independent() -> None:
    factors = Jitter(0.1).rank_factors(0, 20_000) - 1.0
    assert abs(np.corrcoef(factors[1:], factors[:-1])[0, 1]) < 5 / sqrt(20_000)
