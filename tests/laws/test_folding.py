"""Ranks of one equivalence class do the same at the same time: one is simulated for all of them."""

import pytest
from hypothesis import event, given

from clustersim import Scenario, simulate
from clustersim.engine.engine import simulate_program
from clustersim.results.time_categories import TimeCategory
from clustersim.symmetry.refinement import singleton_classes
from tests.conftest import examples
from tests.engine.fake_costs import UnitCost
from tests.laws.timelines import assert_same_trace
from tests.strategies import costed_programs, fold_ranks, scenarios

WORK_CATEGORIES = (
    TimeCategory.COMPUTE,
    TimeCategory.RECOMPUTE,
    TimeCategory.OPTIMIZER,
    TimeCategory.EXPOSED_TP,
    TimeCategory.EXPOSED_CP,
)


@given(costed_programs())
@examples(300)
def test_folded_equals_unfolded_in_random_programs(cost: UnitCost) -> None:
    """With dyadic durations sums are exact, so the times are equal bit for bit."""
    program = cost.program
    folded = fold_ranks(program, cost.segment_cost)
    event(f"{program.world_size} ranks in {folded.count} classes")
    unfolded_trace, _ = simulate_program(program, singleton_classes(program), cost.segment_cost)
    folded_trace, _ = simulate_program(program, folded, cost.segment_cost)
    assert len(set(folded_trace.rank.tolist())) <= folded.count
    assert_same_trace(folded_trace, unfolded_trace)


@given(costed_programs())
@examples(100)
def test_folding_does_not_need_coalescing(cost: UnitCost) -> None:
    program = cost.program
    unfolded_trace, _ = simulate_program(program, singleton_classes(program), cost.segment_cost, coalesce=False)
    folded_trace, _ = simulate_program(
        program, fold_ranks(program, cost.segment_cost), cost.segment_cost, coalesce=False
    )
    assert_same_trace(folded_trace, unfolded_trace)


@given(scenarios())
@examples(150)
def test_folded_equals_unfolded_in_training_steps(scenario: Scenario) -> None:
    folded, unfolded_result = simulate(scenario), simulate(scenario.with_overrides("cost.symmetry=off"))
    assert unfolded_result.simulated_rank_count == unfolded_result.rank_count
    event(f"{folded.rank_count} ranks in {folded.simulated_rank_count} classes")
    assert_same_trace(folded.trace, unfolded_result.trace, relative=1e-9)


@given(scenarios())
@examples(50)
def test_results_do_not_depend_on_folding(scenario: Scenario) -> None:
    """A rank's work agrees category by category, and its idle time in total.

    Categories of idle time are named after the predecessor that ended last. Where two predecessors end together
    up to rounding, as a send and a receive may, it is either of them, so the split between these categories may
    differ.
    """
    folded, unfolded_result = simulate(scenario), simulate(scenario.with_overrides("cost.symmetry=off"))
    for rank in range(unfolded_result.rank_count):
        categories, unfolded_categories = (
            folded.breakdown.rank_seconds(rank),
            unfolded_result.breakdown.rank_seconds(rank),
        )
        for category in WORK_CATEGORIES:
            assert (
                abs(categories[category.value] - unfolded_categories[category.value])
                <= 1e-6 * unfolded_result.step_time
            ), (rank, category)
        assert sum(categories.values()) == pytest.approx(sum(unfolded_categories.values()), rel=1e-9)
    for category in WORK_CATEGORIES:
        assert (
            abs(folded.breakdown.category_total(category) - unfolded_result.breakdown.category_total(category))
            <= 1e-6 * unfolded_result.step_time
        ), category
    assert folded.recomputed_flops == unfolded_result.recomputed_flops
    assert folded.peak_memory == unfolded_result.peak_memory
