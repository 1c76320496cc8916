"""Durations times the step's error: limits in closed form, and a Monte Carlo simulation as an independent check."""

from statistics import NormalDist

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from clustersim.uncertainty.scaled_durations import scaled_percentiles
from tests.conftest import examples

INTERVAL = (5.0, 95.0)  # 90 % of the error lies inside the prediction interval
DURATIONS = st.lists(st.floats(1e-3, 1e6), min_size=1, max_size=20)
ENDS = st.tuples(st.floats(0.1, 1.0), st.floats(1.001, 10.0))


@given(st.floats(1e-3, 1e6), st.integers(1, 9), ENDS)
@examples(100)
def test_equal_durations_have_the_interval_of_the_step(duration: float, runs: int, ends: tuple[float, float]) -> None:
    assert scaled_percentiles([duration] * runs, ends, (5, 50, 95)) == pytest.approx(
        (duration * ends[0], duration, duration * ends[1])
    )


@given(DURATIONS)
@examples(100)
def test_without_error_the_durations_are_as_simulated(durations: list[float]) -> None:
    assert scaled_percentiles(durations, (1.0, 1.0), INTERVAL) == pytest.approx(np.percentile(durations, INTERVAL))


@given(DURATIONS, ENDS, st.floats(0.01, 100.0))
@examples(100)
def test_percentiles_scale_with_the_durations_and_rise(
    durations: list[float], ends: tuple[float, float], scale: float
) -> None:
    percentiles = scaled_percentiles(durations, ends, (5, 50, 95))
    assert list(percentiles) == sorted(percentiles)
    scaled = scaled_percentiles([scale * duration for duration in durations], ends, (5, 50, 95))
    assert scaled == pytest.approx([scale * value for value in percentiles])


@given(DURATIONS, ENDS)
@examples(100)
def test_the_interval_lies_within_the_product_of_the_extremes(
    durations: list[float], ends: tuple[float, float]
) -> None:
    low, high = scaled_percentiles(durations, ends, INTERVAL)
    assert min(durations) * ends[0] * (1 - 1e-9) <= low
    assert high <= max(durations) * ends[1] * (1 + 1e-9)


def test_percentiles_are_those_of_simulated_products() -> None:
    generator = np.random.default_rng(0)
    durations = [80.0, 90.0, 100.0, 160.0]
    slow = np.log(1.5) / NormalDist().inv_cdf(0.95)
    normal = generator.standard_normal(400_000)
    products = generator.choice(durations, 400_000) * np.exp(np.where(normal < 0.0, slow / 2.0, slow) * normal)
    assert scaled_percentiles(durations, (1.5**-0.5, 1.5), (5, 50, 95)) == pytest.approx(
        np.percentile(products, (5, 50, 95)), rel=5e-3
    )
