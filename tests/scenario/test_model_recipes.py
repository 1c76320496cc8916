"""Which settings has a recipe of a framework, for a scenario that names it and for a published row that ran it?"""

from itertools import product
from typing import Any

import pytest

from clustersim.common import data_files
from clustersim.common.errors import InputError
from clustersim.model.framework import GraphCapture
from clustersim.model.framework_files import load_framework
from clustersim.model.optimizers import Muon, Optimizer
from clustersim.model.presets import code_presets
from clustersim.model.recompute_modules import RecomputeModule
from clustersim.model.training import FullRecompute, FusedKernel, NoRecompute, SelectiveRecompute
from clustersim.program.task import TokenDispatcher
from clustersim.scenario import Scenario
from clustersim.scenario.config.training import RecomputeMode
from clustersim.scenario.model_recipes import ModelRecipes, load_model_recipes
from clustersim.validation.case_scenario import scenario_mapping
from clustersim.validation.cases import ValidationCase
from tests.validation.sample_cases import step_case

CLUSTERS = {
    "h100-sxm-80gb": "dgx-h100",
    "b200": "hgx-b200",
    "b300": "hgx-b300",
    "gb200": "gb200-nvl72",
    "gb300": "gb300-nvl72",
}
FORMATS = {"fp8": "fp8-current"}
QWEN_30B, QWEN_235B, DEEPSEEK = "qwen3-30b-a3b", "qwen3-235b-a22b", "deepseek-v3"
DIMENSIONS = {
    QWEN_30B: {
        **{"layers": "48", "hidden": "2048", "ffn_hidden": "6144", "heads": "32", "kv_heads": "4", "head_dim": "128"},
        **{"vocab": "151936", "experts": "128", "top_k": "8", "moe_ffn_hidden": "768", "shared_experts": "0"},
    },
    QWEN_235B: {
        **{"layers": "94", "hidden": "4096", "ffn_hidden": "12288", "heads": "64", "kv_heads": "4", "head_dim": "128"},
        **{"vocab": "151936", "experts": "128", "top_k": "8", "moe_ffn_hidden": "1536", "shared_experts": "0"},
    },
    DEEPSEEK: {
        **{"layers": "61", "hidden": "7168", "ffn_hidden": "18432", "heads": "128", "kv_heads": "128"},
        **{"head_dim": "128", "vocab": "129280", "experts": "256", "top_k": "8", "moe_ffn_hidden": "2048"},
        **{"shared_experts": "1", "notes": "first 3 layers dense"},
    },
}
OUTSIDE, ALL, NOTHING = GraphCapture.OUTSIDE_EXPERTS, GraphCapture.ALL, GraphCapture.NOTHING
UP, MLP, ACTIVATION = RecomputeModule.MLA_UP_PROJECTION, RecomputeModule.MLP, RecomputeModule.MOE_ACTIVATION
CORE = RecomputeModule.CORE_ATTENTION
RELEASES = [
    (QWEN_30B, "25.09", "b200", "bf16", ("alltoall", False, ALL, set())),
    (QWEN_235B, "25.09", "b200", "bf16", ("alltoall", False, NOTHING, set())),
    (QWEN_235B, "25.09", "gb200", "fp8", ("alltoall", False, ALL, set())),
    (DEEPSEEK, "25.09", "gb200", "fp8", ("alltoall", False, NOTHING, {UP})),
    (DEEPSEEK, "25.09", "h100-sxm-80gb", "fp8", ("deepep", True, NOTHING, {UP, MLP})),
    (DEEPSEEK, "25.11", "gb300", "mxfp8", ("hybridep", False, OUTSIDE, {ACTIVATION})),
    (QWEN_30B, "25.11", "gb200", "mxfp8", ("hybridep", False, NOTHING, set())),
    (QWEN_235B, "26.02", "b300", "mxfp8", ("alltoall", True, NOTHING, set())),
    (QWEN_235B, "26.02.01", "b300", "mxfp8", ("deepep", False, NOTHING, set())),
    (QWEN_30B, "26.02", "h100-sxm-80gb", "fp8", ("deepep", True, NOTHING, set())),
    (QWEN_30B, "26.02.01", "h100-sxm-80gb", "fp8", ("hybridep", False, NOTHING, set())),
    (DEEPSEEK, "26.04", "gb200", "mxfp8", ("hybridep", False, OUTSIDE, {MLP})),
    (QWEN_30B, "26.04.01", "b200", "mxfp8", ("hybridep", False, OUTSIDE, set())),
    (QWEN_30B, "26.06", "gb200", "mxfp8", ("hybridep", True, ALL, set())),
    (QWEN_30B, "26.06", "gb200", "bf16", ("hybridep", False, OUTSIDE, set())),
    (DEEPSEEK, "26.06.01", "gb300", "mxfp8", ("hybridep", True, ALL, set())),
    (DEEPSEEK, "26.08", "gb200", "mxfp8", ("hybridep", True, ALL, {UP})),
]


def container_row(model: str, release: str, gpu: str, precision: str, **cells: str) -> ValidationCase:
    """A row of the performance table of a container."""
    one_node = {"tp": "1", "pp": "1", "dp": "8", "ep": "8", "schedule": "", "zero_stage": "1", "mlp": "swiglu"}
    run = {"gpu": gpu, "precision": precision, "framework": "megatron-bridge (megatron-core)", "year": "2026"}
    stated = {"tied_embeddings": "no", "recompute": "", "locator": f"performance-summary.md; {release} container; x"}
    return step_case(**{**DIMENSIONS[model], **one_node, **run, **stated, **cells})


def user_scenario(model: str, gpu: str, precision: str, **changes: Any) -> Scenario:
    """What a user writes; changes: whole sections, merged by key."""
    mapping: dict[str, Any] = {
        "model": {"preset": model},
        "cluster": {"name": CLUSTERS[gpu], "gpus": 8},
        "layout": {"dp": 8, "ep": 8, "data": "zero1"},
        "training": {"sequence": 4096, "global_batch": 64, "precision": FORMATS.get(precision, precision)},
        "framework": {"name": "megatron-bridge", "recipe": "performance"},
    }
    return Scenario.from_mapping({key: value | changes.pop(key, {}) for key, value in mapping.items()} | changes)


def settings(scenario: Scenario) -> tuple[Any, ...]:
    layout, recompute = scenario.layout, scenario.training.recompute
    modules = set(recompute.modules) if isinstance(recompute, SelectiveRecompute) else set()
    overlap = layout.overlap_moe_expert_parallel_comm
    return layout.dispatcher.value, overlap, scenario.framework.graph_capture, modules


def table(framework: str = "megatron-bridge") -> ModelRecipes:
    recipes = load_model_recipes(framework)
    assert recipes is not None
    return recipes


@pytest.mark.parametrize(("model", "release", "gpu", "precision", "expected"), RELEASES)
def test_each_version_has_its_own_recipes(
    model: str, release: str, gpu: str, precision: str, expected: tuple[Any, ...]
) -> None:
    framework = {"name": "megatron-bridge", "recipe": "performance", "version": release}
    assert settings(user_scenario(model, gpu, precision, framework=framework)) == expected


@pytest.mark.parametrize(("model", "release", "gpu", "precision", "expected"), RELEASES)
def test_a_row_of_a_container_gets_what_a_user_gets(
    model: str, release: str, gpu: str, precision: str, expected: tuple[Any, ...]
) -> None:
    row = Scenario.from_mapping(scenario_mapping(container_row(model, release, gpu, precision)))
    user = user_scenario(model, gpu, precision, framework={"version": release})
    assert settings(row) == expected
    assert (row.training.recipe, row.training.overheads, row.training.fused) == (
        user.training.recipe,
        user.training.overheads,
        user.training.fused,
    )
    assert row.layout.moe_shared_expert_overlap == user.layout.moe_shared_expert_overlap
    assert row.layout.dispatcher_num_sms == user.layout.dispatcher_num_sms


@pytest.mark.parametrize("recipe", ["library", "performance"])
def test_no_recipe_shards_experts_over_tensor_parallel_ranks(recipe: str) -> None:
    layout = {"dp": 4, "tp": 2, "ep": 8, "sequence_parallel": True}
    scenario = user_scenario(QWEN_30B, "b200", "bf16", layout=layout, framework={"recipe": recipe})
    assert scenario.layout.effective_etp == 1


def test_without_a_version_it_is_the_newest_recipe() -> None:
    newest = {"name": "megatron-bridge", "recipe": "performance", "version": [*table().versions][-1]}
    assert settings(user_scenario(QWEN_30B, "gb200", "mxfp8")) == settings(
        user_scenario(QWEN_30B, "gb200", "mxfp8", framework=newest)
    )


@pytest.mark.parametrize(("ep", "graphs"), [(8, OUTSIDE), (32, ALL)])
def test_expert_parallelism_selects_among_recipes(ep: int, graphs: GraphCapture) -> None:
    """Of 64 and of 256 GB200, which have expert parallelism 8 and 32."""
    layout, framework = {"dp": 32, "ep": ep}, {"version": "26.06"}
    scenario = user_scenario(QWEN_235B, "gb200", "mxfp8", layout=layout, framework=framework, cluster={"gpus": 32})
    assert scenario.framework.graph_capture is graphs


@pytest.mark.parametrize(("version", "gpu", "capacity"), [("25.09", "gb200", 1.0), ("25.11", "gb200", None)])
def test_tokens_are_dropped_in_the_first_version_on_blackwell(version: str, gpu: str, capacity: float | None) -> None:
    scenario = user_scenario(QWEN_30B, gpu, "bf16", framework={"version": version})
    assert {moe.capacity_factor for moe in scenario.model.distinct_moes} == {capacity}


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"layout": {"dispatcher": "alltoall"}}, ("alltoall", True, ALL, set())),
        ({"framework": {"cuda_graphs": "outside_experts"}}, ("hybridep", True, OUTSIDE, set())),
        ({"training": {"recompute": "full"}}, ("hybridep", False, ALL, set())),
        ({"layout": {"overlap_moe_expert_parallel_comm": False}}, ("hybridep", False, ALL, set())),
        ({"layout": {"data": "fsdp"}}, ("hybridep", True, ALL, set())),
        ({"framework": {"recipe": "library"}}, ("deepep", False, NOTHING, set())),
        ({"framework": {"recipe": None}}, ("alltoall", False, NOTHING, set())),
    ],
)
def test_what_the_file_states_goes_before_the_recipe(changes: dict[str, Any], expected: tuple[Any, ...]) -> None:
    """Full recomputation and the recipe's overlap exclude each other; the file's wins without an error."""
    assert settings(user_scenario(QWEN_30B, "gb200", "mxfp8", **changes)) == expected


def test_overheads_without_any_stay_without() -> None:
    scenario = user_scenario(QWEN_30B, "gb200", "mxfp8", training={"overheads": "none"})
    assert not scenario.training.overheads.router_loss


def test_dispatch_overlaps_only_in_interleaved_pipelines() -> None:
    layout, framework = {"dp": 4, "ep": 4, "pp": 2}, {"version": "25.11"}
    plain, interleaved = (
        user_scenario(QWEN_235B, "b200", "mxfp8", layout=layout, framework=framework, schedule=schedule)
        for schedule in ("1f1b", {"interleaved": {"chunks": 47}})
    )
    assert [scenario.layout.overlap_moe_expert_parallel_comm for scenario in (plain, interleaved)] == [False, True]


def test_library_recipes_leave_rotary_embeddings_unfused() -> None:
    library, performance = (
        user_scenario(QWEN_30B, "h100-sxm-80gb", "bf16", framework={"recipe": recipe})
        for recipe in ("library", "performance")
    )
    assert performance.training.fused - library.training.fused == {FusedKernel.ROTARY}
    assert library.training.recompute == FullRecompute()
    assert performance.training.recompute == NoRecompute()


def test_an_unknown_version_names_the_known_ones() -> None:
    with pytest.raises(InputError, match=r"version: '27\.01' of megatron-bridge.*25\.09, 25\.11"):
        user_scenario(QWEN_30B, "b200", "bf16", framework={"version": "27.01"})


@pytest.mark.parametrize(
    "cells",
    [
        {"notes": "recipe QWEN3_30B_A3B_PRETRAIN_CONFIG_B200_BF16_V1 @ v0.4.1: no recompute/offload fields"},
        {"notes": "EFA; library recipe @ v0.4.2"},
        {"locator": "a table of somebody"},
        {"locator": "performance-summary.md; 24.01 container; x"},
    ],
)
def test_rows_that_list_their_settings_or_name_no_recipe_state_everything(cells: dict[str, str]) -> None:
    row = Scenario.from_mapping(scenario_mapping(container_row(QWEN_30B, "26.04.01", "b200", "bf16", **cells)))
    assert settings(row) == ("alltoall", False, NOTHING, set())


def test_stated_recomputation_of_a_row_goes_before_the_recipe() -> None:
    row = container_row(QWEN_30B, "26.04", "b200", "bf16", recompute="full")
    assert Scenario.from_mapping(scenario_mapping(row)).training.recompute == FullRecompute()


@pytest.mark.parametrize("framework", data_files.list_names("model_recipes"))
def test_the_table_names_what_exists(framework: str) -> None:
    """Every recipe is of a listed version, a packaged model and a known accelerator, and none is ambiguous."""
    recipes, seen = table(framework), set[tuple[Any, ...]]()
    for version, recipe in product(recipes.versions, {recipe.recipe for recipe in recipes.recipes}):
        load_framework(framework, version, recipe)
    assert set(recipes.models) <= set(code_presets())
    for recipe in recipes.recipes:
        assert recipe.model in recipes.models
        assert set(recipe.accelerators) <= set(data_files.list_names("accelerators"))
        assert set(recipe.versions) <= set(recipes.versions)
        assert recipe.dispatcher in {dispatcher.value for dispatcher in TokenDispatcher}
        if isinstance(recipe.recompute, str):
            assert recipe.recompute in {mode.value for mode in RecomputeMode}
        else:
            assert set(recipe.recompute or ()) <= {module.value for module in RecomputeModule}
        formats, accelerators = recipe.formats or ("any",), recipe.accelerators or ("any",)
        name = (recipe.model, recipe.recipe, recipe.ep)
        keys = {(*name, *key) for key in product(accelerators, formats, recipe.versions)}
        assert not keys & seen
        seen |= keys


OTHER_RECIPES = [
    (("nemo", "performance", "25.04"), DEEPSEEK, "gb200", "bf16", ("alltoall", False, NOTHING, {CORE})),
    (("nemo", "performance", "25.07"), DEEPSEEK, "h100-sxm-80gb", "bf16", ("deepep", False, NOTHING, {UP, MLP})),
    (("nemo", "performance", "25.07"), QWEN_30B, "gb200", "bf16", ("alltoall", False, ALL, set())),
    (("nemo", "performance", "25.02"), "mixtral-8x7b", "b200", "bf16", ("alltoall", False, ALL, set())),
    (("nemo", "performance", "24.12"), "mixtral-8x7b", "h100-sxm-80gb", "bf16", ("alltoall", False, NOTHING, set())),
    (("automodel", "te", "0.4"), DEEPSEEK, "h100-sxm-80gb", "bf16", ("deepep", False, NOTHING, FullRecompute())),
    (("automodel", "te", "0.5"), QWEN_30B, "gb200", "mxfp8", ("hybridep", False, NOTHING, FullRecompute())),
    (("automodel", "torch", "0.2"), DEEPSEEK, "h100-sxm-80gb", "bf16", ("allgather", False, NOTHING, set())),
    (
        ("torchtitan", "train_config", "2025-08-01"),
        DEEPSEEK,
        "b200",
        "bf16",
        ("alltoall", False, NOTHING, FullRecompute()),
    ),
    (
        ("torchtitan", "train_config", "2026-06-16"),
        QWEN_30B,
        "b200",
        "bf16",
        ("alltoall", False, NOTHING, FullRecompute()),
    ),
    (
        ("megatron-bridge", "aws", "26.04.01"),
        QWEN_30B,
        "h100-sxm-80gb",
        "bf16",
        ("deepep", False, NOTHING, FullRecompute()),
    ),
]


@pytest.mark.parametrize(("software", "model", "gpu", "precision", "expected"), OTHER_RECIPES)
def test_other_frameworks_and_scripts_have_recipes(
    software: tuple[str, str, str], model: str, gpu: str, precision: str, expected: tuple[Any, ...]
) -> None:
    framework = dict(zip(("name", "recipe", "version"), software, strict=True))
    data = "zero1" if software[0] in ("nemo", "megatron-bridge") else "fsdp"
    scenario = user_scenario(model, gpu, precision, framework=framework, layout={"data": data})
    found = settings(scenario)
    is_full = isinstance(scenario.training.recompute, FullRecompute)
    assert (found[:3], FullRecompute() if is_full else found[3]) == (expected[:3], expected[3])


def test_capacity_is_of_versions_that_drop_tokens() -> None:
    """NeMo 2.4 drops tokens on Blackwell, where it has no DeepEP; on Hopper it drops none."""
    framework = {"name": "nemo", "recipe": "performance", "version": "25.07"}
    capacities = [
        {moe.capacity_factor for moe in user_scenario(DEEPSEEK, gpu, "bf16", framework=framework).model.distinct_moes}
        for gpu in ("gb200", "h100-sxm-80gb")
    ]
    assert capacities == [{1.0}, {None}]


@pytest.mark.parametrize(("schedule", "overlap"), [("1f1b", False), ({"interleaved": {"chunks": 2}}, True)])
def test_scripts_that_overlap_recompute_nothing_instead(schedule: Any, overlap: bool) -> None:
    """With chunks AWS's scripts overlap dispatch, without delayed weight gradients, in place of recomputation."""
    layout, framework = (
        {"dp": 4, "ep": 4, "pp": 2, "sequence_parallel": False},
        {"recipe": "aws", "version": "26.04.01"},
    )
    scenario = user_scenario(QWEN_30B, "b300", "bf16", layout=layout, framework=framework, schedule=schedule)
    assert scenario.layout.overlap_moe_expert_parallel_comm is overlap
    assert not scenario.layout.delay_wgrad_compute
    assert scenario.training.recompute == (NoRecompute() if overlap else FullRecompute())


@pytest.mark.parametrize(
    ("recipe", "training", "expected"),
    [("performance", {}, Muon), ("performance", {"optimizer": "adam"}, Optimizer), ("library", {}, Optimizer)],
)
def test_benchmarks_of_kimi_k2_update_by_muon(recipe: str, training: dict[str, str], expected: type) -> None:
    """Unless the file says otherwise; the shorthand of a name is a whole statement."""
    scenario = Scenario.from_mapping({
        "model": {"preset": "kimi-k2"},
        "cluster": {"name": "gb300-nvl72", "gpus": 256},
        "layout": {"pp": 4, "ep": 64, "data": "zero1"},
        "training": {"sequence": 4096, "global_batch": 4096, "precision": "mxfp8", **training},
        "framework": {"name": "megatron-bridge", "recipe": recipe},
    })  # fmt: skip
    assert type(scenario.training.optimizer) is expected
