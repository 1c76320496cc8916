"""Predictions against published nccl-tests tables, and that the shipped constants are the fitted ones."""

import numpy as np
import pytest

from calibrate.fit_collectives import Errors, compare, fit, read_benchmarks
from clustersim.collectives.library import load_library
from clustersim.program.task import Collective

LIBRARY = load_library("nccl")
SURVEYS = {table: table.survey(LIBRARY) for table in read_benchmarks()}
ERRORS = [compare(table, choices) for table, choices in SURVEYS.items()]


def mean(errors: list[Errors], *, large: bool) -> float:
    return float(np.nanmean([each.mape(large=large) for each in errors]))


@pytest.mark.parametrize("gpu", ["a100", "h100", "h200"])
def test_sizes_from_1_mib_on_are_predicted_within_15_percent(gpu):
    assert mean([each for each in ERRORS if each.benchmark.gpu.startswith(gpu)], large=True) <= 15


def test_b200_collectives_are_predicted_within_15_percent():
    """Send/recv is not: from 64 KiB to 512 MiB the table runs at an eighth of the link's rate, for no known reason.

    Nor is the table over EFA, whose latency is not modelled.
    """
    collectives = [
        each
        for each in ERRORS
        if each.benchmark.gpu == "b200"
        and each.benchmark.collective is not Collective.SEND_RECV
        and each.benchmark.fitted
    ]
    assert mean(collectives, large=True) <= 15
    assert mean(collectives, large=False) <= 30


def test_large_messages_approach_the_measured_rate():
    """From 1 GiB on only bandwidths count."""
    for each in ERRORS:
        large = [ratio for size, ratio in zip(each.benchmark.sizes, each.ratios, strict=True) if size >= 2**30]
        if large and each.benchmark.fitted:
            assert np.mean(large) == pytest.approx(1, abs=0.25)


def test_the_shipped_constants_are_the_fitted_ones():
    best, _ = fit(SURVEYS, LIBRARY)
    assert best == LIBRARY
