"""Run pages of edge-case scenarios: empty panels are explained or omitted, and the page size is bounded."""

import re
from collections.abc import Mapping
from typing import Any

import pytest

from clustersim.planning.what_if import run_what_ifs
from clustersim.report.panels.memory import stage_memories
from clustersim.report.row_selection import MAX_ROWS, select_ranks
from clustersim.report.run_page import run_page
from clustersim.results.simulation_result import SimulationResult
from clustersim.scenario import Scenario
from clustersim.simulation import simulate

BASE_MAPPING: Mapping[str, Any] = {
    "model": {"preset": "llama3-8b", "layers": 4},
    "cluster": {"name": "dgx-h100", "gpus": 8},
    "layout": {"tp": 2, "pp": 2, "dp": 2},
    "training": {"sequence": 1024, "global_batch": 8},
}
ALL_TITLES = {
    "Where the time goes", "Each stage", "Pipeline timeline", "All ranks over time", "Communication and computation",
    "Largest losses", "What helps", "Prediction interval", "Key metrics",
    "Memory over time", "Memory at the peak", "Cluster and layout", "Network", "Critical path", "What if",
    "Provenance",
}  # fmt: skip


def simulate_overrides(*overrides: str) -> SimulationResult:
    return simulate(Scenario.from_mapping(BASE_MAPPING, list(overrides)))


def panel_titles(result: SimulationResult) -> set[str]:
    text = run_page(result, run_what_ifs(result, budget=0.0))
    return set(re.findall(r"<h2>(.*?)</h2>", text))


def test_pipeline_has_all_panels() -> None:
    assert panel_titles(simulate_overrides()) == ALL_TITLES


def test_single_gpu_omits_multi_rank_panels() -> None:
    single_gpu = simulate_overrides("cluster.gpus=1", "layout={}", "training.global_batch=1")
    text = run_page(single_gpu)
    assert "There is no communication between ranks." in text
    omitted = {"All ranks over time", "Communication and computation", "Each stage", "Pipeline timeline"}
    assert panel_titles(single_gpu) == (ALL_TITLES - omitted) | {"Timeline"}


def test_single_stage_omits_pipeline_panels() -> None:
    single_stage = panel_titles(simulate_overrides("layout={dp: 8}"))
    assert single_stage == (ALL_TITLES - {"Each stage", "Pipeline timeline"}) | {"Timeline"}


@pytest.mark.parametrize(
    "overrides",
    [
        ["layout={dp: 8, data: data_parallel}"],
        ["layout={dp: 8, data: fsdp}", "steps=3"],
        ["layout={cp: 2, pp: 2, dp: 2}", "schedule=zb-1p"],
        [
            "layout={tp: 2, pp: 2, dp: 2}",
            "schedule={orders: {rows: ['0F0,0I0,0W0', '1F0,1B0']}}",
            "training.global_batch=2",
        ],
        ["layout={tp: 2, pp: 2, dp: 2}", "schedule=zb-v"],
        ["degradations={jitter: 2 %, slow: {gpu: 5, speed: 0.8}}", "steps=2"],
        ["cost.network=shared"],
        ["schedule={interleaved: {chunks: 2}}", "degradations.nics={gpu: 3, dead: true}"],
        ["cluster.mixed=[{nodes: 0, accelerator: a100-sxm-80gb}]"],
    ],
)
def test_page_of_all_kinds_of_runs(overrides: list[str]) -> None:
    assert {"All ranks over time", "Critical path", "Network"} <= panel_titles(simulate_overrides(*overrides))


@pytest.mark.slow
def test_page_of_1024_stages_is_bounded() -> None:
    deep = simulate_overrides(
        "model.layers=1024", "model.hidden=256", "model.ffn=512", "model.heads=2", "model.kv_heads=2",
        "model.head_dim=128", "cluster.gpus=1024", "layout={pp: 1024}", "training.global_batch=16",
    )  # fmt: skip
    assert len(select_ranks(deep)) == MAX_ROWS
    assert len(stage_memories(deep)) in (
        MAX_ROWS - 1,
        MAX_ROWS,
    )  # the peak-memory stage may be among those evenly spaced
    text = run_page(deep)
    assert f"{MAX_ROWS} of 1,024 stages are shown" in text
    assert len(text.encode()) < 15e6


@pytest.mark.slow
def test_page_of_300_jittered_steps_is_below_15_mb() -> None:
    long = simulate_overrides("steps=300", "degradations.jitter=2%")
    assert len(run_page(long).encode()) < 15e6
