"""Of cases that differ in one thing: how much faster is the second, measured and predicted?"""

import pytest
from pytest import approx

from clustersim.validation.cases import ValidationCase
from clustersim.validation.speedup_pairs import SpeedupPairs, moe_comm_speedups, precision_speedups
from tests.validation.sample_cases import make_comparison, step_case

OLD, NEW = {"locator": "v1"}, {"locator": "v2"}


def pair_runs(*runs: tuple[ValidationCase, float | None]) -> SpeedupPairs:
    return precision_speedups([run for run, _ in runs], [make_comparison(run, predicted) for run, predicted in runs])


def high_precision_case(seconds: str, **cells: str) -> ValidationCase:
    return step_case(**{**cells, "case_id": f"wide-{seconds}", "step_time_s": seconds})


def low_precision_case(seconds: str, precision: str = "fp8", **cells: str) -> ValidationCase:
    return high_precision_case(seconds, **{**cells, "precision": precision})


def test_a_speedup_is_high_over_low_precision_time() -> None:
    """3 s against 2 s is 1.5; predicted 4 s against 2 s is 2, a third too much, though both errors have other sizes."""
    (pair,) = pair_runs((high_precision_case("3"), 4.0), (low_precision_case("2"), 2.0)).pairs
    assert (pair.first, pair.second, pair.change) == ("wide-3", "wide-2", "fp8")
    assert (pair.measured, pair.predicted) == approx((1.5, 2.0))
    assert pair.error == approx(1.0 / 3.0)


def test_a_common_error_cancels_in_the_speedup() -> None:
    (pair,) = pair_runs((high_precision_case("3"), 3.6), (low_precision_case("2"), 2.4)).pairs
    assert pair.error == approx(0.0)


@pytest.mark.parametrize("column", ["tp", "micro_batch", "gpu", "recompute", "seq", "framework", "source", "year"])
def test_cases_that_differ_in_more_are_no_pair(column: str) -> None:
    assert not pair_runs((high_precision_case("3"), 3.0), (low_precision_case("2", **{column: "4"}), 2.0)).pairs


def test_a_release_is_compared_with_itself() -> None:
    """And with the mean of others where it has none of its own."""
    old_run, new_run = (high_precision_case("3", **OLD), 3.0), (high_precision_case("5", **NEW), 5.0)
    (same_release,) = pair_runs(old_run, new_run, (low_precision_case("2", **NEW), 2.0)).pairs
    assert same_release.measured == approx(5.0 / 2.0)
    (mean,) = pair_runs(old_run, new_run, (low_precision_case("2", locator="v3"), 2.0)).pairs
    assert mean.measured == approx(4.0 / 2.0)


def test_cases_without_prediction_are_in_no_pair() -> None:
    assert not pair_runs((high_precision_case("3"), None), (low_precision_case("2"), 2.0)).pairs
    assert not pair_runs((high_precision_case("3"), 3.0), (low_precision_case("2"), None)).pairs
    assert not pair_runs((low_precision_case("3"), 3.0), (low_precision_case("2", "mxfp8"), 2.0)).pairs


def test_errors_are_summed_up_by_change() -> None:
    pairs = pair_runs(
        (high_precision_case("4"), 4.0),
        (low_precision_case("2"), 2.0),
        (low_precision_case("1", "nvfp4"), 2.0),
        (low_precision_case("2.5"), 2.0),
    )
    errors = {
        name: (error_statistics.n, error_statistics.bias)
        for name, error_statistics in pairs.statistics_by_change().items()
    }
    assert errors == {"fp8": (2, approx(0.125)), "nvfp4": (1, approx(-0.5))}
    plain = pairs.to_json()
    assert plain["overall"]["n"] == 3
    assert [item["error"] for item in plain["list"]] == [approx(0.0), approx(-0.5), approx(0.25)]


MOE = {"experts": "8", "top_k": "2", "moe_ffn_hidden": "4096", "ep": "4"}


def moe_ab_case(seconds: str, notes: str, **cells: str) -> ValidationCase:
    return high_precision_case(seconds, notes=f"{notes}; A/B", **MOE, **cells)


def test_moe_cases_are_paired_by_one_changed_setting() -> None:
    """Without overlap 4 s, with it 3 s, with delayed gradients too 2 s: overlap, and delay beside overlap."""
    runs = [
        (moe_ab_case("2", "EP overlap + delayed wgrad"), 3.0),
        (moe_ab_case("4", "alltoall"), 4.0),
        (moe_ab_case("3", "EP overlap"), 3.0),
    ]
    speedups = moe_comm_speedups([run for run, _ in runs], [make_comparison(run, predicted) for run, predicted in runs])
    pairs = {pair.change: (pair.first, pair.second, pair.measured, pair.predicted) for pair in speedups.pairs}
    assert pairs == {
        "overlap": ("wide-4", "wide-3", approx(4 / 3), approx(4 / 3)),
        "delayed wgrad": ("wide-3", "wide-2", approx(3 / 2), approx(1.0)),
    }


@pytest.mark.parametrize(
    ("notes", "change"), [("HybridEP", "dispatcher hybridep"), ("capacity factor 1.5, padded", "capacity 1.5")]
)
def test_changed_settings_have_a_label(notes: str, change: str) -> None:
    runs = [(moe_ab_case("2", notes), 3.0), (moe_ab_case("4", "alltoall"), 4.0)]
    speedups = moe_comm_speedups([run for run, _ in runs], [make_comparison(run, predicted) for run, predicted in runs])
    assert [(pair.first, pair.second, pair.change) for pair in speedups.pairs] == [("wide-4", "wide-2", change)]


def test_moe_cases_with_other_differences_are_not_paired() -> None:
    first = moe_ab_case("4", "alltoall")
    for other in (
        moe_ab_case("3", "EP overlap", **NEW),
        moe_ab_case("3", "EP overlap", tp="4"),
        moe_ab_case("3", "EP overlap", precision="fp8"),
    ):
        assert not moe_comm_speedups([first, other], [make_comparison(first, 4.0), make_comparison(other, 3.0)]).pairs
