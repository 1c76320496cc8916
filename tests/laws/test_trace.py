"""Invariants of traces: causes, sums, repeatability and time scaling."""

import pickle
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given

from clustersim import Scenario, simulate
from clustersim.common.arrays import IntArray
from clustersim.engine.engine import simulate_program
from clustersim.program.program import Program
from clustersim.program.task import Stream
from clustersim.symmetry.refinement import singleton_classes
from clustersim.trace.trace import Trace
from tests.conftest import examples
from tests.engine.fake_costs import UnitCost
from tests.strategies import costed_programs, fold_ranks, scenarios


def check_trace(trace: Trace, program: Program) -> None:
    """Assert what holds in every trace.

    Times of a span ascend; the tasks of a stream run one after the other; a task starts after all its
    dependencies; and nothing idles without a cause: each span starts at 0 or when its cause ends.
    """
    times = np.stack([trace.queued_times(np.arange(len(trace))), trace.ready, trace.start, trace.end])
    assert (np.diff(times, axis=0) >= 0).all()
    caused = trace.critical_predecessor >= 0
    assert (trace.start[~caused] == 0).all()
    assert (trace.start[caused] == trace.end[trace.critical_predecessor[caused]]).all()
    assert (_follow_causes(trace.critical_predecessor) == -1).all(), "causes lead back to the beginning"
    for rank in trace.simulated_ranks.tolist():
        _check_rank(trace, program, rank)


def _follow_causes(cause: IntArray) -> IntArray:
    """Where each event's chain of causes leads after as many steps as there are events, or -1."""
    for _ in range(len(cause).bit_length()):
        cause = np.where(cause < 0, -1, cause[cause])
    return cause


def _check_rank(trace: Trace, program: Program, rank: int) -> None:
    tasks = program.programs[int(program.program_index[rank])].tasks
    start, end = np.full(len(tasks), np.nan), np.full(len(tasks), np.nan)
    for stream in Stream:
        event_indices = np.flatnonzero((trace.rank == rank) & (trace.stream == stream))
        start[trace.task[event_indices]], end[trace.task[event_indices]] = (
            trace.start[event_indices],
            trace.end[event_indices],
        )
        if stream is not Stream.RECEIVE:
            assert (np.diff(trace.task[event_indices]) > 0).all()
            assert (trace.start[event_indices[1:]] >= trace.end[event_indices[:-1]]).all()
    assert np.isfinite(end).all()
    for task_id, task in enumerate(tasks):
        assert all(end[dependency] <= start[task_id] for dependency in task.depends_on)


@given(costed_programs())
@examples(200)
def test_random_programs_start_every_task_when_its_cause_ends(cost: UnitCost) -> None:
    program = cost.program
    for classes in (singleton_classes(program), fold_ranks(program, cost.segment_cost)):
        check_trace(simulate_program(program, classes, cost.segment_cost)[0], program)


@given(scenarios())
@examples(60)
def test_training_steps_start_every_task_when_its_cause_ends(scenario: Scenario) -> None:
    result = simulate(scenario)
    check_trace(result.trace, result.program)


@given(scenarios())
@examples(100)
def test_the_breakdown_of_every_rank_sums_to_the_step_time(scenario: Scenario) -> None:
    result = simulate(scenario)
    for rank in range(result.rank_count):
        categories = result.breakdown.rank_seconds(rank)
        assert sum(categories.values()) == pytest.approx(result.step_time, rel=1e-9)
        assert min(categories.values()) >= -1e-9 * result.step_time
    assert sum(result.breakdown.mean_seconds().values()) == pytest.approx(result.step_time, rel=1e-9)
    assert sum(result.provenance_shares.values()) == pytest.approx(1.0, rel=1e-9)


@given(scenarios())
@examples(100)
def test_the_critical_path_is_as_long_as_the_step(scenario: Scenario) -> None:
    """It starts at 0, each span starts when the previous one ends, it ends with the step; no stream is longer.

    But where a segment waited inside for a rank, that rank's run of the segment comes before it.
    """
    result = simulate(scenario)
    trace, path = result.trace, result.critical_path
    assert trace.start[path[0]] == 0
    from_leader = (trace.blocking_event[path[1:]] == path[:-1]) & (trace.task[path[1:]] == trace.task[path[:-1]])
    assert ((trace.start[path[1:]] == trace.end[path[:-1]]) | from_leader).all()
    assert (trace.waited[path[1:]][from_leader] >= trace.waited[path[:-1]][from_leader]).all()
    assert trace.end[path[-1]] == result.step_time
    if not from_leader.any():
        assert float((trace.end[path] - trace.start[path]).sum()) == pytest.approx(result.step_time, rel=1e-9)
    assert sum(result.critical_path_breakdown.values()) == pytest.approx(result.step_time, rel=1e-9)
    for rank in trace.simulated_ranks.tolist():
        for stream in set(Stream) - {Stream.RECEIVE}:
            event_indices = trace.rank_events(rank, stream)
            assert float((trace.end[event_indices] - trace.start[event_indices]).sum()) <= result.step_time * (1 + 1e-9)


@given(scenarios())
@examples(40)
def test_the_same_scenario_gives_the_same_bytes(scenario: Scenario) -> None:
    """Simulated again, with another one in between, and from its own mapping."""
    first = simulate(scenario)
    simulate(scenario.with_overrides("cost.symmetry=off"))
    for again in (simulate(scenario), simulate(Scenario.from_mapping(scenario.to_mapping()))):
        assert pickle.dumps(again.trace) == pickle.dumps(first.trace)
        assert _without_wall_time(again.to_json()) == _without_wall_time(first.to_json())


def _without_wall_time(values: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in values.items() if key != "simulate_wall_s"}


@given(costed_programs())
@examples(200)
def test_doubled_durations_double_every_timestamp_bit_for_bit(cost: UnitCost) -> None:
    """Whatever rounding does to sums of thirds, it does the same to their doubles."""
    slow, fast = replace(cost, seconds_per_unit=2 / 3), replace(cost, seconds_per_unit=1 / 3)
    for classes in (singleton_classes(cost.program), fold_ranks(cost.program, fast.segment_cost)):
        trace, _ = simulate_program(cost.program, classes, fast.segment_cost)
        doubled_trace, _ = simulate_program(cost.program, classes, slow.segment_cost)
        for column in ("rank", "task", "stream", "critical_predecessor"):
            assert getattr(trace, column).tolist() == getattr(doubled_trace, column).tolist()
        for column in ("ready", "start", "end"):
            assert (2 * getattr(trace, column)).tolist() == getattr(doubled_trace, column).tolist()
