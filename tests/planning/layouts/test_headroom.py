"""A search leaves headroom: what it recommends fits, also if memory was predicted too low."""

from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from clustersim.common.data_files import find_file
from clustersim.common.errors import InputError
from clustersim.planning.layouts import LayoutSearch, SearchSpace
from clustersim.planning.layouts.branch_and_bound import DOES_NOT_FIT, LEAVES_NO_HEADROOM
from clustersim.planning.layouts.candidate_bounds import STATES_DO_NOT_FIT, STATES_LEAVE_NO_HEADROOM
from clustersim.report.terminal.search import describe_fit, describe_ties
from clustersim.results.memory_check import check, peak_memory_use
from clustersim.results.search_result import SearchResult
from clustersim.scenario import Scenario
from clustersim.simulation import simulate
from clustersim.uncertainty.memory_error import SAFE_PROBABILITY, default_headroom
from tests.conftest import examples
from tests.planning.layouts.search_scenarios import exhaustive_step_times, search_scenario, varied_overrides

GIB = 2.0**30
VARY = {"layout.tp": ["1", "2", "4"], "training.recompute": ["none", "{layers: 1}", "full"]}
MEMORY_HUNGRY: dict[str, Any] = {
    "model": {"layers": 8, "hidden": 2048, "heads": 16, "ffn": 8192, "vocab": 32000},
    "cluster": {"name": "dgx-h100", "gpus": 8},
    "layout": {"tp": 1, "pp": 1, "data": "zero1"},
    "training": {"sequence": 2048, "global_batch": 256, "microbatch": 2},
    "framework": {"name": "ideal", "launch": "10 us"},
}


def scenario_with_memory(folder: Path, gib: float, *overrides: str) -> Scenario:
    """A scenario on GPUs with this much memory."""
    content = yaml.safe_load(find_file("accelerators", "h100-sxm-80gb").read_text())
    content["memory"] = f"{gib} GiB"
    path = folder / "own-gpu.yaml"
    path.write_text(yaml.safe_dump(content))
    return Scenario.from_mapping(MEMORY_HUNGRY, [f"cluster.accelerator={path}", *overrides])


def run_search(scenario: Scenario, headroom: float | None = None, vary: dict[str, list[str]] = VARY) -> SearchResult:
    return LayoutSearch(SearchSpace.restricted_to(scenario, vary), top=2, sensitivity=False, headroom=headroom).run()


@examples(25)
@given(headroom=st.floats(0.0, 0.999), moe=st.booleans())
def test_search_with_headroom_finds_what_brute_force_finds(headroom: float, moe: bool) -> None:
    scenario = search_scenario(moe=moe)
    vary = {**VARY, "layout.pp": ["1", "2"], "training.microbatch": ["1", "4"]}
    safe, fitting = (exhaustive_step_times(scenario, vary, headroom=share) for share in (headroom, 0.0))
    result = run_search(scenario, headroom, vary)
    expected = safe or fitting  # without headroom only where no layout leaves it
    assert result.simulated[0].step_time == min(expected.values())
    assert all(layout.leaves_headroom is bool(safe) for layout in result.simulated)
    space = SearchSpace.restricted_to(scenario, vary)
    assert all(varied_overrides(space, layout.overrides) in expected for layout in result.simulated)
    counted = sum(pruned.count for pruned in result.pruned.values())
    assert result.candidates == counted + len(result.bounded) + len(result.simulated)


def test_fastest_layout_with_an_eighth_of_a_gib_left_is_not_recommended(tmp_path: Path) -> None:
    """Search once recommended a layout with 0.12 GiB left of 79.65."""
    roomy = scenario_with_memory(tmp_path, 80.0)
    fastest = run_search(roomy, headroom=0.0).simulated[0]
    scenario = scenario_with_memory(tmp_path, fastest.peak_memory / GIB + 0.12)

    today = run_search(scenario, headroom=0.0).recommended
    assert today.headroom == pytest.approx(0.12 * GIB, rel=0.01)
    assert today.fit_probability < SAFE_PROBABILITY

    result = run_search(scenario)
    assert result.recommended.leaves_headroom
    assert result.recommended.fit_probability >= SAFE_PROBABILITY
    assert result.recommended.headroom >= default_headroom("ideal") * result.recommended.memory
    excluded = {LEAVES_NO_HEADROOM, STATES_LEAVE_NO_HEADROOM} & result.pruned.keys()
    assert excluded
    assert not {DOES_NOT_FIT, STATES_DO_NOT_FIT} & excluded
    assert " left" in describe_fit(result)


def test_space_without_headroom_shows_the_best_that_fits_marked_unsafe(tmp_path: Path) -> None:
    scenario = scenario_with_memory(tmp_path, 80.0)
    vary = {"training.recompute": ["none", "full"]}
    layouts = run_search(scenario, 0.0, {"training.recompute": ["full"]})
    tight = scenario_with_memory(tmp_path, layouts.recommended.peak_memory / GIB + 0.5)
    result = run_search(tight, vary=vary)
    assert "training.recompute=full" in result.recommended.overrides
    assert not result.recommended.leaves_headroom
    assert not result.to_json()["best"][0]["leaves_headroom"]
    assert "UNSAFE" in describe_fit(result)
    assert DOES_NOT_FIT in result.pruned


def test_jobs_without_headroom_rank_below_those_with_it() -> None:
    """Here on H100 and H200, of a model of which H100 have no headroom."""
    scenario = search_scenario("training.recompute=none")
    peak, small = check(scenario).peak_memory_bytes, check(scenario).memory_capacity_bytes
    headroom = 1.0 - 0.999 * peak / small
    space = SearchSpace.from_scenario(scenario, FIXED, clusters=["dgx-h100", "hgx-h200"])
    result = LayoutSearch(space, sensitivity=False, headroom=headroom).run()
    assert [layout.cluster for layout in result.simulated] == ["hgx-h200", "dgx-h100"]
    assert [layout.leaves_headroom for layout in result.simulated] == [True, False]
    assert not result.simulated[1].tied
    assert result.recommended.cluster == "hgx-h200"


FIXED = {
    "layout.tp": "2", "layout.pp": "2", "layout.cp": "1", "layout.sequence_parallel": "true", "schedule": "1f1b",
    "layout.data": "zero1", "training.microbatch": "1", "training.recompute": "none",
}  # fmt: skip


def test_of_layouts_that_tie_the_one_with_much_more_memory_is_preferred(tmp_path: Path) -> None:
    """Equally fast within the noise: ZeRO-1 shards the optimizer's states, DDP does not and is the simpler one."""
    vary = {"layout.data": ["ddp", "zero1"]}
    sizes = {
        data: peak_memory_use(scenario_with_memory(tmp_path, 80.0, f"layout.data={data}")).needed / GIB
        for data in vary["layout.data"]
    }
    headroom = default_headroom("ideal")
    scenario = scenario_with_memory(tmp_path, sizes["ddp"] / (1.0 - headroom) + 0.1)
    times = {data: simulate(scenario.with_overrides(f"layout.data={data}")).step_time for data in vary["layout.data"]}
    result = run_search(scenario, vary=vary)
    assert max(times.values()) <= min(times.values()) * (1.0 + result.repeatability), times
    assert "layout.data=zero1" in result.recommended.overrides
    assert "more memory" in describe_ties(result)
    assert "layout.data=ddp" in run_search(scenario, 0.0, vary).recommended.overrides


def test_empty_space_names_memory_although_another_rule_pruned_more(tmp_path: Path) -> None:
    scenario = scenario_with_memory(tmp_path, 1.0)
    with pytest.raises(InputError, match=r"1 are legal, and none fits in memory; .* of 1 GiB, is layout.tp=1"):
        run_search(scenario, vary={"layout.tp": ["1", "3", "5", "7", "9"]})


@pytest.mark.parametrize("headroom", [-0.1, 1.0, 7.0])
def test_headroom_that_is_no_share_is_an_error(headroom: float) -> None:
    with pytest.raises(InputError, match=r"headroom: .* is no share"):
        run_search(search_scenario(), headroom)


def test_search_resumes_with_its_headroom_only(tmp_path: Path) -> None:
    space = SearchSpace.restricted_to(search_scenario(), VARY)
    first = LayoutSearch(space, store=tmp_path, sensitivity=False, headroom=0.97).run()
    again = LayoutSearch(space, store=tmp_path, sensitivity=False, headroom=0.97).run()
    assert again.simulated == first.simulated
    assert again.pruned == first.pruned
    with pytest.raises(InputError, match="another search"):
        LayoutSearch(space, store=tmp_path, sensitivity=False, headroom=0.5).run()
