"""Of cases that differ in one thing: how much faster is the second, measured and predicted?"""

import pytest
from pytest import approx

from clustersim.validation.cases import ValidationCase
from clustersim.validation.speedup_pairs import SpeedupPairs, moe_comm_speedups, precision_speedups
from tests.validation.sample_cases import case, compared

OLD, NEW = {"locator": "v1"}, {"locator": "v2"}


def ratios(*runs: tuple[ValidationCase, float | None]) -> SpeedupPairs:
    return precision_speedups([run for run, _ in runs], [compared(run, predicted) for run, predicted in runs])


def wide(seconds: str, **cells: str) -> ValidationCase:
    return case(**{**cells, "case_id": f"wide-{seconds}", "step_time_s": seconds})


def narrow(seconds: str, precision: str = "fp8", **cells: str) -> ValidationCase:
    return wide(seconds, **{**cells, "precision": precision})


def test_a_ratio_is_the_time_of_the_wide_one_over_that_of_the_narrow_one() -> None:
    """3 s against 2 s is 1.5; predicted 4 s against 2 s is 2, a third too much, though both errors have other sizes."""
    (pair,) = ratios((wide("3"), 4.0), (narrow("2"), 2.0)).pairs
    assert (pair.first, pair.second, pair.change) == ("wide-3", "wide-2", "fp8")
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


def test_errors_are_summed_up_by_change() -> None:
    found = ratios((wide("4"), 4.0), (narrow("2"), 2.0), (narrow("1", "nvfp4"), 2.0), (narrow("2.5"), 2.0))
    errors = {
        name: (error_statistics.n, error_statistics.bias)
        for name, error_statistics in found.statistics_by_change().items()
    }
    assert errors == {"fp8": (2, approx(0.125)), "nvfp4": (1, approx(-0.5))}
    plain = found.to_json()
    assert plain["overall"]["n"] == 3
    assert [item["error"] for item in plain["list"]] == [approx(0.0), approx(-0.5), approx(0.25)]


MIXTURE = {"experts": "8", "top_k": "2", "moe_ffn_hidden": "4096", "ep": "4"}


def served(seconds: str, notes: str, **cells: str) -> ValidationCase:
    return wide(seconds, notes=f"{notes}; A/B", **MIXTURE, **cells)


def test_mixtures_are_paired_where_one_thing_of_how_experts_get_tokens_differs() -> None:
    """Without overlap 4 s, with it 3 s, with delayed gradients too 2 s: overlap, and delay beside overlap."""
    runs = [
        (served("2", "EP overlap + delayed wgrad"), 3.0),
        (served("4", "alltoall"), 4.0),
        (served("3", "EP overlap"), 3.0),
    ]
    found = moe_comm_speedups([run for run, _ in runs], [compared(run, predicted) for run, predicted in runs])
    pairs = {pair.change: (pair.first, pair.second, pair.measured, pair.predicted) for pair in found.pairs}
    assert pairs == {
        "overlap": ("wide-4", "wide-3", approx(4 / 3), approx(4 / 3)),
        "delayed wgrad": ("wide-3", "wide-2", approx(3 / 2), approx(1.0)),
    }


@pytest.mark.parametrize(
    ("notes", "change"), [("HybridEP", "dispatcher hybridep"), ("capacity factor 1.5, padded", "capacity 1.5")]
)
def test_what_differs_has_a_name(notes: str, change: str) -> None:
    runs = [(served("2", notes), 3.0), (served("4", "alltoall"), 4.0)]
    found = moe_comm_speedups([run for run, _ in runs], [compared(run, predicted) for run, predicted in runs])
    assert [(pair.first, pair.second, pair.change) for pair in found.pairs] == [("wide-4", "wide-2", change)]


def test_mixtures_of_other_places_layouts_or_formats_are_no_pair() -> None:
    first = served("4", "alltoall")
    for other in (
        served("3", "EP overlap", **NEW),
        served("3", "EP overlap", tp="4"),
        served("3", "EP overlap", precision="fp8"),
    ):
        assert not moe_comm_speedups([first, other], [compared(first, 4.0), compared(other, 3.0)]).pairs
