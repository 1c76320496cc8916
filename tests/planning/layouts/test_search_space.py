"""Candidate layouts: which keys vary by default, which are derived, and messages for bad search spaces."""

from pathlib import Path
from typing import Any

import pytest

from clustersim.common.data_files import find_file
from clustersim.common.errors import InputError
from clustersim.parallel.layer_partition import BehindEncoder
from clustersim.planning.layouts import LayoutSearch, SearchSpace, search_layouts
from clustersim.results.search_result import PrunedLayouts, SearchResult
from clustersim.scenario import Scenario
from tests.planning.layouts.search_scenarios import search_scenario
from tests.sentences import parts


def candidate_overrides(space: SearchSpace) -> list[set[str]]:
    return [set(candidate.overrides) for candidate in space.candidates({})]


def test_the_first_guess_is_in_the_default_space() -> None:
    overrides = ["layout.data={hsdp: {shard: 4}}", "schedule=gpipe", "training.recompute={layers: 1}",
           "training.microbatch=3", "training.global_batch=24", "cluster.gpus=32"]  # fmt: skip
    guess = search_scenario(*overrides)
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
    ("arguments", "message"),
    [
        ({"objective": "enrgy"}, "objective: 'enrgy' is unknown; did you mean energy?"),
        ({"top": 0}, "top: 0 is too few; 1 is the fewest"),
        ({"workers": -1}, "workers: -1 is too few; 1 is the fewest"),
        ({"vary": {"layout.tp": "12"}}, "vary: layout.tp: '12' is no list of values"),
        ({"vary": {"layout.tp": 2}}, "vary: layout.tp: 2 is no list of values"),
    ],
)
def test_bad_python_arguments_give_the_command_lines_messages(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=parts(message)):
        search_layouts(search_scenario(), **arguments)


def test_replicas_are_on_the_gpus_that_each_number_of_encoders_leaves() -> None:
    mapping = {
        "model": {"language": "llama-tiny", "encoder": {"preset": "clip-vit-l-14-336", "input_size": 56, "layers": 2}},
        "cluster": {"name": "dgx-h100", "gpus": 8},
        "layout": {"pp": 2, "data": "zero1", "encoder_placement": "own_stage", "encoder_tp": 1, "encoder_dp": 2},
        "training": {"sequence": 256, "global_batch": 168, "microbatch": 1},
    }
    scenario = Scenario.from_mapping(mapping)
    vary = {"layout.tp": ["1", "2"], "schedule": ["1f1b"], "layout.data": ["zero1"], "training.recompute": ["none"]}
    space = SearchSpace.from_scenario(scenario, vary=vary)
    layouts = [scenario.with_overrides(candidate.overrides).layout for candidate in space.candidates({})]
    assert {layout.encoder_dp for layout in layouts} == {1, 2, 4}
    assert {layout.pp for layout in layouts} >= {2, 3}
    assert all(layout.world_size == 8 and isinstance(layout.layers_per_stage, BehindEncoder) for layout in layouts)


def test_wrong_argument_types_are_type_errors() -> None:
    with pytest.raises(TypeError, match="str is not a Scenario"):
        search_layouts("plan.yaml")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"fix: .* is no mapping"):
        search_layouts(search_scenario(), fix=["layout.pp=1"])  # type: ignore[arg-type]


def test_objectives_by_name_and_numeric_values_are_accepted() -> None:
    vary = {"layout.tp": [1, 2]}
    result = search_layouts(search_scenario(), fix={"layout.pp": 1}, vary=vary, objective="energy")
    assert result.objective == "energy"


def legal(scenario: Scenario, overrides: tuple[str, ...]) -> bool:
    try:
        scenario.with_overrides(overrides, suggest=False)
    except InputError:
        return False
    return True


def test_every_combination_is_a_candidate_or_pruned() -> None:
    pruned: dict[str, PrunedLayouts] = {}
    space = SearchSpace.from_scenario(search_scenario())
    candidate_count = len([*space.candidates(pruned)])
    assert candidate_count + sum(pruned_layouts.count for pruned_layouts in pruned.values()) == space.combination_count
    assert all(item.example.startswith(f"{reason}: ") for reason, item in pruned.items())


def test_candidates_are_different_scenarios() -> None:
    candidates = [candidate.overrides for candidate in SearchSpace.from_scenario(search_scenario()).candidates({})]
    assert len(set(candidates)) == len(candidates)


def test_the_data_parallel_degree_is_derived() -> None:
    for candidate_override in candidate_overrides(
        SearchSpace.restricted_to(search_scenario(), {"layout.tp": ["1", "2", "4"], "layout.pp": ["1", "2"]})
    ):
        values_by_key = dict(one.split("=", 1) for one in candidate_override)
        assert int(values_by_key["layout.tp"]) * int(values_by_key["layout.pp"]) * int(values_by_key["layout.dp"]) == 8
        assert values_by_key["layout.sequence_parallel"] == ("true" if int(values_by_key["layout.tp"]) > 1 else "false")


def test_sequence_parallelism_varies_where_it_is_optional() -> None:
    """Off with one tensor-parallel rank; on where experts would get the same tokens from every tensor-parallel rank."""
    for scenario, kinds in (
        (search_scenario(), {("1", "false"), ("2", "false"), ("2", "true")}),
        (search_scenario(moe=True), {("1", "false"), ("2", "true")}),
    ):
        space = SearchSpace.from_scenario(scenario, vary={"layout.tp": ["1", "2"]})
        values_by_key = [
            dict(one.split("=", 1) for one in candidate_override) for candidate_override in candidate_overrides(space)
        ]
        assert {(item["layout.tp"], item["layout.sequence_parallel"]) for item in values_by_key} == kinds


def test_the_data_parallel_degree_can_be_fixed() -> None:
    space = SearchSpace.from_scenario(search_scenario(), fix={"layout.dp": "4"})
    pruned: dict[str, PrunedLayouts] = {}
    candidates = [*space.candidates(pruned)]
    assert candidates
    assert all("layout.dp=4" in candidate.overrides for candidate in candidates)
    assert "layout.dp is fixed: it would be 8, not 4" in [pruned_layouts.example for pruned_layouts in pruned.values()]


def test_fixed_keys_do_not_vary() -> None:
    space = SearchSpace.from_scenario(
        search_scenario(), fix={"layout.tp": "2", "training.recompute": "full"}, vary={"layout.pp": ["2", "4"]}
    )
    (search_job,) = space.jobs
    assert not {"layout.tp", "training.recompute"} & search_job.values.keys()
    assert search_job.values["layout.pp"] == ("2", "4")
    assert all(
        {"layout.tp=2", "training.recompute=full"} <= candidate_override
        for candidate_override in candidate_overrides(space)
    )


def test_explicit_values_are_not_pruned_by_heuristics() -> None:
    """No framework runs ZeRO-2 with a pipeline, so it is pruned by default but not if requested."""
    default_candidates = {
        candidate
        for candidate in SearchSpace.from_scenario(search_scenario()).candidates({})
        if "layout.data=zero2" in candidate.overrides
    }
    assert all("layout.pp=1" in default_candidate.overrides for default_candidate in default_candidates)
    space = SearchSpace.from_scenario(search_scenario(), vary={"layout.data": ["zero2"], "layout.pp": ["2"]})
    assert any("layout.data=zero2" in candidate_override for candidate_override in candidate_overrides(space))


@pytest.mark.parametrize(("framework", "absent"), [("transformers", {"pp"}), ("llm.c", {"tp", "cp", "pp"})])
def test_ranks_are_divided_only_along_axes_that_the_framework_has(framework: str, absent: set[str]) -> None:
    """A pipeline was recommended for Transformers, which has none; one that the file has is searched all the same."""
    (job,) = SearchSpace.from_scenario(search_scenario(f"framework={framework}", "layout={data: ddp}")).jobs
    varied = {axis for axis in ("tp", "cp", "pp") if f"layout.{axis}" in job.values}
    assert not varied & absent
    assert len(varied) == 0 or framework == "transformers"
    ported = search_scenario(f"framework={framework}", "layout={pp: 2, data: ddp}")
    (ported_job,) = SearchSpace.from_scenario(ported).jobs
    assert len(ported_job.values["layout.pp"]) > 1


def test_each_size_and_cluster_is_a_separate_search_job() -> None:
    space = SearchSpace.from_scenario(search_scenario(), gpus=[8, 16], clusters=["dgx-h100", "dgx-a100"])
    assert [search_job.overrides for search_job in space.jobs] == [
        (f"cluster.name={name}", f"cluster.gpus={gpus}") for name in ("dgx-h100", "dgx-a100") for gpus in (8, 16)
    ]
    assert {candidate.job_index for candidate in space.candidates({})} == {0, 1, 2, 3}


def test_a_cluster_file_is_compared_with_a_packaged_cluster(tmp_path: Path) -> None:
    path = tmp_path / "own.yaml"
    path.write_text(find_file("clusters", "dgx-a100").read_text())
    for scenario in (search_scenario(), search_scenario(f"cluster={{path: {path}, gpus: 8}}")):
        space = SearchSpace.from_scenario(scenario, gpus=[16], clusters=["dgx-h100", str(path)])
        assert [search_job.resolved.cluster.name for search_job in space.jobs] == ["dgx-h100", "own"]


def test_the_batch_may_grow_with_the_gpus() -> None:
    space = SearchSpace.from_scenario(search_scenario(), gpus=[8, 32], batch_per_gpu=True)
    assert [search_job.overrides for search_job in space.jobs] == [(), ("cluster.gpus=32", "training.global_batch=32")]


def test_the_best_of_every_size_is_found() -> None:
    fix = {"layout.tp": "1", "layout.data": "zero1", "training.microbatch": "1"}

    def best(*gpus: int) -> SearchResult:
        return LayoutSearch(
            SearchSpace.from_scenario(search_scenario(), fix, gpus=gpus), top=1, sensitivity=False
        ).run()

    result, separate = best(4, 8), [best(4), best(8)]
    assert [layout_result.step_time for layout_result in result.best_by_job] == [
        search_result.best[0].step_time for search_result in separate
    ]
    assert [item.gpus for item in result.best_by_job] == [4, 8]


def test_recomputation_is_not_increased_beyond_what_fits() -> None:
    result = search_layouts(search_scenario(), fix={"layout.tp": "1", "layout.pp": "1"})
    assert result.pruned["less recomputation fits"].count > 0
    assert all("training.recompute=none" in layout_result.overrides for layout_result in result.simulated)


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ({"vary": {"layout.tpp": ["1"]}}, "layout.tpp: unknown key; did you mean tp"),
        ({"fix": {"layout.tp": "three"}}, "layout.tp: .*three"),
        ({"vary": {"layout.data": ["zero9"]}}, "layout.data: 'zero9' is unknown; did you mean"),
        ({"vary": {"layout.tp": []}}, r"--vary layout\.tp: has no values.*layout\.tp=1,2,4"),
        ({"fix": {"layout.tp": "2"}, "vary": {"layout.tp": ["2"]}}, "layout.tp is fixed and varied"),
        ({"fix": {"cluster.gpus": "16"}}, "cluster.gpus: clusters are no layouts"),
        ({"vary": {"diloco.inner_steps": ["50", "500"]}}, "diloco.inner_steps: the scenario trains in step"),
        ({"fix": {"layout.dp": "many"}}, "layout.dp: 'many' is not a number"),
        ({"gpus": [0]}, "gpus: 0 is not a number of GPUs"),
        ({"gpus": [12]}, r"gpus: 12 GPUs.*8 per node.*8 or 16"),
        ({"gpus": [2], "batch_per_gpu": True}, r"gpus: 2 GPUs.*as 8 have.*1\.5"),
        ({"clusters": ["dgx-h1000"]}, "dgx-h1000.*dgx-h100"),
    ],
)
def test_bad_search_spaces_are_refused(arguments: dict[str, object], sentence: str) -> None:
    with pytest.raises(InputError, match=sentence):
        SearchSpace.from_scenario(search_scenario("training.global_batch=6"), **arguments)  # type: ignore[arg-type]


def test_an_empty_space_names_the_rule_that_pruned_most() -> None:
    with pytest.raises(InputError, match=r"none of 3 layouts.*3.*pruned.*degrees .* 8$"):
        LayoutSearch(SearchSpace.restricted_to(search_scenario(), {"layout.tp": ["3", "5", "16"]})).run()
