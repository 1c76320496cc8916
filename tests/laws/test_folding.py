"""Ranks of one class do the same at the same time: what is simulated once is what every rank would have done."""

import pytest
from hypothesis import event, given

from clustersim import Scenario, simulate
from clustersim.engine.engine import simulate_program
from clustersim.results.time_categories import TimeCategory
from clustersim.symmetry.refinement import singleton_classes
from tests.conftest import examples
from tests.engine.fake_costs import UnitCost
from tests.laws.timelines import same
from tests.strategies import costed, fold, scenarios

WORK = (
    TimeCategory.COMPUTE,
    TimeCategory.RECOMPUTE,
    TimeCategory.OPTIMIZER,
    TimeCategory.EXPOSED_TP,
    TimeCategory.EXPOSED_CP,
)


@given(costed())
@examples(300)
def test_folded_is_unfolded_in_any_program(cost: UnitCost) -> None:
    """With dyadic durations sums are exact, so the times are equal bit for bit."""
    program = cost.program
    folded = fold(program, cost.blocks)
    event(f"{program.world_size} ranks in {folded.count} classes")
    every, _ = simulate_program(program, singleton_classes(program), cost.blocks)
    once, _ = simulate_program(program, folded, cost.blocks)
    assert len(set(once.rank.tolist())) <= folded.count
    same(once, every)


@given(costed())
@examples(100)
def test_folding_does_not_need_coalescing(cost: UnitCost) -> None:
    program = cost.program
    every, _ = simulate_program(program, singleton_classes(program), cost.blocks, coalesce=False)
    once, _ = simulate_program(program, fold(program, cost.blocks), cost.blocks, coalesce=False)
    same(once, every)


@given(scenarios())
@examples(150)
def test_folded_is_unfolded_in_training_steps(scenario: Scenario) -> None:
    folded, every = simulate(scenario), simulate(scenario.with_overrides("cost.symmetry=off"))
    assert every.simulated_rank_count == every.rank_count
    event(f"{folded.rank_count} ranks in {folded.simulated_rank_count} classes")
    same(folded.trace, every.trace, relative=1e-9)


@given(scenarios())
@examples(50)
def test_the_answer_does_not_depend_on_folding(scenario: Scenario) -> None:
    """What a rank works is the same part by part, and so is what it idles as a whole.

    Parts of idle time are named after what was awaited last. Where two things end together but for rounding, as a send
    and a receive may, that is either of them, so the split between these parts may differ.
    """
    folded, every = simulate(scenario), simulate(scenario.with_overrides("cost.symmetry=off"))
    for rank in range(every.rank_count):
        mine, other = folded.breakdown.rank_seconds(rank), every.breakdown.rank_seconds(rank)
        for part in WORK:
            assert abs(mine[part.value] - other[part.value]) <= 1e-6 * every.step_time, (rank, part)
        assert sum(mine.values()) == pytest.approx(sum(other.values()), rel=1e-9)
    for part in WORK:
        assert (
            abs(folded.breakdown.category_total(part) - every.breakdown.category_total(part)) <= 1e-6 * every.step_time
        ), part
    assert folded.recomputed_flops == every.recomputed_flops
    assert folded.peak_memory == every.peak_memory
