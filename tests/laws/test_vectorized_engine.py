"""The vectorized engine gives the spans of the scalar one, with slow ranks, interference and jitter."""

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
from tests.laws.timelines import assert_same_trace
from tests.strategies import INTERFERENCES, costed_programs, fold_ranks

JITTERS = st.none() | st.builds(
    Jitter, std=st.sampled_from([0.01, 0.1]), distribution=st.sampled_from(Distribution), seed=st.integers(0, 3)
)


@st.composite
def device_models(draw: st.DrawFn, cost: UnitCost) -> DeviceModels:
    """Ranks at up to two speeds, with or without kernel slowdown by collectives, all equal or different by class."""
    models = tuple(DeviceModel(ThrottledKernels(cost, speed), draw(INTERFERENCES)) for speed in (1.0, 0.5))
    ranks = cost.program.world_size
    return DeviceModels(models, np.array(draw(st.lists(st.sampled_from([0, 0, 1]), min_size=ranks, max_size=ranks))))


@st.composite
def degraded_programs(draw: st.DrawFn) -> tuple[Program, SegmentCost]:
    cost = draw(costed_programs())
    return cost.program, SegmentCost(cost.program, draw(device_models(cost)), cost)


def compare_engines(
    program: Program, classes: SymmetryClasses, cost: SegmentCost, jitter: Jitter | None, *, coalesce: bool
) -> bool:
    """Compare the vectorized engine with the scalar one; return whether the former can run the program."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(segment_durations, "DRAW_SIZE", 2)  # so that factors are drawn in several batches
        trace = (
            VectorizedEngine(program, classes, cost, jitter).simulate_all()
            if can_vectorize(program) and not cost.compute_slows_comm
            else None
        )
    if trace is None:
        return False
    scalar_trace, _ = simulate_scalar(program, classes, cost, jitter=jitter, coalesce=coalesce)
    assert_same_trace(trace, scalar_trace, relative=1e-9)
    for column, other_column in ((trace.waited, scalar_trace.waited), (trace.slowed, scalar_trace.slowed)):
        order, scalar_order = (np.lexsort((compared.task, compared.rank)) for compared in (trace, scalar_trace))
        np.testing.assert_allclose(
            column[order], other_column[scalar_order], rtol=0, atol=1e-9 * max(trace.makespan, 1.0)
        )
    return True


@given(degraded_programs(), JITTERS, st.booleans())
@examples(400)
def test_vectorized_engine_equals_the_scalar_engine(
    case: tuple[Program, SegmentCost], jitter: Jitter | None, coalesce: bool
) -> None:
    program, cost = case
    event(f"able: {compare_engines(program, singleton_classes(program), cost, jitter, coalesce=coalesce)}")


@given(degraded_programs())
@examples(300)
def test_folded_vectorized_engine_equals_unfolded_scalar_engine(case: tuple[Program, SegmentCost]) -> None:
    """Slow ranks and interference split equivalence classes exactly where they have an effect."""
    program, cost = case
    classes = fold_ranks(program, cost)
    event(f"folds: {classes.count < program.world_size}")
    unfolded_trace, _ = simulate_scalar(program, singleton_classes(program), cost, coalesce=False)
    folded_trace, _ = simulate_scalar(program, classes, cost)
    assert_same_trace(folded_trace, unfolded_trace, relative=1e-9)
    compare_engines(program, classes, cost, None, coalesce=True)


@given(degraded_programs(), JITTERS, st.booleans())
@examples(300)
def test_reconstructed_operations_equal_fine_grained_ones(
    case: tuple[Program, SegmentCost], jitter: Jitter | None, vectorized: bool
) -> None:
    """Whichever engine ran segments as one event, operations are at the times of a fine-grained scalar run."""
    program, cost = case
    classes = singleton_classes(program)
    fine_trace, fine_log = simulate_scalar(program, classes, cost, jitter=jitter, coalesce=False)
    coarse_run = simulate_scalar(program, classes, cost, jitter=jitter)
    if (
        vectorized
        and can_vectorize(program)
        and not cost.compute_slows_comm
        and (trace := VectorizedEngine(program, classes, cost, jitter).simulate_all()) is not None
    ):
        coarse_run = trace, Recorder().operation_log()
    operation_reader = OperationTraceReader(program, classes, cost, jitter, *coarse_run)
    for rank in range(program.world_size):
        spans, fine_spans = operation_reader.rank_spans(rank), fine_log.task_spans(rank, set(fine_log.task.tolist()))
        order = np.lexsort((fine_spans.operation, fine_spans.task))
        assert spans.task.tolist() == fine_spans.task[order].tolist()
        assert spans.operation.tolist() == fine_spans.operation[order].tolist()
        for column, fine_column in ((spans.start, fine_spans.start[order]), (spans.end, fine_spans.end[order])):
            assert np.abs(column - fine_column).max(initial=0.0) <= 1e-9 * max(fine_trace.makespan, 1.0)


@given(costed_programs(), INTERFERENCES)
@examples(200)
def test_interference_makes_no_span_end_earlier(cost: UnitCost, interference: Interference) -> None:
    """For any interference table no span ends before its end without interference."""
    program = cost.program
    tables = [Interference.uniform(0.0), interference]
    costs = [
        SegmentCost(program, DeviceModels.uniform(DeviceModel(cost, table), program.world_size), cost)
        for table in tables
    ]
    baseline, slowed = (simulate_scalar(program, singleton_classes(program), segment_cost)[0] for segment_cost in costs)
    baseline_order, slowed_order = (np.lexsort((trace.task, trace.rank)) for trace in (baseline, slowed))
    assert (slowed.end[slowed_order] >= baseline.end[baseline_order] - 1e-9).all()


@dataclass(frozen=True, slots=True)
class ConstantJitter(Jitter):
    """The same factor for every kernel."""

    def draw_factors(self, generators: Sequence[np.random.Generator], out: FloatArray) -> None:  # noqa: ARG002
        out[:] = 1.0 + self.std


@given(costed_programs(), st.sampled_from([0.0, 0.5]), st.booleans())
@examples(150)
def test_constant_jitter_equals_a_slower_device(cost: UnitCost, interference: float, vectorized: bool) -> None:
    """Also for kernels that are hidden behind the collective of their own operation."""
    program, classes = cost.program, singleton_classes(cost.program)
    nominal, slow = (
        SegmentCost(
            program,
            DeviceModels.uniform(DeviceModel(kernels, Interference.uniform(interference)), program.world_size),
            cost,
        )
        for kernels in (cost, ThrottledKernels(cost, 0.8))
    )
    jitter = ConstantJitter(0.25)
    trace = (
        VectorizedEngine(program, classes, nominal, jitter).simulate_all()
        if vectorized and can_vectorize(program)
        else None
    )
    if trace is None:
        trace, _ = simulate_scalar(program, classes, nominal, jitter=jitter)
    assert_same_trace(trace, simulate_scalar(program, classes, slow)[0], relative=1e-9)
