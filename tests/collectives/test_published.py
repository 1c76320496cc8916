"""Predictions against published nccl-tests tables, and that the shipped constants are the fitted ones."""

import numpy as np
import pytest

from calibrate.fit.collectives import compare, fit, judge, survey
from clustersim.collectives.library import load_library

LIBRARY = load_library("nccl")
SURVEYS = survey(LIBRARY)
ERRORS = [compare(table, choices) for table, choices in SURVEYS.items()]


def test_collectives_are_predicted_within_12_percent_from_1_mib_on_and_25_below():
    """Means over all tables of a GPU type, each predicted with constants fitted to all other tables.

    Among them are tables that no fit has seen: over AWS EFA, and with the host's work before each call.
    """
    qualities = judge(LIBRARY)
    assert {each.accelerator for each in qualities} == {"a100", "h100", "h200", "b200"}
    assert sum(each.n for each in qualities) == sum(len(table.sizes) for table in SURVEYS)
    for each in qualities:
        bound = 0.12 if ">=" in each.kind else 0.25
        assert max(each.mape, each.loo_mape) <= bound, each


def test_messages_on_few_channels_are_predicted():
    """Send/recv among 8 B200: 64 MiB takes as long as 256 MiB, since a message gets more channels as it grows."""
    (errors,) = (each for each in ERRORS if each.benchmark.place.collective.value == "send_recv")
    assert errors.mape(large=True) <= 5


def test_large_messages_approach_the_measured_rate():
    """From 1 GiB on only bandwidths count."""
    for each in ERRORS:
        large = [ratio for size, ratio in zip(each.benchmark.sizes, each.ratios, strict=True) if size >= 2**30]
        if large and each.benchmark.fitted:
            assert np.mean(large) == pytest.approx(1, abs=0.25)


def test_the_shipped_constants_are_the_fitted_ones():
    assert fit(SURVEYS, LIBRARY).best() == LIBRARY
