"""Does the best layout stay the best if conditions differ a little from the scenario's?

A few of the best layouts are simulated again with one perturbation, the same for all of them; steps of many
microbatches are extrapolated from shorter ones.
"""

from typing import Final

from clustersim.common.errors import ClusterSimError
from clustersim.planning.layouts.executors import PackedScenario
from clustersim.planning.layouts.extrapolation import extrapolate_step
from clustersim.planning.layouts.layout_evaluation import memory_use, simulate_layout
from clustersim.planning.layouts.objective import Objective
from clustersim.planning.layouts.search_space import LayoutCandidate
from clustersim.results.search_result import SensitivityCase
from clustersim.scenario import Scenario
from clustersim.scenario.changes.catalogue import changes_for
from clustersim.scenario.changes.links import without_measured_collectives
from clustersim.scenario.changes.scenario_change import Baseline, ChangeUse, ScenarioChange, UnaffectedScenarioError
from clustersim.scenario.validation_rules.consistency import find_problems
from clustersim.simulation import simulate

PERTURBATIONS: Final = changes_for(ChangeUse.SENSITIVITY)


def perturbed_score(
    packed: PackedScenario, objective: Objective, candidate: LayoutCandidate, index: int
) -> float | None:
    """The score of a layout under a perturbation; None if it does not apply or the changed scenario cannot run."""
    try:
        changed = _perturb(packed().with_overrides(candidate.overrides), PERTURBATIONS[index])
        if find_problems(changed) or not memory_use(changed).fits:
            return None
        if changed.diloco is not None:
            return simulate_layout(changed, objective, candidate, 0.0).score
        estimate = extrapolate_step(changed) if objective.allows_estimates(changed) else None
        return objective.score(simulate(changed) if estimate is None else estimate)
    except ClusterSimError:
        return None


def _perturb(scenario: Scenario, change: ScenarioChange) -> Scenario:
    """The changed scenario, its links modelled whatever they are; raise InapplicableChangeError where there is none."""
    try:
        return next(change.apply(Baseline(scenario))).scenario
    except UnaffectedScenarioError:
        return without_measured_collectives(scenario)


def label_scores(scores: list[list[float | None]]) -> tuple[SensitivityCase, ...]:
    """Scores by perturbation and layout, with labels."""
    return tuple(SensitivityCase(change.label, tuple(row)) for change, row in zip(PERTURBATIONS, scores, strict=True))
