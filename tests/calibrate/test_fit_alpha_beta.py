"""Latency and bandwidth are recovered from times that were generated with them."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from calibrate.collectives.tables import fit_table
from calibrate.fit.alpha_beta import fit_collectives
from clustersim.cost.calibration_record import CollectiveCall, CollectiveSample, TimeStatistics
from clustersim.program.task import CollectiveType

SIZES = [float(2**power) for power in range(10, 31)]
NOISE_STD = 0.02
TOLERANCE = 0.05

ALPHAS = st.floats(1e-6, 1e-2)
HALF_BANDWIDTH_BYTES = st.floats(
    16e3, 64e6
)  # payload whose transfer takes as long as the latency; SIZES extend well beyond it on both sides


def collective_samples(
    sizes: list[float], seconds: list[float], shape: tuple[int, int] = (8, 1)
) -> list[CollectiveSample]:
    return [
        CollectiveSample(CollectiveCall(CollectiveType.ALL_REDUCE, size, *shape), TimeStatistics(time, time, time, 1))
        for size, time in zip(sizes, seconds, strict=True)
    ]


@given(alpha=ALPHAS, half=HALF_BANDWIDTH_BYTES)
def test_exact_times_recover_alpha_and_beta(alpha: float, half: float) -> None:
    beta = half / alpha
    (fit,) = fit_collectives(collective_samples(SIZES, [alpha + size / beta for size in SIZES]))
    assert fit.alpha == pytest.approx(alpha, rel=1e-6)
    assert fit.beta == pytest.approx(beta, rel=1e-6)
    assert fit.residual.samples == len(SIZES)
    assert fit.residual.error < 1e-6
    assert fit.residual.leave_one_out_error < 1e-6


@given(alpha=ALPHAS, half=HALF_BANDWIDTH_BYTES, seed=st.integers(0, 2**32 - 1))
def test_noisy_times_recover_alpha_and_beta_within_tolerance(alpha: float, half: float, seed: int) -> None:
    """Every constant is fitted to at least four samples with 2 % noise (standard deviation).

    So four standard errors are 4 %.
    """
    beta = half / alpha
    factors = 1.0 + NOISE_STD * np.random.default_rng(seed).uniform(-np.sqrt(3), np.sqrt(3), len(SIZES))
    (fit,) = fit_collectives(
        collective_samples(SIZES, [float((alpha + size / beta) * f) for size, f in zip(SIZES, factors, strict=True)])
    )
    assert fit.alpha == pytest.approx(alpha, rel=TOLERANCE)
    assert fit.beta == pytest.approx(beta, rel=TOLERANCE)
    assert fit.residual.error <= fit.residual.leave_one_out_error <= 2 * NOISE_STD


@given(seconds=st.lists(st.floats(1e-6, 1e-2), min_size=5, max_size=5))
def test_fit_minimizes_the_relative_squared_error(seconds: list[float]) -> None:
    sizes = SIZES[:5]

    def misfit(alpha: float, inverse_bandwidth: float) -> float:
        return sum(
            ((alpha + inverse_bandwidth * size) / time - 1.0) ** 2 for size, time in zip(sizes, seconds, strict=True)
        )

    for fit in fit_collectives(collective_samples(sizes, seconds)):
        best = misfit(fit.alpha, 1.0 / fit.beta)
        assert fit.alpha >= 0.0
        for alpha in (fit.alpha * 0.99, fit.alpha * 1.01, fit.alpha + 1e-9):
            for inverse_bandwidth in (0.99 / fit.beta, 1.0 / fit.beta, 1.01 / fit.beta):
                assert misfit(alpha, inverse_bandwidth) >= best * (1 - 1e-9) - 1e-15


def test_superlinear_times_have_zero_latency() -> None:
    (fit,) = fit_collectives(collective_samples(SIZES[:6], [size**1.5 * 1e-12 for size in SIZES[:6]]))
    assert fit.alpha == 0.0


def test_non_increasing_times_have_no_fit() -> None:
    assert fit_collectives(collective_samples(SIZES[:5], [5e-4, 4e-4, 3e-4, 3e-4, 2e-4])) == ()


def test_two_payloads_are_not_fitted() -> None:
    assert fit_collectives(collective_samples([1e3, 1e6, 1e6], [1e-5, 1e-4, 1.1e-4])) == ()
    assert "three payloads" in fit_table(())


def test_constants_per_collective_and_group_shape() -> None:
    intra_node, inter_node = [1e-5 + size / 1e11 for size in SIZES], [1e-4 + size / 1e10 for size in SIZES]
    fits = fit_collectives([*collective_samples(SIZES, intra_node), *collective_samples(SIZES, inter_node, (16, 2))])
    assert [(fit.ranks, fit.nodes) for fit in fits] == [(8, 1), (16, 2)]
    assert [round(fit.beta / 1e9) for fit in fits] == [100, 10]
    assert "16 ranks, 2 nodes" in fit_table(fits)
