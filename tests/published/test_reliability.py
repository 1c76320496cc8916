"""Failure rates and effective training time (ETTR) against published clusters."""

import math
from dataclasses import replace

import pytest

from clustersim.common.data_files import list_names
from clustersim.hardware.failures import FailureEffect
from clustersim.reliability.failure_domains import build_failure_domains
from clustersim.scenario import Scenario
from clustersim.scenario.config.reliability import load_reliability
from clustersim.validation.comparison import CaseComparison
from clustersim.validation.error_statistics import statistics_by_source, summarize_comparisons
from clustersim.validation.reliability import (
    compare_reliability,
    geometric_mean_rate,
    interruption_rates,
    read_reliability,
)
from tests.benchmarks.cases import EXAMPLE
from tests.published.documents import VALIDATION_PAGE, assert_states, percent

LLAMA_3_INTERRUPTIONS = 419
"""Unexpected interruptions in 54 days on 16,384 H100."""


@pytest.fixture(scope="module")
def comparisons() -> list[CaseComparison]:
    return compare_reliability(read_reliability())


def test_every_case_is_predicted(comparisons: list[CaseComparison]) -> None:
    assert len(comparisons) == len(read_reliability())
    assert all(comparison.predicted is not None for comparison in comparisons)


def test_failure_rates_of_other_clusters_are_within_the_spread(comparisons: list[CaseComparison]) -> None:
    """Lognormal rates: two of three lie within one geometric standard deviation of the mean, nine of ten within 1.7."""
    spread = math.log(load_reliability("typical").rate_geometric_std)
    other_clusters = [
        comparison
        for comparison in comparisons
        if comparison.groupings["rates"] == "others" and comparison.groupings["quantity"] != "ettr"
    ]
    log_errors = [
        abs(math.log(comparison.predicted / comparison.measured))
        for comparison in other_clusters
        if comparison.predicted is not None
    ]
    assert sum(error <= 1.7 * spread for error in log_errors) >= 0.8 * len(log_errors)


def test_ettr_mape_is_below_10_percent(comparisons: list[CaseComparison]) -> None:
    """Mean over cases; the largest error is of a job whose failures are as frequent as its restarts (100,000 GPUs)."""
    mape = summarize_comparisons(
        [comparison for comparison in comparisons if comparison.groupings["quantity"] == "ettr"]
    ).mape
    assert mape is not None
    assert mape <= 0.10


def test_documents_state_the_error_of_ettr(comparisons: list[CaseComparison]) -> None:
    ettr = [comparison for comparison in comparisons if comparison.groupings["quantity"] == "ettr"]
    statistics, sources = summarize_comparisons(ettr), len(statistics_by_source(ettr))
    rates, error = interruption_rates(read_reliability()), percent(statistics.mape)
    _, spread = geometric_mean_rate(rates)
    assert_states(
        "README.md", f"| effective training time of clusters with failures | {statistics.n} | {sources} | {error} |"
    )
    assert_states(VALIDATION_PAGE, f"of clusters with failures, {statistics.n} cases of {sources} sources: {error}.")
    assert_states(
        "docs/goodput.md",
        f"the mean error of the time is {error}, rates of {len(rates)} clusters differ by a factor of {spread:.1f}",
    )


def test_typical_preset_is_derived_from_the_table() -> None:
    typical, llama3 = load_reliability("typical"), load_reliability("llama3-2024")
    mean, spread = geometric_mean_rate(interruption_rates(read_reliability()))
    llama3_rate = 1000.0 * LLAMA_3_INTERRUPTIONS / (2048 * 54)
    assert typical.rate_geometric_std == pytest.approx(spread, abs=0.005)
    llama3_failures = {failure.name: failure for failure in llama3.failures}
    assert {failure.name for failure in typical.failures} - set(llama3_failures) == {"slow-gpu"}
    for failure in typical.failures:
        if failure.name in llama3_failures:
            ratio = failure.rate.per_second / llama3_failures[failure.name].rate.per_second
            assert ratio == pytest.approx(mean / llama3_rate, abs=0.005)
            assert replace(failure, rate=llama3_failures[failure.name].rate) == llama3_failures[failure.name]


def test_llama_3_failure_causes_add_up_to_419_interruptions() -> None:
    """All unexpected causes times the number of their components: 419 in 54 days, the sum in table 5."""
    site = build_failure_domains(Scenario.load(EXAMPLE))
    unexpected = [
        failure for failure in load_reliability("llama3-2024").failures if failure.effect is not FailureEffect.PLANNED
    ]
    rate = sum(failure.rate.per_second * site.counts.count_of(failure.rate.component) for failure in unexpected)
    assert rate * 54 * 86400.0 == pytest.approx(LLAMA_3_INTERRUPTIONS, rel=0.001)


@pytest.mark.parametrize("name", list_names("reliability"))
def test_every_preset_states_its_sources(name: str) -> None:
    preset = load_reliability(name)
    assert preset.description
    assert {f"failures.{failure.name}.rate" for failure in preset.failures} <= set(preset.sources)
