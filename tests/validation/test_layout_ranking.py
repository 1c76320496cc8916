"""Would the prediction have chosen the fastest layout? Sets whose answer can be said beforehand."""

from itertools import permutations

import pytest

from clustersim.validation.cases import ValidationCase
from clustersim.validation.comparison import CaseComparison
from clustersim.validation.layout_ranking import LayoutRanking, kendall_tau_b, rank_layouts
from tests.validation.sample_cases import make_comparison, step_case

LAYOUTS = ({"tp": "8", "pp": "1", "dp": "1"}, {"tp": "1", "pp": "8", "dp": "1"}, {"tp": "1", "pp": "1", "dp": "8"})


def rank_cases(measured: tuple[float, ...], predicted: tuple[float | None, ...], **cells: str) -> LayoutRanking:
    cases = three_layout_cases(measured, **cells)
    return rank_layouts(cases, make_comparisons(cases, predicted))


def three_layout_cases(measured: tuple[float, ...], **cells: str) -> list[ValidationCase]:
    pairs = zip(LAYOUTS, measured, strict=True)
    return [
        step_case(case_id=f"case{n}", step_time_s=str(seconds), **cells, **axes)
        for n, (axes, seconds) in enumerate(pairs)
    ]


def make_comparisons(cases: list[ValidationCase], predicted: tuple[float | None, ...]) -> list[CaseComparison]:
    return [
        make_comparison(validation_case, seconds) for validation_case, seconds in zip(cases, predicted, strict=True)
    ]


def test_the_right_order_has_no_regret() -> None:
    ranking = rank_cases((1.0, 2.0, 3.0), (0.5, 0.6, 0.7))
    assert ranking.mean_regret == 0.0
    assert ranking.mean_kendall_tau == 1.0
    assert ranking.correct_count == 1


def test_regret_is_what_the_choice_takes_longer_than_the_fastest() -> None:
    """Predicted to be fastest is the one that took 1.2 s; the fastest took 1.0 s. One of three pairs is in order."""
    ranking = rank_cases((1.0, 1.2, 3.0), (5.0, 3.0, 4.0))
    assert ranking.mean_regret == pytest.approx(0.2)
    assert ranking.mean_kendall_tau == pytest.approx((1 - 2) / 3)
    assert ranking.sets[0].measured_fastest == "case0"
    assert ranking.sets[0].predicted_fastest == "case1"


def test_the_regret_of_a_random_choice_is_the_mean_regret() -> None:
    """Choices of 1.0, 1.2 and 3.0 s cost 0, 0.2 and 2.0, whatever is predicted; sets count once each."""
    assert rank_cases((1.0, 1.2, 3.0), (5.0, 3.0, 4.0)).mean_random_regret == pytest.approx((0.0 + 0.2 + 2.0) / 3)
    short_sequences, long_sequences = (
        three_layout_cases((1.0, 1.2, 3.0), seq="1024"),
        three_layout_cases((1.0, 1.0, 1.0), seq="2048"),
    )
    ranking = rank_layouts(
        [*short_sequences, *long_sequences], make_comparisons([*short_sequences, *long_sequences], (1.0,) * 6)
    )
    assert ranking.to_json()["mean_random_regret"] == pytest.approx((2.2 / 3 + 0.0) / 2)
    assert ranking.to_json()["list"][1]["random_regret"] == 0.0


def test_of_layouts_predicted_to_be_equally_fast_the_worst_counts() -> None:
    assert rank_cases((1.0, 2.0, 3.0), (0.5, 0.5, 0.7)).mean_regret == pytest.approx(1.0)


@pytest.mark.parametrize(
    "column", ["seq", "global_batch", "gpu", "n_gpus", "layers", "recompute", "precision", "source"]
)
def test_cases_that_differ_in_more_than_layout_are_not_compared(column: str) -> None:
    cases = three_layout_cases((1.0, 2.0, 3.0))
    changed = [
        ValidationCase(validation_case.cells | {column: f"other{n}"}, validation_case.line_number)
        for n, validation_case in enumerate(cases)
    ]
    assert rank_layouts(cases, make_comparisons(cases, (1.0, 2.0, 3.0))).sets
    assert not rank_layouts(changed, make_comparisons(changed, (1.0, 2.0, 3.0))).sets


def test_a_case_without_a_prediction_is_not_in_its_set() -> None:
    assert rank_cases((1.0, 2.0, 3.0), (1.0, None, 3.0)).case_count == 2
    assert rank_cases((1.0, 2.0, 3.0), (1.0, None, None)).sets == ()


def test_the_same_layout_twice_is_one_with_the_mean_time() -> None:
    """Layout a took 1.0 and 3.0 s, so 2.0 s; layout b 2.2 s: b, predicted to be faster, costs a tenth."""
    a, b = LAYOUTS[:2]
    cases = [step_case(step_time_s="1", **a), step_case(step_time_s="3", **a), step_case(step_time_s="2.2", **b)]
    ranking = rank_layouts(cases, make_comparisons(cases, (1.0, 1.0, 0.9)))
    assert ranking.sets[0].layout_count == 2
    assert ranking.mean_regret == pytest.approx(0.1)


def test_sets_have_equal_weight_and_sources_are_separate() -> None:
    good, bad = three_layout_cases((1.0, 2.0, 3.0), source="good"), three_layout_cases((1.0, 2.0, 3.0), source="bad")
    ranking = rank_layouts(
        [*good, *bad], make_comparisons(good, (1.0, 2.0, 3.0)) + make_comparisons(bad, (3.0, 2.0, 1.0))
    )
    assert ranking.mean_kendall_tau == 0.0
    assert ranking.mean_regret == pytest.approx(1.0)
    assert {source: layout_ranking.mean_regret for source, layout_ranking in ranking.by_source().items()} == {
        "good": 0.0,
        "bad": 2.0,
    }
    assert ranking.to_json()["by_source"]["bad"]["mean_kendall_tau"] == -1.0


def test_without_sets_there_is_nothing_to_say() -> None:
    ranking = rank_layouts([], [])
    assert ranking.to_json()["mean_regret"] is None
    assert ranking.to_json()["mean_random_regret"] is None
    assert ranking.to_json()["mean_kendall_tau"] is None


def test_tau_of_all_orders_of_four_has_mean_zero() -> None:
    """By symmetry: an order and its reverse have opposite tau."""
    taus = [kendall_tau_b((1, 2, 3, 4), order) for order in permutations((1, 2, 3, 4))]
    assert sum(tau for tau in taus if tau is not None) == pytest.approx(0.0)


def test_ties_shrink_the_number_of_pairs() -> None:
    """Pairs of (1, 2, 2) and (1, 2, 3): two agree, one is tied in the first; 2 / sqrt(2 * 3)."""
    assert kendall_tau_b((1, 2, 2), (1, 2, 3)) == pytest.approx(2 / 6**0.5)
