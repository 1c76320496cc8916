"""A block that nobody else can observe may be one event: its operations run where its offsets say."""

import numpy as np
from hypothesis import given, settings

from clustersim import Scenario, simulate
from clustersim.cost.block import BlockCost
from clustersim.engine.engine import run
from clustersim.program.program import Program
from clustersim.program.symmetry import Classes, unfolded
from clustersim.program.task import Compute
from tests.engine.fake_costs import UnitCost
from tests.laws.timelines import same
from tests.strategies import costed, fold, scenarios

Spans = dict[tuple[int, int, int], tuple[float, float]]
"""Start and end by rank, task and operation."""


def operation_spans(program: Program, classes: Classes, cost: BlockCost, *, coalesce: bool) -> Spans:
    """Every operation of every block, written by the engine or worked out from the block's start."""
    trace, written = run(program, classes, cost, coalesce=coalesce)
    found: Spans = {}
    for rank, number, start in zip(trace.rank.tolist(), trace.task.tolist(), trace.start.tolist(), strict=True):
        task = program.programs[int(program.kind[rank])].tasks[number]
        if isinstance(task, Compute):
            edges = (start + cost.block(rank, task.block).offsets).tolist()
            found |= {(rank, number, place): edges[place : place + 2] for place in range(len(edges) - 1)}
    columns = written.rank, written.task, written.operation, written.start, written.end
    for *where, start, end in zip(*(column.tolist() for column in columns), strict=True):
        found[tuple(where)] = [start, end]
    if not coalesce:
        assert len(written) == len(found), "run one by one, every operation is written"
    return found


def equal(left: Spans, right: Spans, tolerance: float) -> None:
    assert left.keys() == right.keys()
    if left:
        whole = np.array([left[key] for key in left]) - np.array([right[key] for key in left])
        assert np.abs(whole).max() <= tolerance


@given(costed())
@settings(max_examples=200)
def test_coalesced_is_fine_grained_in_any_program(cost: UnitCost) -> None:
    program, blocks = cost.program, cost.blocks
    for classes in (fold(program, blocks), unfolded(program)):
        same(run(program, classes, blocks)[0], run(program, classes, blocks, coalesce=False)[0])
        whole, pieces = (operation_spans(program, classes, blocks, coalesce=each) for each in (True, False))
        equal(whole, pieces, 0.0)


@given(scenarios())
@settings(max_examples=60)
def test_coalesced_is_fine_grained_in_training_steps(scenario: Scenario) -> None:
    result, fine = simulate(scenario), simulate(scenario.changed("cost.coalesce=false"))
    same(result.trace, fine.trace, relative=1e-9)
    classes = fold(result.program, result.cost)
    whole, pieces = (operation_spans(result.program, classes, result.cost, coalesce=each) for each in (True, False))
    equal(whole, pieces, 1e-9 * result.step_time)
