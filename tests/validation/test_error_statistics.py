"""How good are predictions of many cases? Means that can be done in one's head."""

import math

import pytest

from clustersim.validation.comparison import CaseComparison
from clustersim.validation.error_statistics import (
    macro_average,
    statistics_by_grouping,
    statistics_by_source,
    summarize_comparisons,
)

HALF = CaseComparison("a", "one", 2.0, 1.0, groupings={"gpu": "x"})
SAME = CaseComparison("b", "one", 2.0, 2.0, groupings={"gpu": "y"})
DOUBLE = CaseComparison("c", "two", 1.0, 2.0, groupings={"gpu": "x"})
SKIPPED = CaseComparison("d", "two", 1.0, None, "no reason", is_expressible=False)
EXPRESSIBLE = CaseComparison("e", "two", 1.0, None, "no reason")


def test_errors_are_predicted_over_measured_less_one() -> None:
    assert HALF.error == -0.5
    assert DOUBLE.error == 1.0
    assert SKIPPED.error is None


def test_means_are_over_the_predicted_and_worst_keeps_its_sign() -> None:
    statistics = summarize_comparisons([HALF, SAME, DOUBLE, SKIPPED])
    assert (statistics.n, statistics.skipped) == (3, 1)
    assert statistics.mape == pytest.approx((0.5 + 0.0 + 1.0) / 3)
    assert statistics.median_ape == 0.5
    assert statistics.bias == pytest.approx((-0.5 + 0.0 + 1.0) / 3)
    assert statistics.worst == 1.0
    assert summarize_comparisons([HALF, SAME]).worst == -0.5


def test_inexpressible_cases_do_not_count_as_uncovered() -> None:
    assert summarize_comparisons([HALF, SKIPPED]).covered == 1.0
    assert summarize_comparisons([HALF, EXPRESSIBLE]).covered == 0.5


def test_a_group_without_predictions_has_no_figures() -> None:
    statistics = summarize_comparisons([SKIPPED])
    assert (statistics.mape, statistics.median_ape, statistics.bias, statistics.worst, statistics.covered) == (
        None,
    ) * 5


def test_a_macro_mean_counts_sources_not_cases() -> None:
    means = macro_average(statistics_by_source([HALF, SAME, DOUBLE, SKIPPED]).values())
    assert means is not None
    assert means.sources == 2
    assert means.mape == pytest.approx((0.25 + 1.0) / 2)
    assert means.bias == pytest.approx((-0.25 + 1.0) / 2)
    assert macro_average(statistics_by_source([SKIPPED]).values()) is None


def test_cases_without_a_factor_are_in_none_of_its_groups() -> None:
    groups = statistics_by_grouping([HALF, SAME, DOUBLE, SKIPPED])
    assert {value: group.n for value, group in groups["gpu"].items()} == {"x": 2, "y": 1}


def test_a_comparison_is_plain_data() -> None:
    plain = HALF.to_json()
    assert plain["error"] == -0.5
    assert plain["skipped_reason"] is None
    assert not any(isinstance(value, float) and math.isnan(value) for value in plain.values())


def test_groups_are_sorted_numerically_then_by_label() -> None:
    cases = [
        CaseComparison(item, "one", 1.0, 1.0, groupings={"nodes": item}) for item in ("16", "not stated", "2", "128")
    ]
    assert list(statistics_by_grouping(cases)["nodes"]) == ["2", "16", "128", "not stated"]
