"""A block that nobody else can observe may be one event: its operations run where they would have run one by one."""

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
from tests.laws.timelines import same
from tests.strategies import costed, fold, scenarios


def equal(whole: OperationTraceReader, pieces: OperationTraceReader, tolerance: float) -> None:
    """Every operation of every simulated rank; run one by one, all have been written."""
    ranks = pieces.trace.simulated_ranks.tolist()
    assert sum(len(pieces.rank_spans(rank)) for rank in ranks) == len(pieces.operation_log)
    for rank in ranks:
        _equal(whole.rank_spans(rank), pieces.rank_spans(rank), tolerance)


def _equal(mine: OperationSpans, other: OperationSpans, tolerance: float) -> None:
    assert mine.task.tolist() == other.task.tolist()
    assert mine.operation.tolist() == other.operation.tolist()
    for left, right in zip(mine.columns[3:], other.columns[3:], strict=True):
        assert np.abs(left - right).max(initial=0.0) <= tolerance


def ran(program: Program, classes: SymmetryClasses, cost: SegmentCost, *, coalesce: bool) -> OperationTraceReader:
    return OperationTraceReader(
        program, classes, cost, None, *simulate_program(program, classes, cost, coalesce=coalesce)
    )


@given(costed())
@examples(200)
def test_coalesced_is_fine_grained_in_any_program(cost: UnitCost) -> None:
    """With dyadic durations sums are exact, so the times are equal bit for bit."""
    program, blocks = cost.program, cost.blocks
    for classes in (fold(program, blocks), singleton_classes(program)):
        whole, pieces = (ran(program, classes, blocks, coalesce=item) for item in (True, False))
        same(whole.trace, pieces.trace)
        equal(whole, pieces, 0.0)


@given(scenarios())
@examples(60)
def test_coalesced_is_fine_grained_in_training_steps(scenario: Scenario) -> None:
    result, fine = simulate(scenario), simulate(scenario.with_overrides("cost.coalesce=false"))
    same(result.trace, fine.trace, relative=1e-9)
    equal(result.operation_trace, fine.operation_trace, 1e-9 * result.step_time)
    same_breakdown(result, fine)


def same_breakdown(whole: SimulationResult, fine: SimulationResult) -> None:
    """Every rank's parts, to the rounding of the times that they are made of."""
    assert np.abs(whole.breakdown.seconds - fine.breakdown.seconds).max() <= 1e-8 * whole.step_time


def test_two_that_end_together_are_waited_for_as_one() -> None:
    """The layers that a stage gathers come as its first message does, but for the last bit of the time.

    Which of both a rank waited for then depended on how the step was run: exposed pp or dp.
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
                "pipeline_overlap": False, "backward_overlap": False, "sequence_parallel": False,
            },
            "schedule": "interleaved",
            "training": {"sequence": 128, "global_batch": 32, "recompute": "full"},
        }
    )  # fmt: skip
    same_breakdown(simulate(tied), simulate(tied.with_overrides("cost.coalesce=false")))
