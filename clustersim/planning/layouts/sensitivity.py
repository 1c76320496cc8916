"""Does the best layout stay the best where the world is a little other than the scenario says?

A few of the best layouts are simulated again with one thing changed, the same for all of them; steps of many
microbatches are estimated from shorter ones.
"""

from collections.abc import Callable
from typing import Final

from clustersim.common.errors import ClusterSimError
from clustersim.planning.layouts.executors import Shared
from clustersim.planning.layouts.extrapolation import extended
from clustersim.planning.layouts.objective import Objective
from clustersim.planning.layouts.search_space import Candidate
from clustersim.results.memory_check import fits_in_memory
from clustersim.results.search_result import Change
from clustersim.scenario import Scenario
from clustersim.scenario.changes.kernels import with_matmul_slowdown
from clustersim.scenario.changes.links import network_link_kinds, nvlink_kinds, pcie_link_kinds, with_link_bandwidth
from clustersim.scenario.changes.training import with_microbatch_size, with_slow_node
from clustersim.scenario.validation_rules.consistency import find_problems
from clustersim.simulation import simulate

LESS: Final = 0.9


def _network(scenario: Scenario) -> Scenario:
    return with_link_bandwidth(scenario, network_link_kinds(scenario), LESS)


def _node_links(scenario: Scenario) -> Scenario:
    return with_link_bandwidth(scenario, nvlink_kinds(scenario) or pcie_link_kinds(scenario), LESS)


def _half_microbatches(scenario: Scenario) -> Scenario | None:
    sequences = scenario.training.microbatch
    return None if sequences % 2 else with_microbatch_size(scenario, sequences // 2)


CHANGES: Final[tuple[tuple[str, Callable[[Scenario], Scenario | None]], ...]] = (
    ("network links at 0.9x bandwidth", _network),
    ("NVLink (else PCIe) at 0.9x bandwidth", _node_links),
    ("matmuls and attention at 0.9x speed", lambda scenario: with_matmul_slowdown(scenario, 1.0 / LESS)),
    ("one node at 0.9x speed", lambda scenario: with_slow_node(scenario, LESS)),
    ("microbatches of half the size", _half_microbatches),
)


def changed_score(shared: Shared, objective: Objective, candidate: Candidate, number: int) -> float | None:
    """The score of a layout with a change; None where there is nothing to change, or what comes of it cannot run."""
    _, change = CHANGES[number]
    try:
        changed = change(shared().with_overrides(candidate.overrides))
        if changed is None or find_problems(changed) or not fits_in_memory(changed):
            return None
        estimate = extended(changed) if objective.near(changed) else None
        return objective.score(simulate(changed) if estimate is None else estimate)
    except ClusterSimError:
        return None


def changes_of(scores: list[list[float | None]]) -> tuple[Change, ...]:
    """Scores by change and layout, with their words."""
    return tuple(Change(words, tuple(row)) for (words, _), row in zip(CHANGES, scores, strict=True))
