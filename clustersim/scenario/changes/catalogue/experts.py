"""Changes of mixtures of experts: how tokens travel, how evenly they are spread, over which ranks experts are."""

from collections.abc import Iterator
from typing import Final

import numpy as np

from clustersim.model.moe_expert_load import RandomExpertLoad
from clustersim.program.task import TokenDispatcher
from clustersim.scenario.changes.expert_parallel import (
    ep_fits_domains,
    feasible_ep_degrees,
    with_dispatcher,
    with_expert_load,
    with_expert_parallelism,
)
from clustersim.scenario.changes.scenario_change import (
    ApplyChange,
    Baseline,
    ChangedScenario,
    ChangeSubject,
    ChangeUse,
    InapplicableChangeError,
    ScenarioChange,
)
from clustersim.scenario.scenario import Scenario

_NO_EXPERTS: Final = "no experts are spread over ranks"
_LOAD_VARIATION: Final = 0.3
"""Coefficient of variation of random expert loads: middle of the measured range (0.05 to 0.55 of the tokens per
rank, `expert_load`).
"""
_UNEVEN_LOAD_COST: Final = 16.0  # relative cost where ranks with different experts are no longer equivalent


def _has_moe(scenario: Scenario) -> bool:
    return bool(scenario.model.distinct_moes)


def _other_dispatcher(baseline: Baseline) -> Iterator[ChangedScenario]:
    """Use a fused dispatch kernel (DeepEP, HybridEP) in place of the library's all-to-all, or the reverse."""
    scenario = baseline.scenario
    layout, cluster = scenario.layout, scenario.cluster
    if not layout.has_expert_mesh:
        raise InapplicableChangeError(_NO_EXPERTS)
    if layout.dispatcher.has_custom_kernels:
        other = TokenDispatcher.ALL_TO_ALL
    else:
        crosses_domains = len(np.unique(cluster.fabric.domain_ids(cluster.machine_gpu_ids))) < cluster.node_count
        other = TokenDispatcher.HYBRIDEP if crosses_domains else TokenDispatcher.DEEPEP
    yield ChangedScenario(with_dispatcher(scenario, other), f": {other.value}, not {layout.dispatcher.value}")


def _other_expert_load(baseline: Baseline) -> Iterator[ChangedScenario]:
    """Random expert loads where they are balanced, balanced ones where they are not."""
    scenario = baseline.scenario
    if scenario.layout.ep == 1:
        raise InapplicableChangeError("every rank has all experts, so it gets as many rows as any other")
    if any(distinct_moe.capacity_factor is not None for distinct_moe in scenario.model.distinct_moes):
        raise InapplicableChangeError("experts take as many rows as their capacity is, whoever is chosen")
    load = None if scenario.training.expert_load else RandomExpertLoad(_LOAD_VARIATION)
    yield ChangedScenario(with_expert_load(scenario, load), ": evenly" if load is None else f": {load.description}")


def _experts_across_domains(*, within: bool) -> ApplyChange:
    """The largest ep whose groups stay within NVLink domains, or the smallest whose groups do not."""

    def apply(baseline: Baseline) -> Iterator[ChangedScenario]:
        scenario = baseline.scenario
        if not any(distinct_moe.single_dense_mlp is None for distinct_moe in scenario.model.distinct_moes):
            raise InapplicableChangeError(_NO_EXPERTS)
        if ep_fits_domains(scenario, scenario.layout.ep) is within:
            raise InapplicableChangeError(f"tokens {'stay inside' if within else 'leave'} their NVLink domain now")
        degrees = [ranks for ranks in feasible_ep_degrees(scenario) if ep_fits_domains(scenario, ranks) is within]
        if not degrees:
            raise InapplicableChangeError(f"no legal ep is {'inside' if within else 'across'} NVLink domains")
        ranks = degrees[-1] if within else degrees[0]
        yield ChangedScenario(with_expert_parallelism(scenario, ranks), f": ep {ranks}, not {scenario.layout.ep}")

    return apply


EXPERT_CHANGES: Final = (
    ScenarioChange(
        "other_dispatcher",
        "tokens sent to their experts in another way",
        ChangeSubject.LAYOUT,
        ChangeUse.WHAT_IF,
        _other_dispatcher,
        is_relevant=_has_moe,
    ),
    ScenarioChange(
        "other_loads",
        "tokens spread over experts in another way",
        ChangeSubject.EXPERT_LOAD,
        ChangeUse.WHAT_IF,
        _other_expert_load,
        relative_cost=_UNEVEN_LOAD_COST,
        is_relevant=_has_moe,
    ),
    ScenarioChange(
        "experts_inside",
        "experts spread inside NVLink domains",
        ChangeSubject.LAYOUT,
        ChangeUse.WHAT_IF,
        _experts_across_domains(within=True),
        is_relevant=_has_moe,
    ),
    ScenarioChange(
        "experts_across",
        "experts spread across NVLink domains",
        ChangeSubject.LAYOUT,
        ChangeUse.WHAT_IF,
        _experts_across_domains(within=False),
        is_relevant=_has_moe,
    ),
)
