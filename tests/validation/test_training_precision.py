"""Which recipe does a row's word for its number format mean? What its software means by it."""

from typing import Any

import pytest

from clustersim.common.dtypes import LOW_PRECISION_DTYPES, DType
from clustersim.model.overheads import Grouping
from clustersim.scenario import Scenario
from clustersim.validation.case_scenario import is_high_precision_dense, is_high_precision_moe, scenario_mapping
from clustersim.validation.cases import CannotPredictError
from clustersim.validation.steps import LOW_PRECISION_LABEL as NARROW_FORMATS
from clustersim.validation.steps import compare_step, error_groupings
from clustersim.validation.training_precision import is_high_precision, is_low_precision
from tests.validation.sample_cases import step_case

HOPPER = {"gpu": "h100-sxm-80gb", "interconnect": "nvlink4 + 8x400G-ib-ndr", "year": "2025"}
BLACKWELL = HOPPER | {"gpu": "b200", "interconnect": "nvlink5 + 8x400G-ib-ndr"}
FSDP_ONLY = {"tp": "1", "pp": "1", "dp": "8", "zero_stage": "3", "schedule": ""}
ZERO1 = {"zero_stage": "1"}
NEMO, BRIDGE = "nemo (megatron-core)", "megatron-bridge (megatron-core)"
RELEASED = {"framework": NEMO, "precision": "fp8", "locator": "NVIDIA/dgxc-benchmarking v25.10 nemotron4/README.md"}
QWEN = {
    **{"layers": "48", "hidden": "2048", "heads": "32", "kv_heads": "4", "head_dim": "128", "vocab": "151936"},
    **{"experts": "128", "top_k": "8", "moe_ffn_hidden": "768", "ffn_hidden": "6144", "mlp": "swiglu", "ep": "8"},
    **{"seq": "4096", "global_batch": "512", "micro_batch": "4", "framework": BRIDGE, "zero_stage": "1"},
}
DEFAULTS = "inferred: recipe defaults; forced balanced routing"


def mapped_precision(**cells: str) -> dict[str, Any]:
    mapping = scenario_mapping(step_case(**cells))["training"]["precision"]
    assert isinstance(mapping, dict)
    return mapping


@pytest.mark.parametrize(
    ("cells", "formats"),
    [
        ({"framework": "megatron-lm", "precision": "fp8"}, {"compute": "fp8", "gradients": "fp32"}),
        (
            {"framework": "megatron-lm", "precision": "fp8 (tensorwise)", "notes": "fp8-param-gather"},
            {"compute": "fp8-current", "stored": "fp8", "gradients": "fp32"},
        ),
        ({"framework": NEMO, "precision": "fp8"}, {"compute": "fp8", "stored": "fp8", "gradients": "bf16"}),
        (RELEASED, {"compute": "fp8-current", "stored": "fp8", "gradients": "bf16"}),
        (
            {**RELEASED, "locator": "NVIDIA/dgxc-benchmarking v25.05 nemotron4/README.md"},
            {"compute": "fp8", "stored": "fp8", "gradients": "bf16"},
        ),
        ({"framework": BRIDGE, "precision": "fp8"}, {"compute": "fp8-current", "stored": "fp8", "gradients": "bf16"}),
        (
            {"framework": "megatron-lm (megatron-core dev)", "precision": "fp8"},
            {"compute": "fp8-blockwise", "stored": "fp8-blockwise", "moments": "bf16", "gradients": "fp32"},
        ),
        (
            {**FSDP_ONLY, "framework": "composer + pytorch fsdp", "precision": "fp8", "year": "2023"},
            {"compute": "fp8", "gradients": "bf16"},
        ),
        (
            {**FSDP_ONLY, "framework": "torchtitan", "precision": "fp8-mixed"},
            {"compute": "fp8-tensorwise", "gathered": "fp8", "gradients": "fp32"},
        ),
        (
            {**FSDP_ONLY, "framework": "torchtitan", "precision": "fp8-rowwise"},
            {"compute": "fp8-rowwise", "gradients": "fp32"},
        ),
        (
            {**FSDP_ONLY, "framework": "torchtitan", "precision": "fp8-tensorwise", "notes": "with float8 all-gather"},
            {"compute": "fp8-tensorwise", "gathered": "fp8", "gradients": "fp32"},
        ),
        (
            {**FSDP_ONLY, **BLACKWELL, "framework": "torchtitan", "precision": "mxfp8"},
            {"compute": "mxfp8-torchao", "gradients": "fp32"},
        ),
        (
            {
                **{**FSDP_ONLY, **BLACKWELL, "framework": "torchtitan", "precision": "nvfp4"},
                "notes": "layers 0 to 2 NVFP4, 3 to 3 bf16; commit of 2026-08-06",
            },
            {"compute": "nvfp4-torchao", "num_layers_at_end_in_bf16": 1, "gradients": "fp32"},
        ),
    ],
)
def test_precision_labels_follow_the_framework(cells: dict[str, str], formats: dict[str, str | int]) -> None:
    """And what it says is legal in a scenario file."""
    gradients = {"gradients": formats["gradients"]}
    recipe = Scenario.from_mapping(scenario_mapping(step_case(**{**HOPPER, **cells}))).training.recipe
    assert mapped_precision(**{**HOPPER, **cells}) | gradients == formats
    assert recipe.weight_formats.gradients.value == formats["gradients"]
    assert recipe.name == formats["compute"]
    assert recipe.matmul_formats.forward in LOW_PRECISION_DTYPES


def test_parameters_in_mxfp8_are_gathered_in_bf16() -> None:
    mapping = mapped_precision(**{**BLACKWELL, "framework": BRIDGE, "precision": "mxfp8"})
    assert mapping == {"compute": "mxfp8", "stored": "mxfp8", "gathered": "bf16"}


@pytest.mark.parametrize("word", ["fp8", "fp8-mixed", "fp4", "", "int8"])
def test_an_ambiguous_precision_is_not_predicted(word: str) -> None:
    row = step_case(**{**HOPPER, "framework": "in-house", "precision": word})
    compared = compare_step(row)
    assert compared.predicted is None
    assert compared.is_expressible is False
    assert "of in-house: which recipe it is, is not stated" in (compared.skip_reason or "")
    with pytest.raises(CannotPredictError):
        scenario_mapping(row)


@pytest.mark.parametrize(("word", "pipelined"), [("fp8", True), ("mxfp8", True), ("nvfp4", False)])
def test_recipes_of_llama_pipeline_tensor_parallel_collectives_but_in_nvfp4(word: str, pipelined: bool) -> None:
    layout = scenario_mapping(step_case(**{**BLACKWELL, "framework": BRIDGE, "precision": word}))["layout"]
    assert layout["tp_comm_overlap"] is pipelined


def test_an_unchanged_recipe_has_its_settings() -> None:
    """Hybrid-EP beside compute and a captured iteration, where the row is in MXFP8 and on Blackwell."""
    cells = {**BLACKWELL, **FSDP_ONLY, **QWEN, "gpu": "gb200", "interconnect": "nvl72", "notes": DEFAULTS}
    unchanged, plain = (
        Scenario.from_mapping(scenario_mapping(step_case(**{**cells, "precision": "mxfp8", "notes": notes})))
        for notes in (DEFAULTS, "forced balanced routing")
    )
    assert (unchanged.layout.dispatcher.value, unchanged.framework.graph_capture.value) == ("hybridep", "all")
    assert unchanged.layout.overlap_moe_expert_parallel_comm and unchanged.layout.delay_wgrad_compute
    assert (plain.layout.dispatcher.value, plain.framework.graph_capture.value) == ("alltoall", "nothing")


@pytest.mark.parametrize(("word", "narrow"), [("bf16", False), ("fp16", False), ("fp8", True), ("nvfp4", True)])
def test_low_precision_runs_are_separate_sources(word: str, narrow: bool) -> None:
    """So that means of others do not change as there are more of them."""
    row = step_case(precision=word)
    assert (is_low_precision(row), is_high_precision(row)) == (narrow, not narrow)
    assert is_high_precision_dense(row) is not narrow
    assert not is_high_precision_moe(row)
    assert error_groupings(row)["format"] == word
    assert error_groupings(row)["layers"].endswith(NARROW_FORMATS) is narrow
    assert compare_step(row).source == ("nobody" if not narrow else f"nobody, {NARROW_FORMATS}")


RECIPE_OF = "recipe QWEN3_30B_A3B_PRETRAIN_CONFIG @ v0.5.0: cuda_graph_impl=full_iteration, moe_a2a_overlap=True"


@pytest.mark.parametrize("notes", [DEFAULTS, RECIPE_OF])
def test_recipes_that_capture_all_fuse_experts_and_attend_in_mxfp8(notes: str) -> None:
    row = step_case(**{**QWEN, **FSDP_ONLY, **BLACKWELL, **ZERO1, "precision": "mxfp8", "notes": notes})
    training = Scenario.from_mapping(scenario_mapping(row)).training
    assert training.recipe.attention is DType.MXFP8
    assert training.grouping is Grouping.FUSED


@pytest.mark.parametrize(
    "cells",
    [
        {"precision": "mxfp8", "notes": "recipe X @ v0.4.0: cuda_graph_impl=transformer_engine"},
        {"precision": "bf16", "notes": RECIPE_OF},
        {"precision": "fp8", "notes": RECIPE_OF, **HOPPER},
    ],
)
def test_other_recipes_do_neither(cells: dict[str, str]) -> None:
    row = step_case(**{**QWEN, **FSDP_ONLY, **BLACKWELL, **ZERO1, **cells})
    training = Scenario.from_mapping(scenario_mapping(row)).training
    assert training.recipe.attention is None
    assert training.grouping is Grouping.STREAMS
