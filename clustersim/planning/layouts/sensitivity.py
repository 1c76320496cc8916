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
from clustersim.results.memory_check import fits
from clustersim.results.search_result import Change
from clustersim.scenario import Scenario
from clustersim.scenario.changes.kernels import with_products
from clustersim.scenario.changes.links import network_links, nvlink, pcie_links, with_links
from clustersim.scenario.changes.training import with_microbatch, with_slow_node
from clustersim.scenario.validation_rules.consistency import problems
from clustersim.simulation import simulate

LESS: Final = 0.9


def _network(scenario: Scenario) -> Scenario:
    return with_links(scenario, network_links(scenario), LESS)


def _node_links(scenario: Scenario) -> Scenario:
    return with_links(scenario, nvlink(scenario) or pcie_links(scenario), LESS)


def _half_microbatches(scenario: Scenario) -> Scenario | None:
    sequences = scenario.training.microbatch
    return None if sequences % 2 else with_microbatch(scenario, sequences // 2)


CHANGES: Final[tuple[tuple[str, Callable[[Scenario], Scenario | None]], ...]] = (
    ("network links at 0.9x bandwidth", _network),
    ("NVLink (else PCIe) at 0.9x bandwidth", _node_links),
    ("matmuls and attention at 0.9x speed", lambda scenario: with_products(scenario, 1.0 / LESS)),
    ("one node at 0.9x speed", lambda scenario: with_slow_node(scenario, LESS)),
    ("microbatches of half the size", _half_microbatches),
)


def changed_score(shared: Shared, objective: Objective, candidate: Candidate, number: int) -> float | None:
    """The score of a layout with a change; None where there is nothing to change, or what comes of it cannot run."""
    _, change = CHANGES[number]
    try:
        changed = change(shared().changed(candidate.overrides))
        if changed is None or problems(changed) or not fits(changed):
            return None
        estimate = extended(changed) if objective.near(changed) else None
        return objective.score(simulate(changed) if estimate is None else estimate)
    except ClusterSimError:
        return None


def changes_of(scores: list[list[float | None]]) -> tuple[Change, ...]:
    """Scores by change and layout, with their words."""
    return tuple(Change(words, tuple(row)) for (words, _), row in zip(CHANGES, scores, strict=True))
