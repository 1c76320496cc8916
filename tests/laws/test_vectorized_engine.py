"""Cohorts as arrays give the spans that ranks give one by one, with slow ranks, interference and jitter."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import event, given
from hypothesis import strategies as st

from clustersim.common.arrays import FloatArray
from clustersim.cost.device_models import DeviceModel, DeviceModels, ThrottledKernels
from clustersim.cost.interference import Interference
from clustersim.cost.jitter import Distribution, Jitter
from clustersim.cost.segment import SegmentCost
from clustersim.engine.engine import simulate_scalar
from clustersim.engine.recording.operation_trace import OperationTraceReader
from clustersim.engine.recording.recorder import Recorder
from clustersim.engine.vectorized import segment_durations
from clustersim.engine.vectorized.engine import VectorizedEngine, can_vectorize
from clustersim.program.program import Program
from clustersim.symmetry.refinement import SymmetryClasses, singleton_classes
from tests.conftest import examples
from tests.engine.fake_costs import UnitCost
from tests.laws.timelines import same
from tests.strategies import INTERFERENCES, costed, fold

JITTERS = st.none() | st.builds(
    Jitter, std=st.sampled_from([0.01, 0.1]), distribution=st.sampled_from(Distribution), seed=st.integers(0, 3)
)


@st.composite
def machines(draw: st.DrawFn, cost: UnitCost) -> DeviceModels:
    """Ranks at up to two speeds, whose kernels collectives slow or not, all alike or each class in its own way."""
    kinds = tuple(DeviceModel(ThrottledKernels(cost, speed), draw(INTERFERENCES)) for speed in (1.0, 0.5))
    ranks = cost.program.world_size
    return DeviceModels(kinds, np.array(draw(st.lists(st.sampled_from([0, 0, 1]), min_size=ranks, max_size=ranks))))


@st.composite
def disturbed(draw: st.DrawFn) -> tuple[Program, SegmentCost]:
    cost = draw(costed())
    return cost.program, SegmentCost(cost.program, draw(machines(cost)), cost)


def both(
    program: Program, classes: SymmetryClasses, cost: SegmentCost, jitter: Jitter | None, *, coalesce: bool
) -> bool:
    """Compare cohorts with ranks one by one; say whether cohorts could run the program."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(segment_durations, "DRAW_SIZE", 2)  # so that factors are drawn in many portions
        trace = (
            VectorizedEngine(program, classes, cost, jitter).simulate_all()
            if can_vectorize(program) and not cost.compute_slows_comm
            else None
        )
    if trace is None:
        return False
    one_by_one, _ = simulate_scalar(program, classes, cost, jitter=jitter, coalesce=coalesce)
    same(trace, one_by_one, relative=1e-9)
    for mine, other in ((trace.waited, one_by_one.waited), (trace.slowed, one_by_one.slowed)):
        order, other_order = (np.lexsort((item.task, item.rank)) for item in (trace, one_by_one))
        np.testing.assert_allclose(mine[order], other[other_order], rtol=0, atol=1e-9 * max(trace.makespan, 1.0))
    return True


@given(disturbed(), JITTERS, st.booleans())
@examples(400)
def test_cohorts_are_ranks_one_by_one(made: tuple[Program, SegmentCost], jitter: Jitter | None, coalesce: bool) -> None:
    program, cost = made
    event(f"able: {both(program, singleton_classes(program), cost, jitter, coalesce=coalesce)}")


@given(disturbed())
@examples(300)
def test_folded_cohorts_are_unfolded_ranks(made: tuple[Program, SegmentCost]) -> None:
    """Slow ranks and interference split classes where they are felt, and nowhere else."""
    program, cost = made
    classes = fold(program, cost)
    event(f"folds: {classes.count < program.world_size}")
    every, _ = simulate_scalar(program, singleton_classes(program), cost, coalesce=False)
    once, _ = simulate_scalar(program, classes, cost)
    same(once, every, relative=1e-9)
    both(program, classes, cost, None, coalesce=True)


@given(disturbed(), JITTERS, st.booleans())
@examples(300)
def test_operations_worked_out_afterwards_are_those_that_ran(
    made: tuple[Program, SegmentCost], jitter: Jitter | None, cohorts: bool
) -> None:
    """Whoever ran the blocks as one event, or as arrays, its operations are found where fine-grained ranks ran them."""
    program, cost = made
    classes = singleton_classes(program)
    fine, written = simulate_scalar(program, classes, cost, jitter=jitter, coalesce=False)
    ran = simulate_scalar(program, classes, cost, jitter=jitter)
    if (
        cohorts
        and can_vectorize(program)
        and not cost.compute_slows_comm
        and (trace := VectorizedEngine(program, classes, cost, jitter).simulate_all()) is not None
    ):
        ran = trace, Recorder().operation_log()
    inside = OperationTraceReader(program, classes, cost, jitter, *ran)
    for rank in range(program.world_size):
        mine, other = inside.rank_spans(rank), written.task_spans(rank, set(written.task.tolist()))
        order = np.lexsort((other.operation, other.task))
        assert mine.task.tolist() == other.task[order].tolist()
        assert mine.operation.tolist() == other.operation[order].tolist()
        for left, right in ((mine.start, other.start[order]), (mine.end, other.end[order])):
            assert np.abs(left - right).max(initial=0.0) <= 1e-9 * max(fine.makespan, 1.0)


@given(costed(), INTERFERENCES)
@examples(200)
def test_interference_makes_nothing_earlier(cost: UnitCost, interference: Interference) -> None:
    """Who slows whom by whatever parts: no span ends before it would with nobody slowed."""
    program = cost.program
    made = [Interference.uniform(0.0), interference]
    costs = [
        SegmentCost(program, DeviceModels.uniform(DeviceModel(cost, item), program.world_size), cost) for item in made
    ]
    without, slowed = (simulate_scalar(program, singleton_classes(program), segment_cost)[0] for segment_cost in costs)
    first, second = (np.lexsort((trace.task, trace.rank)) for trace in (without, slowed))
    assert (slowed.end[second] >= without.end[first] - 1e-9).all()


@dataclass(frozen=True, slots=True)
class Constant(Jitter):
    """The same factor for every kernel."""

    def draw_factors(self, generators: Sequence[np.random.Generator], out: FloatArray) -> None:  # noqa: ARG002
        out[:] = 1.0 + self.std


@given(costed(), st.sampled_from([0.0, 0.5]), st.booleans())
@examples(150)
def test_jitter_by_the_same_factor_everywhere_is_a_speed(cost: UnitCost, interference: float, cohorts: bool) -> None:
    """Also of kernels that hide behind an exchange of their own operation."""
    program, classes = cost.program, singleton_classes(cost.program)
    usual, slow = (
        SegmentCost(
            program,
            DeviceModels.uniform(DeviceModel(kernels, Interference.uniform(interference)), program.world_size),
            cost,
        )
        for kernels in (cost, ThrottledKernels(cost, 0.8))
    )
    jitter = Constant(0.25)
    trace = (
        VectorizedEngine(program, classes, usual, jitter).simulate_all() if cohorts and can_vectorize(program) else None
    )
    if trace is None:
        trace, _ = simulate_scalar(program, classes, usual, jitter=jitter)
    same(trace, simulate_scalar(program, classes, slow)[0], relative=1e-9)
