"""A layout drafted from others is what reading it makes, and its bound what it is where nothing is remembered."""

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
from tests.planning.layouts.search_scenarios import job

JOBS: list[tuple[bool, tuple[str, ...]]] = [
    (False, ()),
    (False, ("framework.name=pytorch", "layout.data=fsdp")),
    (True, ()),
    (True, ("layout.etp=2", "layout.tp=2", "layout.sequence_parallel=true", "schedule=dualpipev")),
]
SCHEDULES = ["1f1b", "{interleaved: {chunks: 2}}", "zb-v", "dualpipe", "dualpipev"]


@cache
def drafted(number: int) -> tuple[Scenario, DerivedScenarios, list[LayoutCandidate]]:
    mixture, overrides = JOBS[number]
    scenario = job(*overrides, mixture=mixture)
    return (
        scenario,
        DerivedScenarios(scenario),
        [*SearchSpace.from_scenario(scenario, vary={"schedule": SCHEDULES}).candidates({})],
    )


@examples(100)
@given(number=st.sampled_from(range(len(JOBS))), data=st.data())
def test_a_draft_is_what_is_read(number: int, data: st.DataObject) -> None:
    scenario, drafts, candidates = drafted(number)
    overrides = data.draw(st.sampled_from(candidates)).overrides
    try:
        read = scenario.with_overrides(overrides)
    except InputError as error:
        with pytest.raises(InputError) as refused:
            drafts.resolve(overrides)
        assert str(refused.value) in str(error)
        return
    made = drafts.resolve(overrides)
    assert {item: getattr(made, item) for item in compared()} == {
        element: getattr(read, element) for element in compared()
    }
    assert made.cluster.fabric is read.cluster.fabric


def compared() -> list[str]:
    return [dataclass_field.name for dataclass_field in fields(ResolvedScenario) if dataclass_field.name != "cluster"]


@examples(60)
@given(number=st.sampled_from(range(len(JOBS))), data=st.data())
def test_what_is_remembered_changes_no_bound(number: int, data: st.DataObject) -> None:
    _, drafts, candidates = drafted(number)
    try:
        setup = drafts.resolve(data.draw(st.sampled_from(candidates)).overrides)
    except InputError:
        return
    warm = bounds.step_lower_bound(setup)
    with pytest.MonkeyPatch.context() as anew:
        anew.setattr(pass_times, "_UNIT_TIME_CACHES", LruCache(1, size=unit_size))
        anew.setattr(pass_times, "_COMM_COST_CACHES", LruCache(1, size=unit_size))
        assert bounds.step_lower_bound(setup) == warm


def test_whole_sections_are_read_in_their_order() -> None:
    scenario = job()
    overrides = ("layout.tp=4", "layout={tp: 2, pp: 4, data: zero1}")
    assert DerivedScenarios(scenario).resolve(overrides).layout == scenario.with_overrides(overrides).layout


def test_modules_computed_again_are_rungs_where_they_are_part_of_one_another() -> None:
    """Full recomputation runs the modules again, too; the core alone and a layer of several have no order."""
    space = SearchSpace.from_scenario(job(mixture=True))
    family = [candidate for candidate in space.candidates({}) if candidate.overrides[0] == "layout.tp=1"]
    found = recompute_chains(space, [CandidateBound(layout_candidate, 1.0) for layout_candidate in family])
    assert {len(item) for item in found} == {3}  # none, modules, full
    dense = SearchSpace.from_scenario(job("training.attention=standard"))
    kinds = [
        {told for one in ladder for told in recomputed(one)}
        for ladder in recompute_chains(dense, [CandidateBound(element, 1.0) for element in dense.candidates({})])
    ]
    assert {"selective"} in kinds
    assert {"none", "full", "{layers: 1}"} in kinds


def test_rungs_are_from_least_to_most_whatever_bounds_say() -> None:
    """Kernels that vary have no bound, so that of all layouts it is 0."""
    space = SearchSpace.from_scenario(job("model.layers=12"), fix={"layout.tp": "1", "layout.pp": "1"})
    weighed = [
        CandidateBound(candidate, 0.0)
        for candidate in space.candidates({})
        if "training.microbatch=1" in candidate.overrides
    ]
    rungs = ["none", *(f"{{layers: {layers}}}" for layers in (1, 2, 3, 4, 6, 8)), "full"]
    ladders_of_all = recompute_chains(space, weighed[::-1])
    assert ladders_of_all
    for ladder in ladders_of_all:
        assert [told for one in ladder for told in recomputed(one)] == rungs


def recomputed(weighed: CandidateBound) -> list[str]:
    return [override.partition("=")[2] for override in weighed.candidate.overrides if "recompute" in override]


@pytest.mark.parametrize("offload", ["{activations: all}", "{activations: 2}"])
def test_where_activations_go_to_the_host_nothing_is_a_ladder(offload: str) -> None:
    """What is computed again is not copied, which may be faster."""
    key = "training.offload"
    spaces = (
        SearchSpace.from_scenario(job(f"{key}={offload}")),
        SearchSpace.from_scenario(job(), {key: offload}),
        SearchSpace.from_scenario(job(), vary={key: [offload]}),
    )
    for space in spaces:
        weighed = [CandidateBound(candidate, 1.0) for candidate in space.candidates({})]
        assert all(len(recompute_chain) == 1 for recompute_chain in recompute_chains(space, weighed))
