"""Which mixture of experts is a row, and where are its experts?"""

from typing import Any

import numpy as np
import pytest

from clustersim.common.dtypes import DType
from clustersim.model.attention_spec import LatentAttention
from clustersim.model.layer_stack import DenseMlp, MoeMlp, layer_specs
from clustersim.model.moe_expert_load import RandomExpertLoad
from clustersim.scenario import Scenario
from clustersim.validation.case_scenario import scenario_mapping
from clustersim.validation.cases import CannotPredictError, ValidationCase
from clustersim.validation.moe_settings import matching_preset
from clustersim.validation.steps import read_steps
from tests.validation.sample_cases import step_case

EIGHT_GPUS = {"tp": "1", "pp": "1", "dp": "8", "schedule": "", "mlp": "swiglu", "zero_stage": "1", "ep": "8"}
SMALL_MOE = {**EIGHT_GPUS, "experts": "16", "top_k": "4", "moe_ffn_hidden": "512", "shared_experts": "2"}
GPT_OSS = {
    **EIGHT_GPUS,
    **{"layers": "36", "hidden": "2880", "ffn_hidden": "2880", "heads": "64", "kv_heads": "8", "head_dim": "64"},
    **{"vocab": "201088", "experts": "128", "top_k": "4", "moe_ffn_hidden": "2880", "tied_embeddings": "no"},
}
DEEPSEEK = {
    **EIGHT_GPUS,
    **{"layers": "4", "hidden": "7168", "ffn_hidden": "18432", "heads": "128", "kv_heads": "128", "head_dim": "128"},
    **{"vocab": "129280", "experts": "256", "top_k": "8", "moe_ffn_hidden": "2048", "shared_experts": "1"},
}
MOONLIGHT = {
    **EIGHT_GPUS,
    **{"layers": "27", "hidden": "2048", "ffn_hidden": "11264", "heads": "16", "kv_heads": "16", "head_dim": "128"},
    **{"vocab": "163840", "experts": "64", "top_k": "6", "moe_ffn_hidden": "1408", "shared_experts": "2"},
    **{"tied_embeddings": "no", "year": "2026"},
}
QWEN = {
    **EIGHT_GPUS,
    **{"layers": "48", "hidden": "2048", "ffn_hidden": "6144", "heads": "32", "kv_heads": "4", "head_dim": "128"},
    **{"vocab": "151936", "experts": "128", "top_k": "8", "moe_ffn_hidden": "768", "shared_experts": "0"},
    **{"tied_embeddings": "no", "year": "2026"},
}
FUSED_KERNELS = {"permute_unfused": False, "router_unfused": False, "indices_unfused": False}


def case_to_scenario(row: ValidationCase) -> Scenario:
    return Scenario.from_mapping(scenario_mapping(row))


def test_columns_alone_define_an_moe_in_every_layer() -> None:
    model = case_to_scenario(step_case(**SMALL_MOE)).model
    (routed,) = model.distinct_moes
    assert (routed.experts, routed.top_k, routed.ffn, routed.shared) == (16, 4, 512, 2 * 512)
    assert not model.distinct_dense_mlps


def test_experts_chosen_freely_load_the_ranks_unevenly() -> None:
    """The four experts of a rank vary by 0.4 together: the mean of 4 independent loads, by half of what each does."""
    free = {"notes": "inferred: experts chosen freely in the first 100 steps", **SMALL_MOE, "ep": "4"}
    load = case_to_scenario(step_case(**free)).training.expert_load
    assert isinstance(load, RandomExpertLoad)
    shares = np.array([load.expert_shares(16, layer, 0).reshape(4, 4).sum(axis=1) for layer in range(500)])
    assert float(shares.std() / shares.mean()) == pytest.approx(0.4, rel=0.15)
    assert case_to_scenario(step_case(**SMALL_MOE)).training.expert_load is None


def test_expert_width_defaults_to_the_mlp() -> None:
    (routed,) = case_to_scenario(
        step_case(**{**SMALL_MOE, "moe_ffn_hidden": "", "shared_experts": ""})
    ).model.distinct_moes
    assert (routed.ffn, routed.shared) == (4096, 0)


@pytest.mark.parametrize(
    ("notes", "dense"), [("first 1 layer dense", 1), ("first 3 layer(s) dense; dense_layers=2", 2), ("", 0)]
)
def test_notes_set_the_number_of_dense_layers(notes: str, dense: int) -> None:
    """Of a cut model `dense_layers` counts, and not what the whole one has."""
    layers = layer_specs(case_to_scenario(step_case(**SMALL_MOE, notes=notes)).model.stack)
    assert [isinstance(spec.mlp, DenseMlp) for spec in layers] == [layer < dense for layer in range(4)]


def test_a_public_moe_has_settings_beyond_the_columns() -> None:
    """gpt-oss: every second layer has a window, experts have biases."""
    public_case = step_case(**GPT_OSS)
    assert matching_preset(public_case) == "gpt-oss-120b"
    model = case_to_scenario(public_case).model
    assert {distinct_attention.window for distinct_attention in model.distinct_attentions} == {128, None}
    assert all(distinct_moe.bias for distinct_moe in model.distinct_moes)


def test_a_shortened_public_moe_keeps_its_attention() -> None:
    model = case_to_scenario(step_case(**DEEPSEEK, notes="dense_layers=1")).model
    assert all(isinstance(distinct_attention, LatentAttention) for distinct_attention in model.distinct_attentions)
    assert [isinstance(spec.mlp, MoeMlp) for spec in layer_specs(model.stack)] == [False, True, True, True]


@pytest.mark.parametrize(
    "change",
    [
        {"hidden": "3072"},
        {"experts": "64"},
        {"top_k": "8"},
        {"kv_heads": "4"},
        {"tied_embeddings": "yes"},
        {"layers": "37"},
        {"shared_experts": "1"},
    ],
)
def test_other_dimensions_are_no_public_moe(change: dict[str, str]) -> None:
    assert matching_preset(step_case(**{**GPT_OSS, **change})) is None


@pytest.mark.parametrize(
    ("cells", "layout"),
    [
        ({}, {"ep": 8, "dispatcher": "alltoall", "etp": 1}),
        ({"notes": "DeepEP, ETP1, rounded"}, {"ep": 8, "dispatcher": "deepep", "etp": 1}),
        ({"notes": "padding; ETP=4; top-2"}, {"ep": 8, "dispatcher": "alltoall", "etp": 4}),
        ({"notes": "moe_flex_dispatcher_backend=hybridep"}, {"ep": 8, "dispatcher": "hybridep", "etp": 1}),
        ({"notes": "NCCL all-to-all, EP8 in node"}, {"ep": 8, "dispatcher": "alltoall", "etp": 1}),
        ({"framework": "megatron-bridge (megatron-core)"}, {"ep": 8, "dispatcher": "alltoall", "etp": 1}),
        ({"framework": "megatron-lm (megatron-core dev)"}, {"ep": 8, "dispatcher": "alltoall", "etp": 1}),
    ],
)
def test_notes_and_framework_set_the_expert_layout(cells: dict[str, str], layout: dict[str, Any]) -> None:
    mapping = scenario_mapping(step_case(**{**SMALL_MOE, **cells}))["layout"]
    assert {key: mapping[key] for key in ("ep", "etp", "dispatcher") if key in mapping} == layout


def test_modules_are_recomputed_by_name() -> None:
    recompute = scenario_mapping(step_case(**SMALL_MOE, recompute="modules:layernorm+moe_act"))["training"]["recompute"]
    assert recompute == {"modules": ["layernorm", "moe_act"]}


@pytest.mark.parametrize(
    ("cells", "split"),
    [
        ({"framework": "megatron-lm (megatron-core dev)", "layers": "6"}, [1, 2, 2, 1]),
        ({"framework": "megatron-lm (megatron-core dev)", "layers": "8"}, None),
        ({"framework": "megatron-lm", "layers": "6"}, None),
        ({"notes": "layout Et|(tt|)*2tL, overlap", "layers": "6"}, "Et|(tt|)*2tL"),
        ({"notes": "recipe X @ v0.5.1: pp_layout=Et|(tt|)*2tL", "layers": "6"}, "Et|(tt|)*2tL"),
    ],
)
def test_embedding_and_head_count_as_layers_where_the_framework_does(cells: dict[str, str], split: Any) -> None:
    stages = {"pp": "4", "dp": "2", "ep": "2", "schedule": "1f1b"}
    layers_per_stage = scenario_mapping(step_case(**{**SMALL_MOE, **stages, **cells}))["layout"].get("layers_per_stage")
    assert layers_per_stage == split


@pytest.mark.parametrize(
    ("notes", "mtp_layers"),
    [
        ("MTP 1 layer, layout Et|(tt|)*30mL", 1),
        ("num-experts 8; mtp-num-layers 2; moe-grouped-gemm True", 2),
        ("recipe X @ v0.5.1: pp_layout=Et*4|(t*4|)*14tmL", 1),
        ("no MTP in the layout Et|(tt|)*30L", None),
        ("", None),
    ],
)
def test_notes_set_the_number_of_mtp_layers(notes: str, mtp_layers: int | None) -> None:
    assert scenario_mapping(step_case(**{**SMALL_MOE, "notes": notes}))["model"].get("mtp_layers") == mtp_layers


def test_recipes_of_some_models_balance_the_load_of_experts() -> None:
    (row,) = (
        read_step
        for read_step in read_steps()
        if read_step.text("case_id").startswith("card-deepseek-v3-pretrain_perf")
    )
    scenario = Scenario.from_mapping(scenario_mapping(row))
    assert scenario.training.overheads.router_loss
    assert scenario.model.mtp_layers == 1
    assert "overheads" not in scenario_mapping(step_case(**SMALL_MOE))["training"]


BRIDGE = "megatron-bridge (megatron-core)"


@pytest.mark.parametrize(
    ("cells", "overheads"),
    [
        ({**QWEN, "framework": "megatron-lm (megatron-core dev)"}, {"router_loss": True, **FUSED_KERNELS}),
        ({**QWEN, "framework": "megatron-lm"}, {}),
        ({**QWEN, "framework": BRIDGE, "notes": "SFT, permute fusion off"}, {"permute_unfused": True}),
        ({**QWEN, "framework": BRIDGE, "notes": "HybridEP"}, {}),
    ],
)
def test_recipes_say_how_experts_are_chosen_and_tokens_copied(cells: dict[str, str], overheads: dict[str, Any]) -> None:
    assert scenario_mapping(step_case(**cells))["training"].get("overheads", {}) == overheads


@pytest.mark.parametrize(("cells", "has_loss"), [(QWEN, True), (MOONLIGHT, True), (GPT_OSS, False)])
def test_routers_of_a_recipe_have_the_loss_of_its_model(cells: dict[str, str], has_loss: bool) -> None:
    scenario = Scenario.from_mapping(scenario_mapping(step_case(**{**cells, "framework": BRIDGE})))
    assert scenario.training.overheads.router_loss is has_loss


@pytest.mark.parametrize(
    ("cells", "gradients", "moments", "overlaps_shared_experts"),
    [
        (MOONLIGHT, DType.BF16, DType.BF16, True),
        ({**MOONLIGHT, "notes": "DeepEP"}, DType.BF16, DType.BF16, False),
        (QWEN, DType.BF16, DType.FP32, False),
        ({**QWEN, "notes": "library recipe; bf16 moments"}, DType.FP32, DType.BF16, False),
    ],
)
def test_moe_recipes_use_fewer_fp32_states(
    cells: dict[str, str], gradients: DType, moments: DType, overlaps_shared_experts: bool
) -> None:
    """Performance recipes reduce gradients in BF16, the library's only those of some models."""
    scenario = Scenario.from_mapping(scenario_mapping(step_case(**{**cells, "framework": BRIDGE})))
    formats = scenario.training.recipe.weight_formats
    assert (formats.gradients, formats.moments) == (gradients, moments)
    assert scenario.layout.moe_shared_expert_overlap is overlaps_shared_experts


def test_of_models_with_the_same_layers_it_is_that_with_the_nearest_vocabulary() -> None:
    assert matching_preset(step_case(**MOONLIGHT)) == "moonlight-16b-a3b"
    assert matching_preset(step_case(**{**MOONLIGHT, "vocab": "102400"})) == "deepseek-v2-lite"


def test_experts_across_ranks_need_experts() -> None:
    with pytest.raises(CannotPredictError, match="without experts"):
        scenario_mapping(step_case(**EIGHT_GPUS))


def test_an_moe_without_top_k_is_not_predicted() -> None:
    with pytest.raises(CannotPredictError, match="top_k is not stated"):
        scenario_mapping(step_case(**{**SMALL_MOE, "top_k": ""}))


SCOPES = "cuda_graph_impl=transformer_engine, cuda_graph_scope="


@pytest.mark.parametrize(
    ("notes", "captured"),
    [
        (f"{SCOPES}['attn', 'moe_router', 'moe_preprocess']", "outside_experts"),
        ("HybridEP, CUDA graphs attn+router+preprocess", "outside_experts"),
        (f"{SCOPES}['moe_router', 'moe_preprocess']", False),
        ("CUDA graphs router+preprocess", False),
        ("cuda_graph_impl=full_iteration", True),
        ("cuda_graph_impl=none", False),
    ],
)
def test_notes_set_the_cuda_graph_scope(notes: str, captured: bool | str) -> None:
    assert (
        scenario_mapping(step_case(**{**SMALL_MOE, "notes": notes}))["framework"].get("cuda_graphs", False) == captured
    )


@pytest.mark.parametrize(("gpu", "captured"), [("gb200", True), ("h100-sxm-80gb", False)])
def test_recipes_of_padded_experts_capture_passes_on_blackwell(gpu: str, captured: bool) -> None:
    nemo = {"framework": "nemo (megatron-core)", "year": "2025", "gpu": gpu, "gpus_per_node": "4"}
    assert scenario_mapping(step_case(**SMALL_MOE, **nemo))["framework"].get("cuda_graphs", False) == captured
    assert not scenario_mapping(step_case(**{**EIGHT_GPUS, "ep": "1"}, **nemo))["framework"].get("cuda_graphs", False)


def test_moe_models_have_their_own_launch_times() -> None:
    mixed, dense = (case_to_scenario(step_case(**cells)) for cells in (SMALL_MOE, {**EIGHT_GPUS, "ep": "1"}))
    assert mixed.framework.name == dense.framework.name
    unbound = max(mixed.cluster.accelerator.unbound_launch_ratios)
    assert mixed.framework == dense.framework.with_moe_launches(unbound) != dense.framework


def test_a_slow_host_is_slow_for_models_with_experts() -> None:
    grace = case_to_scenario(step_case(**{**SMALL_MOE, "gpu": "gb200", "gpus_per_node": "4", "interconnect": "nvl72"}))
    assert grace.cluster.accelerator.host_launch_ratio > 1.0
    server = case_to_scenario(step_case(**SMALL_MOE))
    unbound, server_unbound = (max(case.cluster.accelerator.unbound_launch_ratios) for case in (grace, server))
    assert grace.framework.launch_seconds / unbound == pytest.approx(
        grace.cluster.accelerator.host_launch_ratio * server.framework.launch_seconds / server_unbound
    )


@pytest.mark.parametrize(
    ("notes", "capacity"),
    [
        ("MoE with capacity factor 1.0 and padding; top-2", 1.0),
        ("token drop, capacity factor 1.25, padded", 1.25),
        ("capacity factor 2 without it", None),
        ("dropless", None),
    ],
)
def test_experts_that_are_padded_to_a_capacity_have_it(notes: str, capacity: float | None) -> None:
    for cells in (SMALL_MOE, QWEN):
        (routed,) = case_to_scenario(step_case(**{**cells, "notes": notes})).model.distinct_moes
        assert routed.capacity_factor == capacity


@pytest.mark.parametrize(
    ("notes", "overlap"),
    [
        ("dispatcher nccl-alltoall, 1F1B all-to-all overlap on; ETP1", True),
        ("dispatcher deepep-uccl, 1F1B all-to-all overlap off; ETP1", False),
        ("HybridEP, EP overlap", True),
        ("DeepEP, A2A overlap, CUDA graphs router+preprocess", True),
        ("A2A overlap off", False),
        ("expert-parallel communication overlap on", True),
        ("moe_flex_dispatcher_backend=hybridep, moe_a2a_overlap=True", True),
        ("moe_a2a_overlap=False", False),
        ("", False),
    ],
)
def test_notes_say_whether_dispatch_overlaps(notes: str, overlap: bool) -> None:
    layout = scenario_mapping(step_case(**{**QWEN, "notes": notes}))["layout"]
    assert layout.get("overlap_moe_expert_parallel_comm", False) is overlap
    assert layout.get("delay_wgrad_compute", False) is ("moe_a2a_overlap=True" in notes)


@pytest.mark.parametrize(
    ("notes", "overlap"),
    [("", True), ("all-to-all overlap on", False), ("all-to-all overlap off, shared-expert overlap off", False)],
)
def test_shared_experts_overlap_only_where_nothing_else_does(notes: str, overlap: bool) -> None:
    """Megatron rejects it together with overlapped dispatch (megatron/core/transformer/transformer_config.py)."""
    cells = {**DEEPSEEK, "framework": "megatron-bridge", "notes": f"first 3 layers dense; {notes}", "year": "2026"}
    assert scenario_mapping(step_case(**cells))["layout"].get("moe_shared_expert_overlap", False) is overlap


def test_only_models_of_equal_layers_may_have_more_than_their_preset() -> None:
    """Chunks of a pipeline are equal when a benchmark pads 94 layers to 96; DeepSeek's first ones are others."""
    assert matching_preset(step_case(**{**QWEN, "layers": "52"})) == "qwen3-30b-a3b"
    assert case_to_scenario(step_case(**{**QWEN, "layers": "52"})).model.layer_count == 52
    assert matching_preset(step_case(**{**DEEPSEEK, "layers": "64"})) is None


@pytest.mark.parametrize(
    ("notes", "is_unfused"), [("", False), ("SFT", True), ("EFA; library recipe @ v0.4.2", True), ("recipe", False)]
)
def test_library_recipes_do_not_fuse_the_router(notes: str, is_unfused: bool) -> None:
    training = case_to_scenario(step_case(**{**QWEN, "framework": BRIDGE, "notes": notes})).training
    assert training.overheads.router_unfused is is_unfused
