"""How much faster is a narrow format? Of cases that differ in nothing else, measured and predicted."""

import pytest
from pytest import approx

from clustersim.validation.cases import Case
from clustersim.validation.pairs import SpeedUps, speed_ups
from tests.validation.rows import case, compared

OLD, NEW = {"locator": "v1"}, {"locator": "v2"}


def ratios(*runs: tuple[Case, float | None]) -> SpeedUps:
    return speed_ups([run for run, _ in runs], [compared(run, predicted) for run, predicted in runs])


def wide(seconds: str, **cells: str) -> Case:
    return case(**{**cells, "case_id": f"wide-{seconds}", "step_time_s": seconds})


def narrow(seconds: str, precision: str = "fp8", **cells: str) -> Case:
    return wide(seconds, **{**cells, "precision": precision})


def test_a_ratio_is_the_time_of_the_wide_one_over_that_of_the_narrow_one() -> None:
    """3 s against 2 s is 1.5; predicted 4 s against 2 s is 2, a third too much, though both errors have other sizes."""
    (pair,) = ratios((wide("3"), 4.0), (narrow("2"), 2.0)).pairs
    assert (pair.wide, pair.narrow, pair.precision) == ("wide-3", "wide-2", "fp8")
    assert (pair.measured, pair.predicted) == approx((1.5, 2.0))
    assert pair.error == approx(1.0 / 3.0)


def test_an_error_that_both_have_is_none_of_the_ratio() -> None:
    (pair,) = ratios((wide("3"), 3.6), (narrow("2"), 2.4)).pairs
    assert pair.error == approx(0.0)


@pytest.mark.parametrize("column", ["tp", "micro_batch", "gpu", "recompute", "seq", "framework", "source", "year"])
def test_cases_that_differ_in_more_are_no_pair(column: str) -> None:
    assert not ratios((wide("3"), 3.0), (narrow("2", **{column: "4"}), 2.0)).pairs


def test_a_release_is_compared_with_itself() -> None:
    """And with the mean of others where it has none of its own."""
    first, second = (wide("3", **OLD), 3.0), (wide("5", **NEW), 5.0)
    (own,) = ratios(first, second, (narrow("2", **NEW), 2.0)).pairs
    assert own.measured == approx(5.0 / 2.0)
    (mean,) = ratios(first, second, (narrow("2", locator="v3"), 2.0)).pairs
    assert mean.measured == approx(4.0 / 2.0)


def test_what_has_no_prediction_is_in_no_pair() -> None:
    assert not ratios((wide("3"), None), (narrow("2"), 2.0)).pairs
    assert not ratios((wide("3"), 3.0), (narrow("2"), None)).pairs
    assert not ratios((narrow("3"), 3.0), (narrow("2", "mxfp8"), 2.0)).pairs


def test_errors_are_summed_up_by_format() -> None:
    found = ratios((wide("4"), 4.0), (narrow("2"), 2.0), (narrow("1", "nvfp4"), 2.0), (narrow("2.5"), 2.0))
    errors = {name: (each.n, each.bias) for name, each in found.by_format().items()}
    assert errors == {"fp8": (2, approx(0.125)), "nvfp4": (1, approx(-0.5))}
    plain = found.to_json()
    assert plain["overall"]["n"] == 3
    assert [each["error"] for each in plain["list"]] == [approx(0.0), approx(-0.5), approx(0.25)]
