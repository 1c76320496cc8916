"""A layout drafted from others is what reading it makes, and its bound what it is where nothing is remembered."""

from dataclasses import fields
from functools import cache

import pytest
from hypothesis import given
from hypothesis import strategies as st

from clustersim.common.errors import InputError
from clustersim.common.lru import LruCache, unit_size
from clustersim.planning.layouts import Space, bounds, pass_times
from clustersim.planning.layouts.candidate_bounds import Weighed, ladders
from clustersim.planning.layouts.derived_scenarios import Drafts
from clustersim.planning.layouts.search_space import Candidate
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
def drafted(number: int) -> tuple[Scenario, Drafts, list[Candidate]]:
    mixture, overrides = JOBS[number]
    scenario = job(*overrides, mixture=mixture)
    return scenario, Drafts(scenario), [*Space.of(scenario, vary={"schedule": SCHEDULES}).candidates({})]


@examples(100)
@given(number=st.sampled_from(range(len(JOBS))), data=st.data())
def test_a_draft_is_what_is_read(number: int, data: st.DataObject) -> None:
    scenario, drafts, candidates = drafted(number)
    overrides = data.draw(st.sampled_from(candidates)).overrides
    try:
        read = scenario.with_overrides(overrides)
    except InputError as error:
        with pytest.raises(InputError) as refused:
            drafts.setup(overrides)
        assert str(refused.value) in str(error)
        return
    made = drafts.setup(overrides)
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
        setup = drafts.setup(data.draw(st.sampled_from(candidates)).overrides)
    except InputError:
        return
    warm = bounds.lower_bound(setup)
    with pytest.MonkeyPatch.context() as anew:
        anew.setattr(pass_times, "_PIECES", LruCache(1, size=unit_size))
        anew.setattr(pass_times, "_EXCHANGES", LruCache(1, size=unit_size))
        assert bounds.lower_bound(setup) == warm


def test_whole_sections_are_read_in_their_order() -> None:
    scenario = job()
    overrides = ("layout.tp=4", "layout={tp: 2, pp: 4, data: zero1}")
    assert Drafts(scenario).setup(overrides).layout == scenario.with_overrides(overrides).layout


def test_modules_computed_again_are_rungs_where_they_are_part_of_one_another() -> None:
    """Full recomputation runs the modules again, too; the core alone and a layer of several have no order."""
    space = Space.of(job(mixture=True))
    family = [candidate for candidate in space.candidates({}) if candidate.overrides[0] == "layout.tp=1"]
    found = ladders(space, [Weighed(item, 1.0) for item in family])
    assert {len(element) for element in found} == {3}  # none, modules, full
    dense = Space.of(job("training.attention=standard"))
    kinds = [
        {told for one in ladder for told in recomputed(one)}
        for ladder in ladders(dense, [Weighed(entry, 1.0) for entry in dense.candidates({})])
    ]
    assert {"selective"} in kinds
    assert {"none", "full", "{layers: 1}"} in kinds


def test_rungs_are_from_least_to_most_whatever_bounds_say() -> None:
    """Kernels that vary have no bound, so that of all layouts it is 0."""
    space = Space.of(job("model.layers=12"), fix={"layout.tp": "1", "layout.pp": "1"})
    weighed = [
        Weighed(candidate, 0.0) for candidate in space.candidates({}) if "training.microbatch=1" in candidate.overrides
    ]
    rungs = ["none", *(f"{{layers: {layers}}}" for layers in (1, 2, 3, 4, 6, 8)), "full"]
    ladders_of_all = ladders(space, weighed[::-1])
    assert ladders_of_all
    for ladder in ladders_of_all:
        assert [told for one in ladder for told in recomputed(one)] == rungs


def recomputed(weighed: Weighed) -> list[str]:
    return [override.partition("=")[2] for override in weighed.candidate.overrides if "recompute" in override]


@pytest.mark.parametrize("offload", ["{activations: all}", "{activations: 2}"])
def test_where_activations_go_to_the_host_nothing_is_a_ladder(offload: str) -> None:
    """What is computed again is not copied, which may be faster."""
    key = "training.offload"
    spaces = Space.of(job(f"{key}={offload}")), Space.of(job(), {key: offload}), Space.of(job(), vary={key: [offload]})
    for space in spaces:
        weighed = [Weighed(candidate, 1.0) for candidate in space.candidates({})]
        assert all(len(ladder) == 1 for ladder in ladders(space, weighed))
