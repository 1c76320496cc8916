"""Failures and effective training time, held against what clusters published."""

import math
from dataclasses import replace

import pytest

from clustersim.common.data_files import list_names
from clustersim.hardware.failures import FailureEffect
from clustersim.reliability.failure_domains import build_failure_domains
from clustersim.scenario import Scenario
from clustersim.scenario.config.reliability import load_reliability
from clustersim.validation.comparison import CaseComparison
from clustersim.validation.error_statistics import summarize_comparisons
from clustersim.validation.reliability import (
    compare_reliability,
    geometric_mean_rate,
    interruption_rates,
    read_reliability,
)
from tests.benchmarks.cases import EXAMPLE

LLAMA_3 = 419
"""Unexpected interruptions in 54 days on 16,384 H100."""


@pytest.fixture(scope="module")
def comparisons() -> list[CaseComparison]:
    return compare_reliability(read_reliability())


def test_every_row_is_predicted(comparisons: list[CaseComparison]) -> None:
    assert len(comparisons) == len(read_reliability())
    assert all(comparison.predicted is not None for comparison in comparisons)


def test_rates_of_other_clusters_are_as_far_off_as_their_spread_says(comparisons: list[CaseComparison]) -> None:
    """Of lognormal rates two of three lie within one geometric standard deviation of their mean, nine of ten in 1.7."""
    spread = math.log(load_reliability("typical").rate_geometric_std)
    others = [
        comparison
        for comparison in comparisons
        if comparison.groupings["rates"] == "others" and comparison.groupings["quantity"] != "ettr"
    ]
    off = [abs(math.log(other.predicted / other.measured)) for other in others if other.predicted is not None]
    assert sum(item <= 1.7 * spread for item in off) >= 0.8 * len(off)


def test_effective_training_time_is_within_ten_percent(comparisons: list[CaseComparison]) -> None:
    """Mean over rows; what is off most is a job whose failures come as fast as its restarts (100,000 GPUs)."""
    mape = summarize_comparisons(
        [comparison for comparison in comparisons if comparison.groupings["quantity"] == "ettr"]
    ).mape
    assert mape is not None
    assert mape <= 0.10


def test_the_typical_preset_is_made_of_the_table() -> None:
    typical, llama3 = load_reliability("typical"), load_reliability("llama3-2024")
    middle, spread = geometric_mean_rate(interruption_rates(read_reliability()))
    own = 1000.0 * LLAMA_3 / (2048 * 54)
    assert typical.rate_geometric_std == pytest.approx(spread, abs=0.005)
    shared = {failure.name: failure for failure in llama3.failures}
    assert {failure_mode.name for failure_mode in typical.failures} - set(shared) == {"slow-gpu"}
    for item in typical.failures:
        if item.name in shared:
            times = item.rate.per_second / shared[item.name].rate.per_second
            assert times == pytest.approx(middle / own, abs=0.005)
            assert replace(item, rate=shared[item.name].rate) == shared[item.name]


def test_llama_3_breaks_as_often_as_its_causes_say() -> None:
    """All unexpected causes, each with its component's number in the job: 419 in 54 days, as table 5 adds them up."""
    site = build_failure_domains(Scenario.load(EXAMPLE))
    unexpected = [
        failure for failure in load_reliability("llama3-2024").failures if failure.effect is not FailureEffect.PLANNED
    ]
    rate = sum(
        failure_mode.rate.per_second * site.counts.count_of(failure_mode.rate.component) for failure_mode in unexpected
    )
    assert rate * 54 * 86400.0 == pytest.approx(LLAMA_3, rel=0.001)


@pytest.mark.parametrize("name", list_names("reliability"))
def test_every_preset_says_where_its_values_are_from(name: str) -> None:
    found = load_reliability(name)
    assert found.description
    assert {f"failures.{failure.name}.rate" for failure in found.failures} <= set(found.sources)
