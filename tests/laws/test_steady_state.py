"""A fast-forwarded steady state equals the full event-by-event run."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from clustersim import Scenario, simulate
from clustersim.common.arrays import FloatArray, IntArray
from clustersim.cost.segment import SegmentCost
from clustersim.engine import execution_strategies
from clustersim.engine.engine import simulate_scalar
from clustersim.engine.recording.operation_log import OperationSpanLog
from clustersim.engine.recording.recorder import Recorder
from clustersim.engine.recording.unroll import Repetition
from clustersim.program.program import Program, RankProgram
from clustersim.program.task import ReceiveTask, SendTask, Task
from clustersim.symmetry.refinement import SymmetryClasses
from clustersim.trace.trace import Trace
from tests.conftest import examples
from tests.engine.fake_costs import UnitCost
from tests.strategies import costed_programs, fold_ranks, scenarios

REPETITIONS = 12


def watch_nothing(*_: Any) -> None:
    """Replacement of the steady-state detector's `watch_steady_state`: nothing is skipped."""


def assert_equal_runs(
    run: tuple[Trace, OperationSpanLog], other_run: tuple[Trace, OperationSpanLog], *, relative: float
) -> None:
    """Assert that all events, their predecessors, contention and logged sub-segments agree."""
    trace, other_trace = run[0], other_run[0]
    tolerance, orders = (
        relative * other_trace.makespan,
        [np.lexsort((item.task, item.rank)) for item in (trace, other_trace)],
    )
    for column in ("rank", "task", "stream"):
        assert _column(trace, column, orders[0]).tolist() == _column(other_trace, column, orders[1]).tolist()
    for column in ("ready", "start", "end", "waited", "slowed", "contended"):
        difference = _column(trace, column, orders[0]) - _column(other_trace, column, orders[1])
        assert np.abs(difference).max(initial=0.0) <= tolerance, column
    for column in ("critical_predecessor", "blocking_event"):
        difference = _predecessor_ends(trace, column, orders[0]) - _predecessor_ends(other_trace, column, orders[1])
        assert np.abs(difference).max(initial=0.0) <= tolerance, column
    _assert_equal_sub_segments(run[1], other_run[1], tolerance)


def _column(trace: Trace, column: str, order: IntArray) -> Any:
    return getattr(trace, column)[order]


def _predecessor_ends(trace: Trace, column: str, order: IntArray) -> FloatArray:
    """End times of the predecessors that a column names: of several tied up to rounding it may be any."""
    predecessors = getattr(trace, column)[order]
    return np.where(predecessors >= 0, trace.end[predecessors], -1.0)


def _assert_equal_sub_segments(log: OperationSpanLog, other_log: OperationSpanLog, tolerance: float) -> None:
    orders = [
        np.lexsort((operation_span_log.begin_operation, operation_span_log.task, operation_span_log.rank))
        for operation_span_log in (log, other_log)
    ]
    for column in ("rank", "task", "begin_operation", "end_operation"):
        assert getattr(log, column)[orders[0]].tolist() == getattr(other_log, column)[orders[1]].tolist()
    for column in ("start", "end"):
        difference = getattr(log, column)[orders[0]] - getattr(other_log, column)[orders[1]]
        assert np.abs(difference).max(initial=0.0) <= tolerance


@st.composite
def long_steps(draw: st.DrawFn) -> Scenario:
    """A random step with more microbatches and more layers."""
    scenario = draw(scenarios())
    batch = scenario.training.global_batch * draw(st.sampled_from([4, 9, 16]))
    return scenario.with_overrides(f"training.global_batch={batch}", f"model.layers={scenario.model.layer_count * 4}")


@given(long_steps())
@examples(120)
def test_fast_forwarded_steps_equal_full_event_runs(scenario: Scenario) -> None:
    skipped = simulate(scenario)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(execution_strategies, "watch_steady_state", watch_nothing)
        full = simulate(scenario)
    skipped_run, full_run = ((result.trace, result.operation_trace.operation_log) for result in (skipped, full))
    assert_equal_runs(skipped_run, full_run, relative=1e-9)
    assert skipped.peak_memory == full.peak_memory
    assert np.abs(skipped.breakdown.seconds - full.breakdown.seconds).max() <= 1e-8 * full.step_time


def repeated(cost: UnitCost, distance: int) -> UnitCost:
    """A program's tasks repeated; some depend on the task `distance` tasks before them in the previous repetition."""
    program = cost.program
    programs = tuple(_repeated_program(rank_program, distance) for rank_program in program.programs)
    return replace(cost, program=Program(programs, program.program_index, program.groups))


def _repeated_program(program: RankProgram, distance: int) -> RankProgram:
    tasks = (
        _shifted_task(task, repetition, program, distance)
        for repetition in range(REPETITIONS)
        for task in program.tasks
    )
    return RankProgram(tuple(tasks), program.streams * REPETITIONS)


def _shifted_task(task: Task, repetition: int, program: RankProgram, distance: int) -> Task:
    task_count = len(program.tasks)
    depends_on = tuple(dependency + repetition * task_count for dependency in task.depends_on)
    if repetition and distance and not isinstance(task, ReceiveTask):
        depends_on = (*depends_on, max(repetition * task_count - distance, 0))
    if isinstance(task, SendTask | ReceiveTask):
        tag = task.tag._replace(microbatch=task.tag.microbatch + 1000 * repetition)
        return replace(task, depends_on=depends_on, tag=tag)
    return replace(task, depends_on=depends_on)


@given(costed_programs(), st.integers(0, 3))
@examples(300)
def test_fast_forwarded_programs_equal_full_event_runs(cost: UnitCost, distance: int) -> None:
    repeated_cost = repeated(cost, distance)
    classes = fold_ranks(repeated_cost.program, repeated_cost.segment_cost)
    with pytest.MonkeyPatch.context() as patch:
        skipped = run_scalar(repeated_cost.program, classes, repeated_cost.segment_cost)
        patch.setattr(execution_strategies, "watch_steady_state", watch_nothing)
        full = run_scalar(repeated_cost.program, classes, repeated_cost.segment_cost)
    assert_equal_runs(skipped, full, relative=1e-12)


def run_scalar(program: Program, classes: SymmetryClasses, cost: SegmentCost) -> tuple[Trace, OperationSpanLog]:
    return simulate_scalar(program, classes, cost)


@pytest.mark.parametrize(
    ("data", "layout", "least"),
    [
        ("zero1", {"tp": 8, "pp": 2, "dp": 4}, 0.7),  # microbatches
        ("fsdp", {"tp": 8, "dp": 8}, 0.9),  # microbatches, and layers within them
        ("zero1", {"tp": 8, "pp": 2, "dp": 4, "overlap_p2p_comm": False}, 0.7),
    ],
)
def test_most_of_a_long_step_is_fast_forwarded(
    data: str, layout: dict[str, Any], least: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So that the equalities above are not vacuous."""
    skipped_events: list[int] = []

    def record_repetition(self: Recorder, repeat: Repetition, original: Any = Recorder.add_repetition) -> None:
        skipped_events.append(repeat.period_sizes.spans * repeat.count)
        original(self, repeat)

    monkeypatch.setattr(Recorder, "add_repetition", record_repetition)
    scenario = Scenario.from_mapping(
        {
            "model": "llama3-8b",
            "cluster": {"name": "dgx-h100", "gpus": 64},
            "layout": {**layout, "data": data},
            "training": {"sequence": 8192, "global_batch": 256},
        }
    )
    event_count = len(simulate(scenario).trace)
    assert sum(skipped_events) >= least * event_count
