"""What a step loses: parts beside the ideal, which sum to the step, and simulated changes that make them smaller."""

import pytest

from clustersim.results.time_categories import BUBBLE_CATEGORIES, TIME_CATEGORIES, TimeCategory
from clustersim.results.time_losses import BELOW_PEAK, BUBBLE, MIN_LOSS_SHARE, TimeLoss, find_remedies, time_losses
from clustersim.results.what_if import WhatIf, WhatIfOutcome, WhatIfReport
from tests.small_pipeline import simulated

MEAN = {part.value: 0.0 for part in TIME_CATEGORIES} | {
    "compute": 6.0, "exposed tp": 1.0, "bubble warm-up": 1.0, "bubble cool-down": 1.5, "optimizer": 0.5 * MIN_LOSS_SHARE,
}  # fmt: skip
TENSOR = TimeLoss("exposed tp", 1.0, 0.1, (TimeCategory("exposed tp"),))


def changed(name: str, step: float, *, fits: bool = True, **changes: float) -> WhatIf:
    """A change to a step of 10 s with the same tokens. changes: by part, with _ for spaces."""
    parts = dict.fromkeys(MEAN, 0.0) | {part.replace("_", " "): seconds for part, seconds in changes.items()}
    return WhatIf(name, name, WhatIfOutcome(step, 10.0, 1.0, 1.0, 1.0, fits, parts))


def strip(*cases: WhatIf) -> WhatIfReport:
    return WhatIfReport(10.0, 1.0, True, cases)


def test_losses_are_what_is_not_ideal_the_largest_first() -> None:
    step = sum(MEAN.values())
    found = time_losses(MEAN, ideal_seconds=4.0)
    assert [(loss.name, loss.seconds) for loss in found] == [(BUBBLE, 2.5), (BELOW_PEAK, 2.0), ("exposed tp", 1.0)]
    assert [loss.share for loss in found] == pytest.approx([2.5 / step, 2.0 / step, 1.0 / step])


def test_without_an_ideal_nothing_is_said_of_kernels() -> None:
    assert BELOW_PEAK not in {loss.name for loss in time_losses(MEAN, ideal_seconds=0.0)}


def test_all_losses_of_a_run_sum_with_the_ideal_to_its_step() -> None:
    result = simulated()
    mean, ideal = result.breakdown.mean_seconds(), result.mfu() * result.step_time
    told = sum(loss.seconds for loss in time_losses(mean, ideal))
    assert ideal + told <= result.step_time * (1 + 1e-9)
    assert ideal + told > result.step_time * (1 - len(TIME_CATEGORIES) * MIN_LOSS_SHARE)


def test_every_part_is_in_one_loss() -> None:
    """A part of one second alone is one loss; those of bubbles are one together."""
    for part in TIME_CATEGORIES:
        (found,) = time_losses(dict.fromkeys(MEAN, 0.0) | {part.value: 1.0}, ideal_seconds=1e-9)
        assert found.categories == (BUBBLE_CATEGORIES if part in BUBBLE_CATEGORIES else (part,))


def test_what_makes_a_loss_smaller_helps_and_the_most_effective_comes_first() -> None:
    less, more = changed("less", 9.9, exposed_tp=-0.1), changed("more", 9.7, exposed_tp=-0.3)
    elsewhere, full = changed("elsewhere", 9.0, compute=-1.0), changed("full", 9.0, fits=False, exposed_tp=-1.0)
    moved = changed("moved", 10.4, exposed_tp=-0.6, compute=1.0)
    found = find_remedies(TENSOR, strip(less, elsewhere, full, moved, more))
    assert [case.name for case, _ in found.helpful] == ["more", "less"]
    assert found.most_sensitive is None


def test_where_nothing_helps_it_is_said_what_the_loss_hangs_on_and_not_what_makes_all_longer() -> None:
    links, again = changed("links", 10.1, exposed_tp=0.1), changed("again", 12.0, exposed_tp=0.3, recompute=1.7)
    found = find_remedies(TENSOR, strip(again, links))
    assert found.helpful == ()
    assert found.most_sensitive is not None and found.most_sensitive[0].name == "links"
    assert find_remedies(TENSOR, strip()).most_sensitive is None
