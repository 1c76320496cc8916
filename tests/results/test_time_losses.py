"""Time losses against the ideal step, which sum to the step time, and simulated changes that reduce them."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from clustersim.model.kernels import TENSOR_CORE_KINDS
from clustersim.results.time_breakdown import TimeBreakdown
from clustersim.results.time_categories import BUBBLE_CATEGORIES, TIME_CATEGORIES, TimeCategory
from clustersim.results.time_losses import (
    LOSS_CATEGORIES,
    MIN_LOSS_SHARE,
    StepLosses,
    TimeLoss,
    find_remedies,
    split_step,
)
from clustersim.results.what_if import WhatIf, WhatIfOutcome, WhatIfReport
from clustersim.scenario.changes.step_losses import StepLoss
from tests.small_pipeline import simulate_pipeline

TP_LOSS = TimeLoss(StepLoss("exposed tp"), 1.0, 0.1)


def breakdown_of(*ranks: dict[str, float]) -> TimeBreakdown:
    """Every rank is a pipeline rank of its own. ranks: seconds by category."""
    seconds = [[rank.get(category.value, 0.0) for category in TIME_CATEGORIES] for rank in ranks]
    index = np.arange(len(ranks))
    return TimeBreakdown(index, np.array(seconds), np.ones(len(ranks), dtype=np.int64), index)


def what_if_case(
    name: str, step_time: float, *, fits_in_memory: bool = True, addresses: tuple[str, ...] = (), **changes: float
) -> WhatIf:
    """A what-if case of a step of 10 s with the same tokens. changes: seconds by loss, with _ for spaces."""
    loss_changes = dict.fromkeys(StepLoss, 0.0) | {
        StepLoss(loss.replace("_", " ")): seconds for loss, seconds in changes.items()
    }
    outcome = WhatIfOutcome(step_time, 10.0, 1.0, 1.0, 1.0, fits_in_memory, 0.9, 0.0, loss_changes)
    return WhatIf(name, name, outcome, addresses=frozenset(map(StepLoss, addresses)))


def what_if_report(*cases: WhatIf) -> WhatIfReport:
    return WhatIfReport(10.0, 1.0, True, 0.95, cases)


def test_significant_losses_are_sorted_by_size() -> None:
    losses = StepLosses(
        4.0, dict.fromkeys(StepLoss, 0.0) | {StepLoss.MATMULS: 2.0, StepLoss.BUBBLE: 3.0, StepLoss.OPTIMIZER: 0.01}
    )
    assert [(loss.loss, loss.seconds) for loss in losses.significant] == [
        (StepLoss.BUBBLE, 3.0),
        (StepLoss.MATMULS, 2.0),
    ]
    assert losses.significant[0].share == pytest.approx(3.0 / 9.01)
    assert MIN_LOSS_SHARE > 0.01 / 9.01


def test_computation_is_the_ideal_what_matmuls_lack_and_memory_bound_kernels() -> None:
    losses = split_step(
        breakdown_of({"compute": 10.0}), ideal=5.0, matmul_share=0.8, pipeline_ranks=np.zeros(1, dtype=np.int64)
    )
    assert losses.ideal == 5.0
    assert losses.seconds[StepLoss.MATMULS] == pytest.approx(3.0)
    assert losses.seconds[StepLoss.MEMORY_BOUND] == pytest.approx(2.0)


def test_waiting_for_the_pipeline_is_bubble_as_far_as_every_pipeline_rank_waits() -> None:
    """Of a step of 9 s two pipeline ranks compute 6 s and 8 s: a bubble of 1 s, and 2 s of imbalance on one of them."""
    breakdown = breakdown_of(
        {"compute": 6.0, "bubble warm-up": 2.0, "bubble cool-down": 1.0}, {"compute": 8.0, "bubble steady": 1.0}
    )
    losses = split_step(breakdown, ideal=0.0, matmul_share=1.0, pipeline_ranks=np.arange(2))
    assert losses.seconds[StepLoss.BUBBLE] == pytest.approx(1.0)
    assert losses.seconds[StepLoss.IMBALANCE] == pytest.approx(1.0)


@given(
    seconds=st.lists(
        st.lists(st.floats(0.0, 10.0), min_size=len(TIME_CATEGORIES), max_size=len(TIME_CATEGORIES)),
        min_size=1,
        max_size=5,
    ),
    ideal=st.floats(0.0, 20.0),
    share=st.floats(0.0, 1.0),
)
def test_parts_are_not_negative_and_sum_to_the_mean(seconds: list[list[float]], ideal: float, share: float) -> None:
    ranks = np.arange(len(seconds))
    breakdown = TimeBreakdown(ranks, np.array(seconds), np.ones(len(seconds), dtype=np.int64), ranks)
    losses = split_step(breakdown, ideal=ideal, matmul_share=share, pipeline_ranks=ranks)
    assert losses.step_time == pytest.approx(sum(breakdown.mean_seconds().values()))
    assert min(losses.ideal, *losses.seconds.values()) >= -1e-9


def test_losses_of_a_result_sum_to_its_step() -> None:
    result = simulate_pipeline()
    losses = result.losses
    assert losses.step_time == pytest.approx(result.step_time)
    assert losses.ideal == pytest.approx(result.mfu_causal * result.step_time)
    kernels = [
        (operation.kernel.kind in TENSOR_CORE_KINDS, seconds)
        for segment in result.trace_table.segments
        for operation, seconds in zip(
            segment.operations, result.cost.time_segment(0, segment).kernel_seconds, strict=True
        )
        if operation.kernel is not None
    ]
    assert {is_matmul for is_matmul, _ in kernels} == {True, False}
    assert losses.seconds[StepLoss.MEMORY_BOUND] > 0.0


def test_every_category_is_in_a_loss() -> None:
    categories = {category for loss_categories in LOSS_CATEGORIES.values() for category in loss_categories}
    assert categories == set(TIME_CATEGORIES)
    assert LOSS_CATEGORIES[StepLoss.IMBALANCE] == BUBBLE_CATEGORIES
    assert {category.value for category in TimeCategory if category.value.startswith("exposed")} == {
        loss.value for loss in StepLoss if loss.value.startswith("exposed")
    }


def test_remedies_reduce_the_loss_and_are_sorted_by_effect() -> None:
    less, more = what_if_case("less", 9.9, exposed_tp=-0.1), what_if_case("more", 9.7, exposed_tp=-0.3)
    elsewhere, full = (
        what_if_case("elsewhere", 9.0, recompute=-1.0),
        what_if_case("full", 9.0, fits_in_memory=False, exposed_tp=-1.0),
    )
    moved = what_if_case("moved", 10.4, exposed_tp=-0.6, recompute=1.0)
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


def test_what_was_tried_for_a_loss_is_told_from_what_was_not() -> None:
    tried = what_if_case("tried", 10.0, addresses=("exposed tp",))
    elsewhere = what_if_case("elsewhere", 10.0, addresses=("recompute",))
    illegal = WhatIf("illegal", "illegal", None, "the reason", frozenset({TP_LOSS.loss}))
    remedies = find_remedies(TP_LOSS, what_if_report(tried, elsewhere, illegal))
    assert (remedies.tried, remedies.not_tried) == (("tried",), (illegal,))


def test_where_the_step_does_not_fit_what_reduces_a_loss_counts_too() -> None:
    """The page of DeepSeek-V3 with 56 GiB too much said of a partition that takes 16 % off: none reduces it."""
    case = what_if_case("balanced", 8.0, fits_in_memory=False, imbalance_between_pipeline_ranks=-2.0)
    loss = TimeLoss(StepLoss.IMBALANCE, 5.0, 0.2)
    assert find_remedies(loss, replace(what_if_report(case), fits_in_memory=False)).helpful
    assert not find_remedies(loss, what_if_report(case)).helpful
