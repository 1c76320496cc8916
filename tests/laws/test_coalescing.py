"""A block that nobody else can observe may be one event: its operations run where they would have run one by one."""

import numpy as np
from hypothesis import given

from clustersim import Scenario, simulate
from clustersim.cost.block import BlockCost
from clustersim.engine.engine import run
from clustersim.engine.inside import Inside
from clustersim.program.program import Program
from clustersim.program.symmetry import Classes, unfolded
from clustersim.trace.store import OperationSpans
from tests.conftest import examples
from tests.engine.fake_costs import UnitCost
from tests.laws.timelines import same
from tests.strategies import costed, fold, scenarios


def equal(whole: Inside, pieces: Inside, tolerance: float) -> None:
    """Every operation of every simulated rank; run one by one, all have been written."""
    ranks = pieces.trace.simulated_ranks.tolist()
    assert sum(len(pieces.of(rank)) for rank in ranks) == len(pieces.written)
    for rank in ranks:
        _equal(whole.of(rank), pieces.of(rank), tolerance)


def _equal(mine: OperationSpans, other: OperationSpans, tolerance: float) -> None:
    assert mine.task.tolist() == other.task.tolist()
    assert mine.operation.tolist() == other.operation.tolist()
    for left, right in zip(mine.columns[3:], other.columns[3:], strict=True):
        assert np.abs(left - right).max(initial=0.0) <= tolerance


def ran(program: Program, classes: Classes, cost: BlockCost, *, coalesce: bool) -> Inside:
    return Inside(program, classes, cost, None, *run(program, classes, cost, coalesce=coalesce))


@given(costed())
@examples(200)
def test_coalesced_is_fine_grained_in_any_program(cost: UnitCost) -> None:
    """With dyadic durations sums are exact, so the times are equal bit for bit."""
    program, blocks = cost.program, cost.blocks
    for classes in (fold(program, blocks), unfolded(program)):
        whole, pieces = (ran(program, classes, blocks, coalesce=each) for each in (True, False))
        same(whole.trace, pieces.trace)
        equal(whole, pieces, 0.0)


@given(scenarios())
@examples(60)
def test_coalesced_is_fine_grained_in_training_steps(scenario: Scenario) -> None:
    result, fine = simulate(scenario), simulate(scenario.changed("cost.coalesce=false"))
    same(result.trace, fine.trace, relative=1e-9)
    equal(result.inside, fine.inside, 1e-9 * result.step_time)
