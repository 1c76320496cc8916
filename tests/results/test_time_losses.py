"""Time losses against the ideal step, which sum to the step time, and simulated changes that reduce them."""

import pytest

from clustersim.results.time_categories import BUBBLE_CATEGORIES, TIME_CATEGORIES, TimeCategory
from clustersim.results.time_losses import BELOW_PEAK, BUBBLE, MIN_LOSS_SHARE, TimeLoss, find_remedies, time_losses
from clustersim.results.what_if import WhatIf, WhatIfOutcome, WhatIfReport
from tests.small_pipeline import simulate_pipeline

MEAN = {category.value: 0.0 for category in TIME_CATEGORIES} | {
    "compute": 6.0, "exposed tp": 1.0, "bubble warm-up": 1.0, "bubble "
                                                              "cool-down": 1.5, "optimizer": 0.5 * MIN_LOSS_SHARE,
}  # fmt: skip
TP_LOSS = TimeLoss("exposed tp", 1.0, 0.1, (TimeCategory("exposed tp"),))


def what_if_case(name: str, step_time: float, *, fits_in_memory: bool = True, **changes: float) -> WhatIf:
    """A what-if case of a step of 10 s with the same tokens. changes: seconds by category, with _ for spaces."""
    category_changes = dict.fromkeys(MEAN, 0.0) | {
        category.replace("_", " "): seconds for category, seconds in changes.items()
    }
    return WhatIf(name, name, WhatIfOutcome(step_time, 10.0, 1.0, 1.0, 1.0, fits_in_memory, category_changes))


def what_if_report(*cases: WhatIf) -> WhatIfReport:
    return WhatIfReport(10.0, 1.0, True, cases)


def test_losses_are_sorted_by_size() -> None:
    step_time = sum(MEAN.values())
    largest = time_losses(MEAN, ideal_seconds=4.0)
    assert [(loss.name, loss.seconds) for loss in largest] == [(BUBBLE, 2.5), (BELOW_PEAK, 2.0), ("exposed tp", 1.0)]
    assert [loss.share for loss in largest] == pytest.approx([2.5 / step_time, 2.0 / step_time, 1.0 / step_time])


def test_without_an_ideal_time_there_is_no_below_peak_loss() -> None:
    assert BELOW_PEAK not in {loss.name for loss in time_losses(MEAN, ideal_seconds=0.0)}


def test_losses_and_the_ideal_time_sum_to_the_step_time() -> None:
    result = simulate_pipeline()
    mean, ideal = result.breakdown.mean_seconds(), result.mfu() * result.step_time
    total_loss = sum(loss.seconds for loss in time_losses(mean, ideal))
    assert ideal + total_loss <= result.step_time * (1 + 1e-9)
    assert ideal + total_loss > result.step_time * (1 - len(TIME_CATEGORIES) * MIN_LOSS_SHARE)


def test_every_category_is_in_one_loss() -> None:
    """A single category of one second is one loss; the bubble categories are merged into one."""
    for category in TIME_CATEGORIES:
        (loss,) = time_losses(dict.fromkeys(MEAN, 0.0) | {category.value: 1.0}, ideal_seconds=1e-9)
        assert loss.categories == (BUBBLE_CATEGORIES if category in BUBBLE_CATEGORIES else (category,))


def test_remedies_reduce_the_loss_and_are_sorted_by_effect() -> None:
    less, more = what_if_case("less", 9.9, exposed_tp=-0.1), what_if_case("more", 9.7, exposed_tp=-0.3)
    elsewhere, full = (
        what_if_case("elsewhere", 9.0, compute=-1.0),
        what_if_case("full", 9.0, fits_in_memory=False, exposed_tp=-1.0),
    )
    moved = what_if_case("moved", 10.4, exposed_tp=-0.6, compute=1.0)
    remedies = find_remedies(TP_LOSS, what_if_report(less, elsewhere, full, moved, more))
    assert [case.name for case, _ in remedies.helpful] == ["more", "less"]
    assert remedies.most_sensitive is None


def test_without_a_remedy_the_change_that_the_loss_is_sensitive_to_is_reported() -> None:
    links, recomputed = (
        what_if_case("links", 10.1, exposed_tp=0.1),
        what_if_case("again", 12.0, exposed_tp=0.3, recompute=1.7),
    )
    remedies = find_remedies(TP_LOSS, what_if_report(recomputed, links))
    assert remedies.helpful == ()
    assert remedies.most_sensitive is not None and remedies.most_sensitive[0].name == "links"
    assert find_remedies(TP_LOSS, what_if_report()).most_sensitive is None
