"""A segment that no other rank observes may be one event: its operations keep their fine-grained times."""

import numpy as np
from hypothesis import given

from clustersim import Scenario, simulate
from clustersim.cost.segment import SegmentCost
from clustersim.engine.engine import simulate_program
from clustersim.engine.recording.operation_trace import OperationTraceReader
from clustersim.program.program import Program
from clustersim.results.simulation_result import SimulationResult
from clustersim.symmetry.refinement import SymmetryClasses, singleton_classes
from clustersim.trace.trace import OperationSpans
from tests.conftest import examples
from tests.engine.fake_costs import UnitCost
from tests.laws.timelines import assert_same_trace
from tests.strategies import costed_programs, fold_ranks, scenarios


def assert_equal_operations(
    coalesced: OperationTraceReader, fine_grained: OperationTraceReader, tolerance: float
) -> None:
    """Assert that every operation of every simulated rank agrees; a fine-grained run has logged all of them."""
    ranks = fine_grained.trace.simulated_ranks.tolist()
    assert sum(len(fine_grained.rank_spans(rank)) for rank in ranks) == len(fine_grained.operation_log)
    for rank in ranks:
        _assert_equal_spans(coalesced.rank_spans(rank), fine_grained.rank_spans(rank), tolerance)


def _assert_equal_spans(spans: OperationSpans, other_spans: OperationSpans, tolerance: float) -> None:
    assert spans.task.tolist() == other_spans.task.tolist()
    assert spans.operation.tolist() == other_spans.operation.tolist()
    for column, other_column in zip(spans.columns[3:], other_spans.columns[3:], strict=True):
        assert np.abs(column - other_column).max(initial=0.0) <= tolerance


def run_and_read_operations(
    program: Program, classes: SymmetryClasses, cost: SegmentCost, *, coalesce: bool
) -> OperationTraceReader:
    return OperationTraceReader(
        program, classes, cost, None, *simulate_program(program, classes, cost, coalesce=coalesce)
    )


@given(costed_programs())
@examples(200)
def test_coalesced_equals_fine_grained_in_random_programs(cost: UnitCost) -> None:
    """With dyadic durations sums are exact, so the times are equal bit for bit."""
    program, segment_cost = cost.program, cost.segment_cost
    for classes in (fold_ranks(program, segment_cost), singleton_classes(program)):
        coalesced, fine_grained = (
            run_and_read_operations(program, classes, segment_cost, coalesce=coalesce) for coalesce in (True, False)
        )
        assert_same_trace(coalesced.trace, fine_grained.trace)
        assert_equal_operations(coalesced, fine_grained, 0.0)


@given(scenarios())
@examples(60)
def test_coalesced_equals_fine_grained_in_training_steps(scenario: Scenario) -> None:
    result, fine_grained = simulate(scenario), simulate(scenario.with_overrides("cost.coalesce=false"))
    assert_same_trace(result.trace, fine_grained.trace, relative=1e-9)
    assert_equal_operations(result.operation_trace, fine_grained.operation_trace, 1e-9 * result.step_time)
    assert_same_breakdown(result, fine_grained)


def assert_same_breakdown(result: SimulationResult, other: SimulationResult) -> None:
    """Assert that every rank's time categories agree to the rounding of the times they are derived from."""
    assert np.abs(result.breakdown.seconds - other.breakdown.seconds).max() <= 1e-8 * result.step_time


def test_tied_predecessors_give_the_same_breakdown_coalesced_or_not() -> None:
    """The layers that a stage gathers arrive with its first message, up to the last bit of the time.

    Which of the two a rank waited for (exposed pp or dp) used to depend on how the step was run.
    """
    tied = Scenario.from_mapping(
        {
            "model": {
                "family": "gpt", "layers": 8, "hidden": 64, "heads": 4, "kv_heads": 4, "ffn": 128, "vocab": 256,
                "tied_embeddings": False,
            },
            "cluster": {
                "name": "llama3-roce", "gpus": 16, "fabric": {"leaf": {"nodes": 8}},
                "node": {"gpus": 2, "nic": {"per_node": 2}, "nvlink": {"gpus": 2}},
            },
            "framework": "pytorch",
            "layout": {
                "dp": 4, "pp": 4, "order": ["pp", "cp", "dp", "tp"], "data": {"fsdp": {"copies": False}},
                "overlap_p2p_comm": False, "async_tensor_model_parallel_allreduce": False, "sequence_parallel": False,
            },
            "schedule": "interleaved",
            "training": {"sequence": 128, "global_batch": 32, "recompute": "full"},
        }
    )  # fmt: skip
    assert_same_breakdown(simulate(tied), simulate(tied.with_overrides("cost.coalesce=false")))
