"""Derived scenarios equal resolved ones, and their bounds do not depend on caches."""

from dataclasses import fields
from functools import cache

import pytest
from hypothesis import given
from hypothesis import strategies as st

from clustersim.common.errors import InputError
from clustersim.common.lru import LruCache, unit_size
from clustersim.planning.layouts import SearchSpace, bounds, pass_times
from clustersim.planning.layouts.candidate_bounds import CandidateBound, recompute_chains
from clustersim.planning.layouts.derived_scenarios import DerivedScenarios
from clustersim.planning.layouts.search_space import LayoutCandidate
from clustersim.scenario import Scenario
from clustersim.scenario.resolved import ResolvedScenario
from tests.conftest import examples
from tests.planning.layouts.search_scenarios import search_scenario

SCENARIOS: list[tuple[bool, tuple[str, ...]]] = [
    (False, ()),
    (False, ("framework.name=pytorch", "layout.data=fsdp")),
    (True, ()),
    (True, ("layout.etp=2", "layout.tp=2", "layout.sequence_parallel=true", "schedule=dualpipev")),
]
SCHEDULES = ["1f1b", "{interleaved: {chunks: 2}}", "zb-v", "dualpipe", "dualpipev"]


@cache
def derived_scenarios(index: int) -> tuple[Scenario, DerivedScenarios, list[LayoutCandidate]]:
    moe, overrides = SCENARIOS[index]
    scenario = search_scenario(*overrides, moe=moe)
    return (
        scenario,
        DerivedScenarios(scenario),
        [*SearchSpace.from_scenario(scenario, vary={"schedule": SCHEDULES}).candidates({})],
    )


@examples(100)
@given(scenario_index=st.sampled_from(range(len(SCENARIOS))), data=st.data())
def test_a_derived_scenario_equals_the_resolved_one(scenario_index: int, data: st.DataObject) -> None:
    scenario, derived, candidates = derived_scenarios(scenario_index)
    overrides = data.draw(st.sampled_from(candidates)).overrides
    try:
        expected = scenario.with_overrides(overrides, suggest=False)
    except InputError as error:
        with pytest.raises(InputError) as refused:
            derived.resolve(overrides)
        assert str(refused.value) in str(error)
        return
    resolved = derived.resolve(overrides)
    assert {compared_field: getattr(resolved, compared_field) for compared_field in compared_fields()} == {
        item: getattr(expected, item) for item in compared_fields()
    }
    assert resolved.cluster.fabric is expected.cluster.fabric


def compared_fields() -> list[str]:
    return [dataclass_field.name for dataclass_field in fields(ResolvedScenario) if dataclass_field.name != "cluster"]


@examples(60)
@given(scenario_index=st.sampled_from(range(len(SCENARIOS))), data=st.data())
def test_cached_parts_do_not_change_the_bound(scenario_index: int, data: st.DataObject) -> None:
    _, derived, candidates = derived_scenarios(scenario_index)
    try:
        resolved = derived.resolve(data.draw(st.sampled_from(candidates)).overrides)
    except InputError:
        return
    cached_bound = bounds.step_lower_bound(resolved)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pass_times, "_UNIT_TIME_CACHES", LruCache(1, size=unit_size))
        patch.setattr(pass_times, "_COMM_COST_CACHES", LruCache(1, size=unit_size))
        assert bounds.step_lower_bound(resolved) == cached_bound


def test_overrides_of_full_sections_apply_in_order() -> None:
    scenario = search_scenario()
    overrides = ("layout.tp=4", "layout={tp: 2, pp: 4, data: zero1}")
    assert DerivedScenarios(scenario).resolve(overrides).layout == scenario.with_overrides(overrides).layout


def test_recompute_chains_contain_nested_module_sets() -> None:
    """Full recomputation includes the modules; the attention core and one of several layers are not ordered."""
    space = SearchSpace.from_scenario(search_scenario(moe=True))
    layouts = [candidate for candidate in space.candidates({}) if candidate.overrides[0] == "layout.tp=1"]
    chains = recompute_chains(space, [CandidateBound(layout, 1.0) for layout in layouts])
    assert {len(item) for item in chains} == {3}  # none, modules, full
    dense = SearchSpace.from_scenario(search_scenario("training.attention=standard"))
    kinds = [
        {recompute for one in chain for recompute in recompute_values(one)}
        for chain in recompute_chains(
            dense, [CandidateBound(layout_candidate, 1.0) for layout_candidate in dense.candidates({})]
        )
    ]
    assert {"selective"} in kinds
    assert {"none", "full", "{layers: 1}"} in kinds


def test_recompute_chains_are_ordered_by_recomputation_not_by_bound() -> None:
    """With random kernel variation there is no bound, so it is 0 for all layouts."""
    space = SearchSpace.from_scenario(search_scenario("model.layers=12"), fix={"layout.tp": "1", "layout.pp": "1"})
    bounds_of_candidates = [
        CandidateBound(candidate, 0.0)
        for candidate in space.candidates({})
        if "training.microbatch=1" in candidate.overrides
    ]
    expected = ["none", *(f"{{layers: {layers}}}" for layers in (1, 2, 3, 4, 6, 8)), "full"]
    chains = recompute_chains(space, bounds_of_candidates[::-1])
    assert chains
    for chain in chains:
        assert [recompute for one in chain for recompute in recompute_values(one)] == expected


def recompute_values(candidate_bound: CandidateBound) -> list[str]:
    return [override.partition("=")[2] for override in candidate_bound.candidate.overrides if "recompute" in override]


@pytest.mark.parametrize("offload", ["{activations: all}", "{activations: 2}"])
def test_with_activation_offload_there_are_no_recompute_chains(offload: str) -> None:
    """What is recomputed is not copied, which may be faster."""
    key = "training.offload"
    spaces = (
        SearchSpace.from_scenario(search_scenario(f"{key}={offload}")),
        SearchSpace.from_scenario(search_scenario(), {key: offload}),
        SearchSpace.from_scenario(search_scenario(), vary={key: [offload]}),
    )
    for space in spaces:
        candidate_bounds = [CandidateBound(candidate, 1.0) for candidate in space.candidates({})]
        assert all(len(recompute_chain) == 1 for recompute_chain in recompute_chains(space, candidate_bounds))
