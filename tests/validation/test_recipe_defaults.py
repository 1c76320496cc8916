"""Which settings had a performance recipe of Megatron Bridge, by the container that a row names?"""

from itertools import product
from typing import Any

import pytest

from clustersim.model.presets import PRESETS
from clustersim.scenario import Scenario
from clustersim.validation.case_scenario import RECOMPUTE_MODES, scenario_mapping
from clustersim.validation.cases import ValidationCase
from clustersim.validation.cluster_lookup import CLUSTER_BY_GPU
from clustersim.validation.recipe_defaults import moe_recipes, recipe_releases, with_recipe_notes
from tests.validation.sample_cases import step_case

QWEN_30B = {
    **{"layers": "48", "hidden": "2048", "ffn_hidden": "6144", "heads": "32", "kv_heads": "4", "head_dim": "128"},
    **{"vocab": "151936", "experts": "128", "top_k": "8", "moe_ffn_hidden": "768", "shared_experts": "0"},
}
QWEN_235B = {
    **{"layers": "94", "hidden": "4096", "ffn_hidden": "12288", "heads": "64", "kv_heads": "4", "head_dim": "128"},
    **{"vocab": "151936", "experts": "128", "top_k": "8", "moe_ffn_hidden": "1536", "shared_experts": "0"},
}
DEEPSEEK = {
    **{"layers": "61", "hidden": "7168", "ffn_hidden": "18432", "heads": "128", "kv_heads": "128", "head_dim": "128"},
    **{"vocab": "129280", "experts": "256", "top_k": "8", "moe_ffn_hidden": "2048", "shared_experts": "1"},
}


def container_case(dims: dict[str, str], release: str, gpu: str, precision: str, **cells: str) -> ValidationCase:
    """A row of the performance table of a container."""
    one_node = {"tp": "1", "pp": "1", "dp": "8", "ep": "8", "schedule": "", "zero_stage": "1", "mlp": "swiglu"}
    run = {"gpu": gpu, "precision": precision, "framework": "megatron-bridge (megatron-core)", "year": "2026"}
    stated = {"tied_embeddings": "no", "recompute": "", "locator": f"performance-summary.md; {release} container; x"}
    return step_case(**{**dims, **one_node, **run, **stated, **cells})


def settings(case: ValidationCase) -> dict[str, Any]:
    mapping = scenario_mapping(case)
    layout, recompute = mapping["layout"], mapping["training"]["recompute"]
    return {
        "dispatcher": layout["dispatcher"],
        "overlap": layout.get("overlap_moe_expert_parallel_comm", False),
        "graphs": mapping["framework"].get("cuda_graphs", False),
        "recompute": recompute.get("modules", recompute.get("mode")),
    }


@pytest.mark.parametrize(
    ("dims", "release", "gpu", "precision", "expected"),
    [
        (QWEN_30B, "25.09", "b200", "bf16", ("alltoall", False, True, "none")),
        (QWEN_235B, "25.09", "b200", "bf16", ("alltoall", False, False, "none")),
        (QWEN_235B, "25.09", "gb200", "fp8", ("alltoall", False, True, "none")),
        (DEEPSEEK, "25.09", "gb200", "fp8", ("alltoall", False, False, ["mla_up_proj"])),
        (DEEPSEEK, "25.09", "h100-sxm-80gb", "fp8", ("deepep", True, False, ["mla_up_proj", "mlp"])),
        (DEEPSEEK, "25.11", "gb300", "mxfp8", ("hybridep", False, "outside_experts", ["moe_act"])),
        (QWEN_30B, "25.11", "gb200", "mxfp8", ("hybridep", False, False, "none")),
        (QWEN_235B, "26.02", "b300", "mxfp8", ("alltoall", True, False, "none")),
        (QWEN_235B, "26.02.01", "b300", "mxfp8", ("deepep", False, False, "none")),
        (QWEN_30B, "26.02", "h100-sxm-80gb", "fp8", ("deepep", True, False, "none")),
        (QWEN_30B, "26.02.01", "h100-sxm-80gb", "fp8", ("hybridep", False, False, "none")),
        (DEEPSEEK, "26.04", "gb200", "mxfp8", ("hybridep", False, "outside_experts", ["mlp"])),
        (QWEN_30B, "26.04.01", "b200", "mxfp8", ("hybridep", False, "outside_experts", "none")),
        (QWEN_30B, "26.06", "gb200", "mxfp8", ("hybridep", True, True, "none")),
        (QWEN_30B, "26.06", "gb200", "bf16", ("hybridep", False, "outside_experts", "none")),
        (DEEPSEEK, "26.06.01", "gb300", "mxfp8", ("hybridep", True, True, "none")),
        (DEEPSEEK, "26.08", "gb200", "mxfp8", ("hybridep", True, True, ["mla_up_proj"])),
    ],
)
def test_each_release_has_its_own_recipes(
    dims: dict[str, str], release: str, gpu: str, precision: str, expected: tuple[Any, ...]
) -> None:
    case = container_case(dims, release, gpu, precision, notes="first 3 layers dense" if dims is DEEPSEEK else "")
    assert tuple(settings(case).values()) == expected


@pytest.mark.parametrize(("ep", "graphs"), [("8", "outside_experts"), ("32", True)])
def test_expert_parallelism_selects_among_recipes(ep: str, graphs: bool | str) -> None:
    """Of 64 and of 256 GB200, which have expert parallelism 8 and 32."""
    assert settings(container_case(QWEN_235B, "26.06", "gb200", "mxfp8", ep=ep, dp="32"))["graphs"] == graphs


@pytest.mark.parametrize(("release", "gpu", "capacity"), [("25.09", "gb200", 1.0), ("25.11", "gb200", None)])
def test_tokens_are_dropped_in_the_first_release_on_blackwell(release: str, gpu: str, capacity: float | None) -> None:
    scenario = Scenario.from_mapping(scenario_mapping(container_case(QWEN_30B, release, gpu, "bf16")))
    assert {moe.capacity_factor for moe in scenario.model.distinct_moes} == {capacity}


@pytest.mark.parametrize(
    "cells",
    [
        {"notes": "recipe QWEN3_30B_A3B_PRETRAIN_CONFIG_B200_BF16_V1 @ v0.4.1: no recompute/offload fields"},
        {"notes": "EFA; library recipe @ v0.4.2"},
        {"locator": "a table of somebody"},
        {"framework": "megatron-lm"},
        {"locator": "performance-summary.md; 24.01 container; x"},
    ],
)
def test_rows_that_list_their_settings_or_name_no_recipe_stay_as_they_are(cells: dict[str, str]) -> None:
    case = container_case(QWEN_30B, "26.04.01", "b200", "bf16", **cells)
    assert with_recipe_notes(case) == case


def test_stated_recomputation_goes_before_the_recipe() -> None:
    case = container_case(QWEN_30B, "26.04", "b200", "bf16", recompute="full")
    assert settings(case)["recompute"] == "full"


def test_dispatch_overlaps_only_in_interleaved_pipelines() -> None:
    cells = {"pp": "2", "dp": "4", "ep": "4"}
    plain, interleaved = (
        container_case(QWEN_235B, "25.11", "b200", "mxfp8", **cells, schedule=schedule, vpp=vpp)
        for schedule, vpp in (("1f1b", "1"), ("interleaved", "47"))
    )
    assert (settings(plain)["overlap"], settings(interleaved)["overlap"]) == (False, True)


def test_the_table_names_what_exists() -> None:
    """Every recipe is of a listed release, a packaged model and a known GPU, and none is ambiguous."""
    seen: set[tuple[Any, ...]] = set()
    for recipe in moe_recipes():
        assert recipe.model in PRESETS
        assert set(recipe.gpus) <= set(CLUSTER_BY_GPU)
        assert set(recipe.releases) <= set(recipe_releases())
        assert recipe.recompute in RECOMPUTE_MODES or recipe.recompute.startswith("modules:")
        keys = {(recipe.model, recipe.ep, *key) for key in product(recipe.gpus, recipe.formats, recipe.releases)}
        assert not keys & seen
        seen |= keys
