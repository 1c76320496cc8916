"""Changes of mixtures of experts that are no settings: how evenly tokens are spread."""

import math
from collections.abc import Iterator
from typing import Final

from clustersim.model.moe_expert_load import RandomExpertLoad
from clustersim.scenario.changes.expert_parallel import with_expert_load
from clustersim.scenario.changes.scenario_change import (
    Baseline,
    ChangedScenario,
    ChangeSubject,
    ChangeUse,
    InapplicableChangeError,
    ScenarioChange,
)
from clustersim.scenario.scenario import Scenario

_RANK_VARIATION: Final = 0.3
"""Coefficient of variation of the tokens per rank: middle of the measured range (0.05 to 0.55, `moe_expert_load`)."""


def _has_moe(scenario: Scenario) -> bool:
    return bool(scenario.model.distinct_moes)


def _other_expert_load(baseline: Baseline) -> Iterator[ChangedScenario]:
    """Random expert loads where they are balanced, balanced ones where they are not."""
    scenario = baseline.scenario
    if scenario.layout.ep == 1:
        raise InapplicableChangeError("every rank has all experts, so it gets as many rows as any other")
    if any(distinct_moe.capacity_factor is not None for distinct_moe in scenario.model.distinct_moes):
        raise InapplicableChangeError("experts take as many rows as their capacity is, whoever is chosen")
    experts_per_rank = max(moe.experts for moe in scenario.model.distinct_moes) // scenario.layout.ep
    load = None if scenario.training.expert_load else RandomExpertLoad(_RANK_VARIATION * math.sqrt(experts_per_rank))
    yield ChangedScenario(with_expert_load(scenario, load), ": evenly" if load is None else f": {load.description}")


EXPERT_CHANGES: Final = (
    ScenarioChange(
        "other_loads",
        "tokens distributed over experts differently",
        ChangeSubject.EXPERT_LOAD,
        ChangeUse.WHAT_IF,
        _other_expert_load,
        relative_cost=lambda scenario: float(scenario.layout.ep),  # ranks with different experts are not equivalent
        is_relevant=_has_moe,
    ),
)
