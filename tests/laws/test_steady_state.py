"""What repeats itself is written again as it would have run, event by event."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from clustersim import Scenario, simulate
from clustersim.common.arrays import FloatArray, IntArray
from clustersim.cost.segment import SegmentCost
from clustersim.engine import engine
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
from tests.strategies import costed, fold, scenarios

TIMES = 12


def one_by_one(*_: Any) -> None:
    """In place of `watch_steady_state`: nothing is skipped."""


def equal(mine: tuple[Trace, OperationSpanLog], other: tuple[Trace, OperationSpanLog], *, relative: float) -> None:
    """All rows, what allowed them, what their blocks lost to others, and all pieces of blocks that were written."""
    left, right = mine[0], other[0]
    least, orders = relative * right.makespan, [np.lexsort((trace.task, trace.rank)) for trace in (left, right)]
    for column in ("rank", "task", "stream"):
        assert _column(left, column, orders[0]).tolist() == _column(right, column, orders[1]).tolist()
    for column in ("queued", "ready", "start", "end", "waited", "slowed", "contended"):
        more = _column(left, column, orders[0]) - _column(right, column, orders[1])
        assert np.abs(more).max(initial=0.0) <= least, column
    for column in ("cause", "leader"):
        more = _ended(left, column, orders[0]) - _ended(right, column, orders[1])
        assert np.abs(more).max(initial=0.0) <= least, column
    _equal_pieces(mine[1], other[1], least)


def _column(trace: Trace, column: str, order: IntArray) -> Any:
    return getattr(trace, column)[order]


def _ended(trace: Trace, column: str, order: IntArray) -> FloatArray:
    """When the rows ended that a column names: of several that ended together, but for rounding, it may be any."""
    rows = getattr(trace, column)[order]
    return np.where(rows >= 0, trace.end[rows], -1.0)


def _equal_pieces(left: OperationSpanLog, right: OperationSpanLog, least: float) -> None:
    orders = [
        np.lexsort((operation_span_log.begin_operation, operation_span_log.task, operation_span_log.rank))
        for operation_span_log in (left, right)
    ]
    for column in ("rank", "task", "begin", "until"):
        assert getattr(left, column)[orders[0]].tolist() == getattr(right, column)[orders[1]].tolist()
    for column in ("first", "last"):
        more = getattr(left, column)[orders[0]] - getattr(right, column)[orders[1]]
        assert np.abs(more).max(initial=0.0) <= least


@st.composite
def steady(draw: st.DrawFn) -> Scenario:
    """A random step of more microbatches, and of more layers."""
    scenario = draw(scenarios())
    batch = scenario.training.global_batch * draw(st.sampled_from([4, 9, 16]))
    return scenario.with_overrides(f"training.global_batch={batch}", f"model.layers={scenario.model.layer_count * 4}")


@given(steady())
@examples(120)
def test_steps_that_repeat_themselves_are_those_of_all_events(scenario: Scenario) -> None:
    skipped = simulate(scenario)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine, "watch_steady_state", one_by_one)
        whole = simulate(scenario)
    mine, other = (
        (rendered_result.trace, rendered_result.operation_trace.operation_log) for rendered_result in (skipped, whole)
    )
    equal(mine, other, relative=1e-9)
    assert skipped.peak_memory == whole.peak_memory
    assert np.abs(skipped.breakdown.seconds - whole.breakdown.seconds).max() <= 1e-8 * whole.step_time


def repeated(cost: UnitCost, after: int) -> UnitCost:
    """A program's tasks again and again; some wait for what is `after` tasks before them in the time before."""
    program = cost.program
    programs = tuple(_repeated(rank_program, after) for rank_program in program.programs)
    return replace(cost, program=Program(programs, program.program_index, program.groups))


def _repeated(program: RankProgram, after: int) -> RankProgram:
    tasks = (_later(task, time, program, after) for time in range(TIMES) for task in program.tasks)
    return RankProgram(tuple(tasks), program.streams * TIMES)


def _later(task: Task, time: int, program: RankProgram, back: int) -> Task:
    many = len(program.tasks)
    after = tuple(needed + time * many for needed in task.depends_on)
    if time and back and not isinstance(task, ReceiveTask):
        after = (*after, max(time * many - back, 0))
    if isinstance(task, SendTask | ReceiveTask):
        tag = task.tag._replace(microbatch=task.tag.microbatch + 1000 * time)
        return replace(task, depends_on=after, tag=tag)
    return replace(task, depends_on=after)


@given(costed(), st.integers(0, 3))
@examples(300)
def test_programs_that_repeat_themselves_are_those_of_all_events(cost: UnitCost, after: int) -> None:
    again = repeated(cost, after)
    classes = fold(again.program, again.blocks)
    with pytest.MonkeyPatch.context() as patch:
        skipped = ran(again.program, classes, again.blocks)
        patch.setattr(engine, "watch_steady_state", one_by_one)
        whole = ran(again.program, classes, again.blocks)
    equal(skipped, whole, relative=1e-12)


def ran(program: Program, classes: SymmetryClasses, cost: SegmentCost) -> tuple[Trace, OperationSpanLog]:
    return simulate_scalar(program, classes, cost)


@pytest.mark.parametrize(
    ("data", "layout", "least"),
    [
        ("zero1", {"tp": 8, "pp": 2, "dp": 4}, 0.7),  # microbatches
        ("fsdp", {"tp": 8, "dp": 8}, 0.9),  # microbatches, and layers within them
        ("zero1", {"tp": 8, "pp": 2, "dp": 4, "pipeline_overlap": False}, 0.7),
    ],
)
def test_most_of_a_long_step_is_not_run(
    data: str, layout: dict[str, Any], least: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So that the laws above compare something."""
    spared: list[int] = []

    def noted(self: Recorder, repeat: Repetition, known: Any = Recorder.add_repetition) -> None:
        spared.append(repeat.period_sizes.spans * repeat.count)
        known(self, repeat)

    monkeypatch.setattr(Recorder, "add_repetition", noted)
    scenario = Scenario.from_mapping(
        {
            "model": "llama3-8b",
            "cluster": {"name": "dgx-h100", "gpus": 64},
            "layout": {**layout, "data": data},
            "training": {"sequence": 8192, "global_batch": 256},
        }
    )
    rows = len(simulate(scenario).trace)
    assert sum(spared) >= least * rows
