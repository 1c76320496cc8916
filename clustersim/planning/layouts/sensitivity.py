"""Does the best layout stay the best if conditions differ a little from the scenario's?

A few of the best layouts are simulated again with one perturbation, the same for all of them; steps of many
microbatches are extrapolated from shorter ones.
"""

from collections.abc import Callable
from typing import Final

from clustersim.common.errors import ClusterSimError
from clustersim.planning.layouts.executors import PackedScenario
from clustersim.planning.layouts.extrapolation import extrapolate_step
from clustersim.planning.layouts.objective import Objective
from clustersim.planning.layouts.search_space import LayoutCandidate
from clustersim.results.memory_check import fits_in_memory
from clustersim.results.search_result import SensitivityCase
from clustersim.scenario import Scenario
from clustersim.scenario.changes.kernels import with_matmul_slowdown
from clustersim.scenario.changes.links import network_link_kinds, nvlink_kinds, pcie_link_kinds, with_link_bandwidth
from clustersim.scenario.changes.training import with_microbatch_size, with_slow_node
from clustersim.scenario.validation_rules.consistency import find_problems
from clustersim.simulation import simulate

REDUCED_SPEED: Final = 0.9


def _slower_network(scenario: Scenario) -> Scenario:
    return with_link_bandwidth(scenario, network_link_kinds(scenario), REDUCED_SPEED)


def _slower_node_links(scenario: Scenario) -> Scenario:
    return with_link_bandwidth(scenario, nvlink_kinds(scenario) or pcie_link_kinds(scenario), REDUCED_SPEED)


def _half_microbatches(scenario: Scenario) -> Scenario | None:
    sequences = scenario.training.microbatch
    return None if sequences % 2 else with_microbatch_size(scenario, sequences // 2)


PERTURBATIONS: Final[tuple[tuple[str, Callable[[Scenario], Scenario | None]], ...]] = (
    ("network links at 0.9x bandwidth", _slower_network),
    ("NVLink (else PCIe) at 0.9x bandwidth", _slower_node_links),
    ("matmuls and attention at 0.9x speed", lambda scenario: with_matmul_slowdown(scenario, 1.0 / REDUCED_SPEED)),
    ("one node at 0.9x speed", lambda scenario: with_slow_node(scenario, REDUCED_SPEED)),
    ("microbatches of half the size", _half_microbatches),
)


def perturbed_score(
    packed: PackedScenario, objective: Objective, candidate: LayoutCandidate, index: int
) -> float | None:
    """The score of a layout under a perturbation; None if it does not apply or the changed scenario cannot run."""
    _, change = PERTURBATIONS[index]
    try:
        changed = change(packed().with_overrides(candidate.overrides))
        if changed is None or find_problems(changed) or not fits_in_memory(changed):
            return None
        estimate = extrapolate_step(changed) if objective.allows_estimates(changed) else None
        return objective.score(simulate(changed) if estimate is None else estimate)
    except ClusterSimError:
        return None


def label_scores(scores: list[list[float | None]]) -> tuple[SensitivityCase, ...]:
    """Scores by perturbation and layout, with labels."""
    return tuple(SensitivityCase(label, tuple(row)) for (label, _), row in zip(PERTURBATIONS, scores, strict=True))
