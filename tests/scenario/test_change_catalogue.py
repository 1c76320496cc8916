"""The catalogue of changes: every question finds its own, and no change leaves the scenario as it is."""

from collections import Counter
from typing import Any

import pytest

from clustersim.scenario import Scenario
from clustersim.scenario.changes.catalogue import CATALOGUE, CONTINUOUS_CHANGES, changes_for
from clustersim.scenario.changes.scenario_change import (
    Baseline,
    ChangeSubject,
    ChangeUse,
    ContinuousChange,
    InapplicableChangeError,
    ScenarioChange,
)
from clustersim.scenario.validation_rules.consistency import find_problems

MAPPING: dict[str, Any] = {
    "model": {"preset": "mixtral-8x7b", "layers": 4},
    "cluster": {"name": "dgx-h100", "gpus": 16},
    "layout": {"tp": 2, "pp": 2, "dp": 4, "data": "zero1", "ep": 2, "sequence_parallel": True},
    "training": {"sequence": 4096, "global_batch": 32, "microbatch": 2, "recompute": {"layers": 1}},
    "economics": {"tokens": 1e9},
    "framework": "megatron",
}


@pytest.fixture(scope="module")
def scenario() -> Scenario:
    return Scenario.from_mapping(MAPPING, default_name="moe")


@pytest.mark.parametrize("use", ChangeUse)
def test_names_are_unique_within_a_use(use: ChangeUse) -> None:
    names = Counter(change.name for change in changes_for(use))
    assert names
    assert set(names.values()) == {1}


def test_every_subject_is_changed_by_something() -> None:
    assert {change.subject for change in (*CATALOGUE, *CONTINUOUS_CHANGES)} == set(ChangeSubject)


@pytest.mark.parametrize("change", CATALOGUE, ids=lambda change: f"{change.name} {change.uses.name}")
def test_alternatives_differ_from_the_scenario_and_from_each_other(scenario: Scenario, change: ScenarioChange) -> None:
    if not change.is_relevant(scenario):
        return
    alternatives = []
    try:
        alternatives.extend(alternative.scenario for alternative in change.apply(Baseline(scenario)))
    except InapplicableChangeError as reason:
        assert str(reason)
    assert scenario not in alternatives
    assert all(alternatives.count(alternative) == 1 for alternative in alternatives)


@pytest.mark.parametrize("change", CONTINUOUS_CHANGES, ids=lambda change: change.name)
@pytest.mark.parametrize("use", [ChangeUse.LONGER_STEP, ChangeUse.SHORTER_STEP])
def test_a_neutral_strength_has_no_effort_and_a_limit_is_legal(
    scenario: Scenario, change: ContinuousChange, use: ChangeUse
) -> None:
    strength_range = change.strength_range(scenario, use)
    if strength_range is None:
        return
    assert change.effort(strength_range, strength_range.neutral) == 0.0
    assert change.effort(strength_range, strength_range.limit) > 0.0
    assert find_problems(change.apply(scenario, strength_range.limit)) == find_problems(scenario)


def test_an_option_is_switched_to_the_state_that_it_is_not_in(scenario: Scenario) -> None:
    """Of the two changes of an option, off and on, the other applies to the scenario that one of them gives."""
    by_use = {
        use: {change.name: change for change in changes_for(use)}
        for use in (ChangeUse.LONGER_STEP, ChangeUse.SHORTER_STEP)
    }
    off, on = by_use.values()
    for name in ("data_parallel_overlap", "tp_comm_overlap", "overlap_p2p_comm", "fused_kernels", "flash_attention"):
        applicable = [change for change in (off[name], on[name]) if next(change.alternatives(scenario), None)]
        assert len(applicable) == 1
        changed = next(applicable[0].alternatives(scenario), None)
        assert changed is not None
        assert next(applicable[0].alternatives(changed.scenario), None) is None
        (other,) = {off[name], on[name]} - {*applicable}
        restored = next(other.alternatives(changed.scenario), None)
        assert restored is not None
        assert restored.scenario == scenario


@pytest.mark.parametrize(
    ("overrides", "is_relevant"),
    [
        (["framework=pytorch"], True),
        (["framework=torchtitan"], True),
        (["framework={name: pytorch, torch_compile: true}"], False),
        (["framework=pytorch", "training.fused=true"], False),
        (["framework=megatron"], False),
        (["framework=ideal"], False),
    ],
)
def test_compiling_is_offered_where_it_fuses_something(
    scenario: Scenario, overrides: list[str], is_relevant: bool
) -> None:
    (change,) = (change for change in CATALOGUE if change.name == "torch_compile")
    assert change.is_relevant(scenario.with_overrides(*overrides)) is is_relevant
