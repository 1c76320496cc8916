"""Segments that a group runs jointly over shared links end as those of members that run by themselves, to the bit."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest

from clustersim import Scenario
from clustersim.engine.scalar.joint_run import JointRun
from clustersim.engine.scalar.shared_state import SharedState, SyncGroup
from clustersim.program.task import Segment
from clustersim.results.simulation_result import SimulationResult
from clustersim.simulation import simulate

TIMES = "ready", "start", "end", "waited", "slowed"
EVENTS = "rank", "task", "stream", "critical_predecessor", "blocking_event"


def mixture(training: Mapping[str, Any] | None = None, **keys: Any) -> Scenario:
    return Scenario.from_mapping(
        {
            "model": {"preset": "mixtral-8x7b", "layers": 4, "experts": 16},
            "cluster": {"name": "dgx-h100", "gpus": 32},
            "layout": {"pp": 2, "dp": 16, "ep": 16, "data": "zero1"},
            "training": {"sequence": 1024, "global_batch": 64, "expert_load": 0.3, **(training or {})},
            **keys,
        }
    )


def simulate_one_by_one(scenario: Scenario, monkeypatch: pytest.MonkeyPatch) -> SimulationResult:
    """Simulate with every member of a stepwise group by itself."""
    find_group = SharedState.sync_group

    def sync_group(state: SharedState, rank: int, segment: Segment) -> SyncGroup | None:
        group = find_group(state, rank, segment)
        return None if group is None or group.is_stepwise else group

    with monkeypatch.context() as patch:
        patch.setattr(SharedState, "sync_group", sync_group)
        return simulate(scenario)


def rows(result: SimulationResult) -> tuple[np.ndarray[Any, Any], ...]:
    """Columns of the trace by rank and task, with events as positions in that order; operations of two ranks."""
    trace = result.trace
    order = np.lexsort((trace.task, trace.rank))
    position = np.append(np.argsort(order), -1)
    columns = [getattr(trace, name) for name in (*TIMES, *EVENTS)]
    columns[-2:] = position[trace.critical_predecessor], position[trace.blocking_event]
    ranks = trace.simulated_ranks.tolist()
    spans = [column for rank in (ranks[0], ranks[-1]) for column in result.operation_spans(rank).columns]
    return *(column[order] for column in columns), trace.contended[order], *spans


@pytest.mark.parametrize(
    "scenario",
    [
        mixture(),
        mixture({"recompute": "full"}, layout={"pp": 2, "dp": 16, "ep": 16, "data": "zero2"}),
        mixture({"global_batch": 32}, layout={"dp": 32, "ep": 16, "data": {"fsdp": {"prefetch": 1}}}),
        mixture(degradations={"jitter": "1%"}, steps=2),
        mixture({"expert_load": 0.0}, degradations={"slow": [{"gpu": 5, "speed": 0.9}]}),
    ],
    ids=["zero1", "zero2", "fsdp", "jitter", "slow"],
)
def test_joint_runs_change_nothing(scenario: Scenario, monkeypatch: pytest.MonkeyPatch) -> None:
    begun: list[JointRun] = []
    begin = JointRun.begin

    def count(run: JointRun) -> None:
        begun.append(run)
        begin(run)

    monkeypatch.setattr(JointRun, "begin", count)
    jointly = simulate(scenario)
    assert begun
    begun.clear()
    one_by_one = simulate_one_by_one(scenario, monkeypatch)
    assert not begun
    for joint, single in zip(rows(jointly), rows(one_by_one), strict=True):
        np.testing.assert_array_equal(joint, single)
