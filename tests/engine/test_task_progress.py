"""Whoever watches a simulation learns how many of its tasks are done, whatever strategy executes them."""

from typing import Any, Final

import pytest

from clustersim.engine.task_progress import TaskProgress
from clustersim.scenario import Scenario
from clustersim.simulation import simulate

PLAN: Final[dict[str, Any]] = {
    "model": "llama-tiny",
    "cluster": {"name": "dgx-h100", "gpus": 8},
    "layout": {"tp": 2, "pp": 2, "dp": 2},
    "training": {"sequence": 256, "global_batch": 32},
}
CASES: Final[dict[str, dict[str, Any]]] = {
    "one rank of each class": {},
    "periods are skipped": {"training": {"sequence": 256, "global_batch": 2048}},
    "ranks as arrays": {"degradations": {"jitter": "1%"}, "cost": {"network": "uncontended"}},
    "several steps": {"steps": 3},
}


def watched_simulation(changes: dict[str, Any]) -> tuple[list[TaskProgress], list[int]]:
    """What a watcher is given, and how many tasks are done when it is."""
    given: list[TaskProgress] = []
    done: list[int] = []

    def watch(progress: TaskProgress) -> None:
        given.append(progress)
        done.append(progress.done_count)

    simulate(Scenario.from_mapping({**PLAN, **changes}), watch)
    return given, done


@pytest.mark.parametrize("name", CASES)
def test_all_tasks_are_done_at_the_end_and_none_at_the_beginning(name: str) -> None:
    (progress,), done_at_start = watched_simulation(CASES[name])
    assert done_at_start == [0]
    assert progress.done_count == progress.task_count > 0
