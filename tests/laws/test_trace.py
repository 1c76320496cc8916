"""Laws of time: causes, sums, repetition and scale."""

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
from tests.strategies import costed, fold, scenarios


def check_trace(trace: Trace, program: Program) -> None:
    """What holds in every trace.

    Times of a span ascend; the tasks of a stream run one after the other; a task starts
    after all that it waits for; and nothing idles without a reason: each span starts at 0 or when its cause ends.
    """
    times = np.stack([trace.queued, trace.ready, trace.start, trace.end])
    assert (np.diff(times, axis=0) >= 0).all()
    caused = trace.critical_predecessor >= 0
    assert (trace.start[~caused] == 0).all()
    assert (trace.start[caused] == trace.end[trace.critical_predecessor[caused]]).all()
    assert (_followed(trace.critical_predecessor) == -1).all(), "causes lead back to the beginning"
    for rank in trace.simulated_ranks.tolist():
        _check_rank(trace, program, rank)


def _followed(cause: IntArray) -> IntArray:
    """Where each row's chain of causes leads after as many steps as there are rows, or -1."""
    for _ in range(len(cause).bit_length()):
        cause = np.where(cause < 0, -1, cause[cause])
    return cause


def _check_rank(trace: Trace, program: Program, rank: int) -> None:
    tasks = program.programs[int(program.program_index[rank])].tasks
    start, end = np.full(len(tasks), np.nan), np.full(len(tasks), np.nan)
    for stream in Stream:
        rows = np.flatnonzero((trace.rank == rank) & (trace.stream == stream))
        start[trace.task[rows]], end[trace.task[rows]] = trace.start[rows], trace.end[rows]
        if stream is not Stream.RECEIVE:
            assert (np.diff(trace.task[rows]) > 0).all()
            assert (trace.queued[rows[1:]] == trace.end[rows[:-1]]).all()
    assert np.isfinite(end).all()
    for number, task in enumerate(tasks):
        assert all(end[needed] <= start[number] for needed in task.depends_on)


@given(costed())
@examples(200)
def test_nothing_runs_before_it_may_or_idles_without_a_cause_in_any_program(cost: UnitCost) -> None:
    program = cost.program
    for classes in (singleton_classes(program), fold(program, cost.blocks)):
        check_trace(simulate_program(program, classes, cost.blocks)[0], program)


@given(scenarios())
@examples(60)
def test_nothing_runs_before_it_may_or_idles_without_a_cause_in_training_steps(scenario: Scenario) -> None:
    result = simulate(scenario)
    check_trace(result.trace, result.program)


@given(scenarios())
@examples(100)
def test_the_breakdown_of_every_rank_sums_to_the_step_time(scenario: Scenario) -> None:
    result = simulate(scenario)
    for rank in range(result.rank_count):
        parts = result.breakdown.rank_seconds(rank)
        assert sum(parts.values()) == pytest.approx(result.step_time, rel=1e-9)
        assert min(parts.values()) >= -1e-9 * result.step_time
    assert sum(result.breakdown.mean_seconds().values()) == pytest.approx(result.step_time, rel=1e-9)
    assert sum(result.provenance_shares.values()) == pytest.approx(1.0, rel=1e-9)


@given(scenarios())
@examples(100)
def test_the_critical_path_is_as_long_as_the_step_and_longer_than_any_stream_works(scenario: Scenario) -> None:
    """It starts at 0, each span on it starts when the one before it ends, and it ends with the step.

    But where a block waited inside for a rank, that rank's run of the block comes before it.
    """
    result = simulate(scenario)
    trace, path = result.trace, result.critical_path
    assert trace.start[path[0]] == 0
    led = (trace.blocking_event[path[1:]] == path[:-1]) & (trace.task[path[1:]] == trace.task[path[:-1]])
    assert ((trace.start[path[1:]] == trace.end[path[:-1]]) | led).all()
    assert (trace.waited[path[1:]][led] >= trace.waited[path[:-1]][led]).all()
    assert trace.end[path[-1]] == result.step_time
    if not led.any():
        assert float((trace.end[path] - trace.start[path]).sum()) == pytest.approx(result.step_time, rel=1e-9)
    assert sum(result.critical_path_breakdown.values()) == pytest.approx(result.step_time, rel=1e-9)
    for rank in trace.simulated_ranks.tolist():
        for stream in set(Stream) - {Stream.RECEIVE}:
            rows = trace.rank_events(rank, stream)
            assert float((trace.end[rows] - trace.start[rows]).sum()) <= result.step_time * (1 + 1e-9)


@given(scenarios())
@examples(40)
def test_the_same_scenario_gives_the_same_bytes(scenario: Scenario) -> None:
    """Simulated again, with another one in between, and from its own mapping."""
    first = simulate(scenario)
    simulate(scenario.with_overrides("cost.symmetry=off"))
    for again in (simulate(scenario), simulate(Scenario.from_mapping(scenario.to_mapping()))):
        assert pickle.dumps(again.trace) == pickle.dumps(first.trace)
        assert _numbers(again.to_json()) == _numbers(first.to_json())


def _numbers(answer: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in answer.items() if key != "simulate_wall_s"}


@given(costed())
@examples(200)
def test_twice_the_durations_are_twice_every_timestamp_bit_for_bit(cost: UnitCost) -> None:
    """Whatever rounding does to sums of thirds, it does the same to their doubles."""
    slow, fast = replace(cost, pace=2 / 3), replace(cost, pace=1 / 3)
    for classes in (singleton_classes(cost.program), fold(cost.program, fast.blocks)):
        once, _ = simulate_program(cost.program, classes, fast.blocks)
        twice, _ = simulate_program(cost.program, classes, slow.blocks)
        for column in ("rank", "task", "stream", "cause"):
            assert getattr(once, column).tolist() == getattr(twice, column).tolist()
        for column in ("queued", "ready", "start", "end"):
            assert (2 * getattr(once, column)).tolist() == getattr(twice, column).tolist()
