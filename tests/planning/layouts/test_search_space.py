"""Which layouts are there? What varies by default, what follows, and what is said of what is no layout."""

import re
from pathlib import Path
from typing import Any

import pytest

from clustersim.common.data_files import find_file
from clustersim.common.errors import InputError
from clustersim.planning.layouts import LayoutSearch, SearchSpace, search_layouts
from clustersim.results.search_result import PrunedLayouts, SearchResult
from clustersim.scenario import Scenario
from tests.planning.layouts.search_scenarios import job


def overrides_of(space: SearchSpace) -> list[set[str]]:
    return [set(candidate.overrides) for candidate in space.candidates({})]


def test_the_first_guess_is_in_the_default_space() -> None:
    own = ["layout.data={hsdp: {shard: 4}}", "schedule=gpipe", "training.recompute={layers: 1}",
           "training.microbatch=3", "training.global_batch=24", "cluster.gpus=32"]  # fmt: skip
    guess = job(*own)
    space = SearchSpace.from_scenario(guess, vary={"layout.tp": ["1", "2"], "layout.pp": ["2"], "layout.cp": ["1"]})
    layouts = [
        guess.with_overrides(candidate.overrides)
        for candidate in space.candidates({})
        if legal(guess, candidate.overrides)
    ]
    assert any(
        (layout.layout, layout.schedule, layout.training) == (guess.layout, guess.schedule, guess.training)
        for layout in layouts
    )


@pytest.mark.parametrize(
    ("said", "words"),
    [
        ({"objective": "enrgy"}, "objective: 'enrgy' is unknown; did you mean energy?"),
        ({"top": 0}, "top: 0 is too few; 1 is the fewest"),
        ({"workers": -1}, "workers: -1 is too few; 1 is the fewest"),
        ({"vary": {"layout.tp": "12"}}, "vary: layout.tp: '12' is no list of values"),
        ({"vary": {"layout.tp": 2}}, "vary: layout.tp: 2 is no list of values"),
    ],
)
def test_mistakes_from_python_are_told_as_those_on_the_command_line(said: dict[str, Any], words: str) -> None:
    with pytest.raises(InputError, match=re.escape(words)):
        search_layouts(job(), **said)


def test_what_is_no_scenario_and_no_mapping_is_a_type_error() -> None:
    with pytest.raises(TypeError, match="str is not a Scenario"):
        search_layouts("plan.yaml")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"fix: .* is no mapping"):
        search_layouts(job(), fix=["layout.pp=1"])  # type: ignore[arg-type]


def test_an_objective_may_be_named_and_numbers_may_be_numbers() -> None:
    vary = {"layout.tp": [1, 2]}
    named = search_layouts(job(), fix={"layout.pp": 1}, vary=vary, objective="energy")
    assert named.objective == "energy"


def legal(scenario: Scenario, overrides: tuple[str, ...]) -> bool:
    try:
        scenario.with_overrides(overrides)
    except InputError:
        return False
    return True


def test_every_combination_is_a_candidate_or_breaks_a_rule() -> None:
    aside: dict[str, PrunedLayouts] = {}
    space = SearchSpace.from_scenario(job())
    many = len([*space.candidates(aside)])
    assert many + sum(pruned_layouts.count for pruned_layouts in aside.values()) == space.combination_count
    assert all(item.example.startswith(f"{reason}: ") for reason, item in aside.items())


def test_candidates_are_different_scenarios() -> None:
    candidates = [candidate.overrides for candidate in SearchSpace.from_scenario(job()).candidates({})]
    assert len(set(candidates)) == len(candidates)


def test_data_parallelism_is_what_is_left() -> None:
    for item in overrides_of(SearchSpace.restricted_to(job(), {"layout.tp": ["1", "2", "4"], "layout.pp": ["1", "2"]})):
        told = dict(one.split("=", 1) for one in item)
        assert int(told["layout.tp"]) * int(told["layout.pp"]) * int(told["layout.dp"]) == 8
        assert told["layout.sequence_parallel"] == ("true" if int(told["layout.tp"]) > 1 else "false")


def test_sequences_are_cut_or_not_where_there_is_a_choice() -> None:
    """Not among one tensor-parallel rank, and always where experts would get the same tokens from each of them."""
    for scenario, kinds in (
        (job(), {("1", "false"), ("2", "false"), ("2", "true")}),
        (job(mixture=True), {("1", "false"), ("2", "true")}),
    ):
        space = SearchSpace.from_scenario(scenario, vary={"layout.tp": ["1", "2"]})
        told = [dict(one.split("=", 1) for one in item) for item in overrides_of(space)]
        assert {(element["layout.tp"], element["layout.sequence_parallel"]) for element in told} == kinds


def test_a_degree_of_data_parallelism_can_be_asked_for() -> None:
    space = SearchSpace.from_scenario(job(), fix={"layout.dp": "4"})
    aside: dict[str, PrunedLayouts] = {}
    found = [*space.candidates(aside)]
    assert found
    assert all("layout.dp=4" in layout_candidate.overrides for layout_candidate in found)
    assert "layout.dp is fixed: it would be 8, not 4" in [pruned_layouts.example for pruned_layouts in aside.values()]


def test_what_is_fixed_does_not_vary() -> None:
    space = SearchSpace.from_scenario(
        job(), fix={"layout.tp": "2", "training.recompute": "full"}, vary={"layout.pp": ["2", "4"]}
    )
    (one,) = space.jobs
    assert not {"layout.tp", "training.recompute"} & one.values.keys()
    assert one.values["layout.pp"] == ("2", "4")
    assert all({"layout.tp=2", "training.recompute=full"} <= item for item in overrides_of(space))


def test_values_that_somebody_named_are_not_second_guessed() -> None:
    """ZeRO-2 beside a pipeline is run by no framework, and five layers in three stages are not even."""
    plain = {
        candidate
        for candidate in SearchSpace.from_scenario(job()).candidates({})
        if "layout.data=zero2" in candidate.overrides
    }
    assert all("layout.pp=1" in layout_candidate.overrides for layout_candidate in plain)
    space = SearchSpace.from_scenario(job(), vary={"layout.data": ["zero2"], "layout.pp": ["2"]})
    assert any("layout.data=zero2" in item for item in overrides_of(space))


def test_sizes_and_clusters_are_jobs_of_their_own() -> None:
    space = SearchSpace.from_scenario(job(), gpus=[8, 16], clusters=["dgx-h100", "dgx-a100"])
    assert [search_job.overrides for search_job in space.jobs] == [
        (f"cluster.name={name}", f"cluster.gpus={gpus}") for name in ("dgx-h100", "dgx-a100") for gpus in (8, 16)
    ]
    assert {candidate.job_index for candidate in space.candidates({})} == {0, 1, 2, 3}


def test_a_cluster_of_a_file_is_compared_with_a_shipped_one(tmp_path: Path) -> None:
    own = tmp_path / "own.yaml"
    own.write_text(find_file("clusters", "dgx-a100").read_text())
    for scenario in (job(), job(f"cluster={{path: {own}, gpus: 8}}")):
        space = SearchSpace.from_scenario(scenario, gpus=[16], clusters=["dgx-h100", str(own)])
        assert [search_job.resolved.cluster.name for search_job in space.jobs] == ["dgx-h100", "own"]


def test_the_batch_may_grow_with_the_gpus() -> None:
    space = SearchSpace.from_scenario(job(), gpus=[8, 32], batch_per_gpu=True)
    assert [search_job.overrides for search_job in space.jobs] == [(), ("cluster.gpus=32", "training.global_batch=32")]


def test_the_best_of_every_size_is_found() -> None:
    fix = {"layout.tp": "1", "layout.data": "zero1", "training.microbatch": "1"}

    def best(*gpus: int) -> SearchResult:
        return LayoutSearch(SearchSpace.from_scenario(job(), fix, gpus=gpus), top=1, sensitivity=False).run()

    found, alone = best(4, 8), [best(4), best(8)]
    assert [layout_result.step_time for layout_result in found.best_by_job] == [
        search_result.best[0].step_time for search_result in alone
    ]
    assert [item.gpus for item in found.best_by_job] == [4, 8]


def test_no_more_is_recomputed_than_is_needed_to_fit() -> None:
    found = search_layouts(job(), fix={"layout.tp": "1", "layout.pp": "1"})
    assert found.pruned["less recomputation fits"].count > 0
    assert all("training.recompute=none" in layout_result.overrides for layout_result in found.simulated)


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ({"vary": {"layout.tpp": ["1"]}}, "layout.tpp: unknown key; did you mean tp"),
        ({"fix": {"layout.tp": "three"}}, "layout.tp: .*three"),
        ({"vary": {"layout.data": ["zero9"]}}, "layout.data: 'zero9' is unknown; did you mean"),
        ({"vary": {"layout.tp": []}}, "--vary layout.tp: has no values; write such as layout.tp=1,2,4"),
        ({"fix": {"layout.tp": "2"}, "vary": {"layout.tp": ["2"]}}, "layout.tp is fixed and varied"),
        ({"fix": {"cluster.gpus": "16"}}, "cluster.gpus: clusters are no layouts"),
        ({"fix": {"layout.dp": "many"}}, "layout.dp: 'many' is not a number"),
        ({"gpus": [0]}, "gpus: 0 is not a number of GPUs"),
        ({"gpus": [12]}, "gpus: 12 GPUs are not a multiple of the 8 per node; 8 or 16 are"),
        ({"gpus": [2], "batch_per_gpu": True}, "gpus: 2 GPUs with as many sequences each as 8 have would need 1.5"),
        ({"clusters": ["dgx-h1000"]}, "dgx-h1000.*dgx-h100"),
    ],
)
def test_what_is_no_space_is_said(arguments: dict[str, object], sentence: str) -> None:
    with pytest.raises(InputError, match=sentence):
        SearchSpace.from_scenario(job("training.global_batch=6"), **arguments)  # type: ignore[arg-type]


def test_a_space_without_layouts_says_which_rule_took_most() -> None:
    with pytest.raises(InputError, match=r"none of 3 layouts is left; most, 3, are set aside for this: degrees .* 8$"):
        LayoutSearch(SearchSpace.restricted_to(job(), {"layout.tp": ["3", "5", "16"]})).run()
