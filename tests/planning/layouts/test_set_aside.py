"""What is impossible is set aside with its reason; the rest of a search goes on."""

from typing import Any

import pytest

from clustersim.common.errors import InputError
from clustersim.planning.layouts import LayoutSearch, SearchSpace
from clustersim.planning.layouts.search_jobs import UNPAIRED_RANKS
from clustersim.results.search_result import SearchResult
from clustersim.scenario import Scenario
from tests.planning.layouts.search_scenarios import search_scenario

MIXTURE: dict[str, Any] = {  # like DeepSeek-V3, with fewer and smaller layers
    "model": {"preset": "deepseek-v3", "layers": 12, "hidden": 896},
    "cluster": {"name": "dgx-h800", "gpus": 24},
    "layout": {"pp": 4, "ep": 2, "data": "zero1"},
    "training": {"sequence": 1024, "global_batch": 96},
}
FIX = {
    "layout.tp": "1", "layout.cp": "1", "layout.ep": "2", "layout.etp": "1", "layout.data": "zero1",
    "training.microbatch": "1", "training.recompute": "none", "layout.sequence_parallel": "false",
    "layout.overlap_moe_expert_parallel_comm": "false",
}  # fmt: skip


def run_search(scenario: Scenario, fix: dict[str, str], vary: dict[str, list[str]]) -> SearchResult:
    space = SearchSpace.from_scenario(scenario, fix, vary)
    return LayoutSearch(space, sensitivity=False, headroom=0.0).run()


def chosen(result: SearchResult, key: str) -> set[str]:
    overrides = (override for layout in result.simulated for override in layout.overrides)
    return {value for name, _, value in (override.partition("=") for override in overrides) if name == key}


def test_dualpipe_sets_odd_pipelines_of_a_mixture_aside() -> None:
    scenario = Scenario.from_mapping(MIXTURE)
    vary = {"schedule": ["1f1b", "dualpipe"], "layout.pp": ["1", "2", "3", "4", "6"]}
    result = run_search(scenario, FIX, vary)
    assert result.pruned[UNPAIRED_RANKS].count == 3
    assert {"1f1b", "dualpipe"} == chosen(result, "schedule")
    only_dualpipe = run_search(scenario, FIX | {"schedule": "dualpipe"}, {"layout.pp": vary["layout.pp"]})
    assert chosen(only_dualpipe, "layout.pp") == {"4", "6"}
    assert only_dualpipe.pruned[UNPAIRED_RANKS].count == 3


@pytest.mark.parametrize("overrides", [["schedule=dualpipe"], ["schedule=1f1b", "layout.pp=3"]])
def test_default_pipelines_of_a_file_with_any_schedule_are_searched(overrides: list[str]) -> None:
    scenario = Scenario.from_mapping(MIXTURE, overrides)
    fix = {**FIX, "schedule": "dualpipe"}
    space = SearchSpace.from_scenario(scenario, fix)
    degrees = {
        int(override.partition("=")[2])
        for candidate in space.candidates({})
        for override in candidate.overrides
        if override.startswith("layout.pp=")
    }
    assert {4, 6} <= degrees
    assert all(degree % 2 == 0 and degree >= 4 for degree in degrees)


def test_only_impossible_pipelines_are_an_error() -> None:
    with pytest.raises(InputError, match=r"pairs of pipeline ranks.*pp: 3"):
        run_search(Scenario.from_mapping(MIXTURE), FIX | {"schedule": "dualpipe"}, {"layout.pp": ["3"]})


def test_one_impossible_size_is_set_aside_with_its_reason() -> None:
    fix = {"layout.tp": "2", "layout.pp": "1", "training.microbatch": "1", "training.recompute": "none"}
    space = SearchSpace.from_scenario(search_scenario(), fix, gpus=[8, 12, 16])
    assert [job.resolved.cluster.gpu_count for job in space.jobs] == [8, 16]
    result = LayoutSearch(space, sensitivity=False).run()
    assert {layout.gpus for layout in result.simulated} <= {8, 16}
    (job,) = result.set_aside
    assert "12" in job.name
    assert "not a multiple of the 8 per node" in job.reason
    assert result.to_json()["set_aside"] == [{"name": job.name, "reason": job.reason}]


def test_size_without_a_legal_layout_is_named() -> None:
    """A batch of 8 has no sequence for each of the 16 replicas of 32 GPUs."""
    fix = {"layout.tp": "2", "layout.pp": "1", "layout.cp": "1", "training.microbatch": "1"}
    space = SearchSpace.from_scenario(search_scenario(), fix, gpus=[8, 32])
    result = LayoutSearch(space, sensitivity=False).run()
    assert {layout.gpus for layout in result.simulated} == {8}
    (job,) = result.set_aside
    assert "32 GPUs" in job.name
    assert "none of" in job.reason


def test_impossible_sizes_alone_are_an_error_that_names_each() -> None:
    with pytest.raises(InputError, match=r"12 GPUs.*; .*20 GPUs"):
        SearchSpace.from_scenario(search_scenario(), gpus=[12, 20])
