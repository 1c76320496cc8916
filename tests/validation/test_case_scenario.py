"""Which scenario is a row? What a row says of sharding is said by the layout."""

from typing import Any

import pytest

from clustersim.common.errors import InputError
from clustersim.model.attention_spec import FullAttention
from clustersim.model.framework_files import load_framework
from clustersim.model.training import FusedKernel, LossImplementation
from clustersim.parallel.data_parallel_strategy import (
    DataParallelStrategy,
    DdpStrategy,
    FullyShard,
    ReductionFrequency,
    Zero1,
    Zero2,
)
from clustersim.scenario import Scenario
from clustersim.schedules import registry
from clustersim.validation.case_scenario import scenario_mapping
from clustersim.validation.cases import CannotPredictError
from clustersim.validation.cluster_lookup import cluster_config
from clustersim.validation.steps import build_scenario
from tests.validation.sample_cases import step_case

DP_ONLY = {"tp": "1", "pp": "1", "dp": "8", "cp": "1", "schedule": ""}


@pytest.mark.parametrize(
    ("cells", "data"),
    [
        ({"zero_stage": "3"}, FullyShard()),
        ({"zero_stage": "3", "hsdp_replicas": "1"}, FullyShard()),
        ({"zero_stage": "3", "hsdp_replicas": "2"}, FullyShard(shard=4)),
        ({"zero_stage": "3", "hsdp_replicas": "2", "framework": "torchtitan"}, FullyShard(copies=True, shard=4)),
        ({"zero_stage": "1", "hsdp_replicas": "4"}, Zero1(overlap=False, shard=2)),
        (
            {"zero_stage": "1", "overlap_grad_reduce": "yes", "overlap_param_gather": "yes"},
            Zero1(overlap_param_gather=True),
        ),
        ({"zero_stage": "1", "overlap_grad_reduce": "yes", "overlap_param_gather": "no"}, Zero1()),
        (
            {"zero_stage": "3", "framework": "torchtitan", "notes": "graph trainer; SimpleFSDP without bucketing"},
            FullyShard(overlap=False, single_parameters=True),
        ),
        ({"zero_stage": "2", "framework": "deepspeed"}, Zero2(overlap=False, bucket=1e9)),
        ({"zero_stage": "3", "framework": "deepspeed"}, FullyShard(copies=True)),
        ({"zero_stage": "0"}, DdpStrategy(overlap=False, bucket=None)),
    ],
)
def test_sharding_columns_set_the_strategy(cells: dict[str, str], data: DataParallelStrategy) -> None:
    """Buckets are of Megatron-LM's size (None) in its runs; what a row does not state is as its software does it."""
    layout = build_scenario(step_case(**DP_ONLY, year="2024", **cells)).layout
    assert layout.data == data
    assert layout.world_size == 8


@pytest.mark.parametrize(("gpu", "network", "ports"), [("b300", "6400G", 8), ("gb300", "3200G", 4)])
def test_blackwell_ultra_has_its_own_clusters(gpu: str, network: str, ports: int) -> None:
    """Its ports have 800 Gbit/s, twice those of its elder; a row with a node's sum means as many of them."""
    joined = f"nvlink5 + {network}-ib-xdr"
    scenario = Scenario.from_mapping(scenario_mapping(step_case(**DP_ONLY, gpu=gpu, interconnect=joined)))
    assert scenario.cluster.name.startswith((gpu, f"hgx-{gpu}"))
    assert not [warning for warning in scenario.warnings if "stands in" in warning]
    nic = scenario_mapping(step_case(**DP_ONLY, gpu=gpu, interconnect=joined))["cluster"]["node"]["nic"]
    assert (nic["per_node"], nic["bandwidth"]) == (ports, "100000000000.0 B/s")


@pytest.mark.parametrize(
    ("gpu", "interconnect", "node_gpus", "port"),
    [
        ("gh200-96gb", "nvlink4 + 4x200G-slingshot", 4, 25e9),
        ("gh200-96gb-660w", "nvlink4 + 4x200G-slingshot", 4, 25e9),
        ("a800-sxm-80gb", "nvlink3-400GB/s + unknown", 8, 25e9),
    ],
)
def test_gh200_and_a800_have_their_own_clusters(gpu: str, interconnect: str, node_gpus: int, port: float) -> None:
    """200 Gbit/s per GPU in both; NVLink of an A800 has 200 GB/s in each direction."""
    cells = {"gpu": gpu, "gpus_per_node": str(node_gpus), "interconnect": interconnect}
    cluster = Scenario.from_mapping(scenario_mapping(step_case(**DP_ONLY, **cells))).cluster
    assert cluster.accelerator.name == gpu
    assert cluster.gpus_per_node == node_gpus
    total = cluster_config(step_case(**cells | {"interconnect": f"{node_gpus * 200}G"}))
    assert total["node"]["nic"] == {"per_node": node_gpus, "bandwidth": f"{port!r} B/s"}


@pytest.mark.parametrize("gpu", ["a100-sxm-80gb", "h100-sxm-80gb", "h200-sxm-141gb"])
def test_nodes_of_four_gpus_have_links_between_all_pairs(gpu: str) -> None:
    """A pair has a third of a GPU's NVLinks, two nodes of 8 GPUs have what their switch gives."""
    rows = (step_case(**DP_ONLY, gpu=gpu, gpus_per_node=per_node) for per_node in ("4", "8"))
    board, switched = (Scenario.from_mapping(scenario_mapping(row)).cluster for row in rows)
    assert (board.gpus_per_node, switched.gpus_per_node) == (4, 8)
    assert board.fabric.node.nvlink.direct_links is not None
    assert switched.fabric.node.nvlink.direct_links is None


def test_weights_are_sharded_over_cp_ranks_too() -> None:
    cells = {**DP_ONLY, "dp": "4", "cp": "2", "hsdp_replicas": "2", "zero_stage": "3"}
    assert scenario_mapping(step_case(**cells))["layout"]["data"]["hsdp"]["shard"] == 4


def test_replicas_that_do_not_divide_are_no_prediction() -> None:
    with pytest.raises(CannotPredictError, match="hsdp_replicas 3 does not divide dp x cp 8"):
        scenario_mapping(step_case(**DP_ONLY, zero_stage="3", hsdp_replicas="3"))


@pytest.mark.parametrize("name", registry.SCHEDULE_NAMES)
def test_schedules_of_rows_are_registered(name: str) -> None:
    chunks = 2 if name in registry.CHUNKED_SCHEDULES else None
    scenario = Scenario.from_mapping(scenario_mapping(step_case(schedule=name, vpp="2", pp="4", dp="1", layers="8")))
    assert scenario.schedule == registry.build_schedule(name, chunks)


def test_a_run_whose_layout_nobody_states_is_not_predicted() -> None:
    """Any layout would be a guess, and its error would say nothing; other unknowns are inferred."""
    with pytest.raises(CannotPredictError, match="degrees of parallelism are not stated"):
        scenario_mapping(step_case(notes="unknown: batch (16 assumed), layout (TP/PP not in the file)"))
    assert scenario_mapping(step_case(notes="unknown: batch (16 assumed)"))


def test_another_schedule_is_not_modelled() -> None:
    with pytest.raises(CannotPredictError, match="schedule chimera is not modelled"):
        scenario_mapping(step_case(schedule="chimera"))


@pytest.mark.parametrize(
    ("notes", "offload"),
    [
        ("", None),
        ("optimizer offloading on", {"optimizer": True, "update": "sequential"}),
        (
            "activation offloading on; optimizer offloading on",
            {"activations": "all", "optimizer": True, "update": "sequential"},
        ),
    ],
)
def test_notes_set_the_offloading(notes: str, offload: dict[str, Any] | None) -> None:
    training = scenario_mapping(step_case(**DP_ONLY, zero_stage="3", notes=f"inferred: batch; {notes}"))["training"]
    assert training.get("offload") == offload


@pytest.mark.parametrize("gpu", ["mi300x", "mi325x", "mi355x"])
def test_a_row_may_be_of_amds_machines(gpu: str) -> None:
    scenario = Scenario.from_mapping(scenario_mapping(step_case(**DP_ONLY, gpu=gpu, interconnect="xgmi")))
    assert scenario.cluster.name.startswith(gpu)


@pytest.mark.parametrize(("year", "attention"), [("2022", "standard"), ("2023", "flash2"), ("2024", "flash")])
def test_nemo_attention_depends_on_the_year(year: str, attention: str) -> None:
    """Megatron-LM's unfused attention, then FlashAttention-2, then cuDNN's of Hopper."""
    for stated in ("", "flash") if attention != "standard" else ("",):
        scenario = build_scenario(step_case(**DP_ONLY, framework="NeMo", year=year, attention=stated))
        assert scenario.training.attention.value == attention


@pytest.mark.parametrize(
    ("cells", "split"),
    [
        ({"layers_per_stage": "3 1"}, [3, 1]),
        ({"layers_per_stage": "1 3", "notes": "embedding and head each take a layer slot"}, [1, 3]),
        ({"layers": "6", "notes": "embedding and head each take a layer slot"}, [3, 3]),
        ({}, None),
    ],
)
def test_layers_per_stage_follow_the_row(cells: dict[str, str], split: list[int] | None) -> None:
    """What a row states in its column goes before what its notes say of embedding and head."""
    layout = scenario_mapping(step_case(**cells))["layout"]
    assert layout.get("layers_per_stage") == split
    assert Scenario.from_mapping(scenario_mapping(step_case(**cells))).layout.layers_per_stage == (
        split and tuple(split)
    )


def test_invalid_layers_per_stage_are_rejected() -> None:
    with pytest.raises(InputError, match=r"layout.layers_per_stage.*'two'"):
        Scenario.from_mapping(scenario_mapping(step_case(layers_per_stage="two 2")))


@pytest.mark.parametrize(
    ("framework", "name", "unfused", "backward"),
    [
        ("aleph alpha scaling", "aleph-alpha-scaling", {*FusedKernel}, False),
        ("aleph alpha scaling, fused norms", "aleph-alpha-scaling", set(), False),
        (
            "nanotron",
            "nanotron",
            {FusedKernel.NORM, FusedKernel.ACTIVATION, FusedKernel.RESIDUAL, FusedKernel.SOFTMAX},
            False,
        ),
        ("internevo", "internevo", {FusedKernel.ACTIVATION, FusedKernel.OPTIMIZER}, True),
        ("megatron-llama (megatron-lm)", "megatron-llama", {FusedKernel.ROTARY, FusedKernel.ACTIVATION}, True),
    ],
)
def test_what_in_house_frameworks_leave_out(
    framework: str, name: str, unfused: set[FusedKernel], backward: bool
) -> None:
    """Their code runs unfused elementwise kernels, or waits for every tensor-parallel collective of backward."""
    case = step_case(framework=framework, year="2023")
    scenario = build_scenario(case)
    assert scenario.framework.name == name
    assert {kind for kind in FusedKernel if not scenario.training.fuses(kind)} == unfused
    assert scenario.layout.async_tensor_model_parallel_allreduce is backward


@pytest.mark.parametrize("framework", ["", "in-house", "pith-train"])
def test_nothing_is_said_of_software_that_no_file_describes(framework: str) -> None:
    """It is what a user gets who says nothing: eager PyTorch, unless the row says that it is compiled."""
    case = step_case(**DP_ONLY, framework=framework, attention="flash", precision="bf16")
    mapping = scenario_mapping(case)
    assert "framework" not in mapping
    assert "attention" not in mapping["training"]
    assert not {"fused", "loss", "overheads"} & mapping["training"].keys()
    assert build_scenario(case).framework == load_framework()
    compiled = step_case(**DP_ONLY, framework=framework, precision="bf16", notes="torch.compile")
    assert scenario_mapping(compiled)["framework"] == {"torch_compile": True}


@pytest.mark.parametrize(
    ("framework", "year", "section"),
    [
        ("PyTorch 2.4.1 (DistributedDataParallel)", "2024", {"name": "pytorch", "version": "2.10"}),
        ("PyTorch 2.5.0", "2024", {"name": "pytorch"}),
        ("pytorch (FSDP)", "2026", {"name": "pytorch"}),
    ],
)
def test_hand_written_scripts_have_the_attention_of_their_release(
    framework: str, year: str, section: dict[str, Any]
) -> None:
    """CuDNN's is first in 2.5.0 and behind 2.10."""
    case = step_case(**DP_ONLY, framework=framework, year=year, precision="bf16")
    assert scenario_mapping(case)["framework"] == section


def test_notes_state_autocast_a_compiled_loss_and_a_fused_optimizer() -> None:
    """Behind a compiler one kernel for the optimizer leaves nothing unfused; in eager code it is all that is fused."""
    notes = "fused AdamW; torch.compile; compiled loss; autocast of fp32 weights"
    training = build_scenario(step_case(**DP_ONLY, framework="pytorch", precision="bf16", notes=notes)).training
    assert training.is_fully_fused
    assert training.loss is LossImplementation.COMPILED
    assert training.overheads.autocast
    eager = build_scenario(
        step_case(**DP_ONLY, framework="pytorch", precision="bf16", notes="SXM board; fused AdamW; eager")
    ).training
    assert eager.fused == {FusedKernel.OPTIMIZER}
    assert eager.loss is LossImplementation.TORCH
    assert not eager.overheads.autocast


@pytest.mark.parametrize(
    ("cells", "recipe"),
    [
        ({"notes": ""}, "performance"),
        ({"notes": "library recipe @ v0.4.2"}, "library"),
        ({"notes": "SFT; packed"}, "library"),
        ({"notes": "SFT; packed", "experts": ""}, "performance"),
        ({"notes": "", "model": "Moonlight-16B-A3B"}, "library"),
    ],
)
def test_rows_of_megatron_bridge_name_the_recipe(cells: dict[str, str], recipe: str) -> None:
    experts = {"experts": "8", "top_k": "2", "moe_ffn_hidden": "512"}
    cells = {**DP_ONLY, **experts, "framework": "megatron-bridge (megatron-core)", "year": "2026", **cells}
    assert build_scenario(step_case(**cells)).framework.recipe == recipe


@pytest.mark.parametrize(("gpu", "version", "attention"), [("h200-sxm-141gb", "3", "flash3"), ("b200", "4", "flash4")])
def test_notes_name_liger_kernels_and_the_version_of_flash_attention(gpu: str, version: str, attention: str) -> None:
    notes = f"fused Liger kernels; FlashAttention-{version}"
    case = step_case(**DP_ONLY, framework="deepspeed 0.19 (Hugging Face, Liger)", gpu=gpu, notes=notes)
    training = build_scenario(case).training
    assert (training.attention.value, training.loss.value) == (attention, "liger_fp32_sum")
    assert training.fused == {
        FusedKernel.NORM, FusedKernel.ROTARY, FusedKernel.ACTIVATION, FusedKernel.OPTIMIZER
    }  # fmt: skip


@pytest.mark.parametrize(
    ("year", "notes", "version"),
    [
        ("2024", "FSDP2; commit of 2024-06-12", "2024-06-12"),
        ("2025", "", "2025-07-01"),
        ("2025", "commit of 2025-02-06 (inferred)", "2025-02-06"),
        ("", "", ""),
    ],
)
def test_the_version_of_torchtitan_is_the_date_of_its_commit(year: str, notes: str, version: str) -> None:
    scenario = build_scenario(step_case(**DP_ONLY, framework="torchtitan", year=year, notes=notes))
    assert (scenario.framework.name, scenario.framework.version) == ("torchtitan", version)


@pytest.mark.parametrize(
    ("notes", "is_compiled"),
    [
        ("fsdp+compile", True),
        ("FSDP2 + torch.compile; range 7200 to 7500", True),
        ("compile; batch = local batch 1 per DP rank", True),
        ("vanillaTP; torch.compile", True),
        ("4 GPUs; torch.compile on; symmetric memory off", True),
        ("local batch 2, compile on", True),
        ("asyncTP", True),
        ("", False),
        ("eager", False),
        ("compile off", False),
        ("torch.compile off; FSDP symmetric memory off", False),
        ("float8 dynamic tensorwise WITHOUT torch.compile (casts unfused)", False),
        ("inferred: eager or compiled; eager/compile per doc", False),
        ("of that time, not compiled", False),
        ("graph trainer (whole-graph capture, no inductor)", False),
    ],
)
def test_notes_say_whether_layers_are_compiled(notes: str, is_compiled: bool) -> None:
    """Layers of torchtitan are eager unless the row says otherwise; AsyncTP is a pass of the compiler."""
    scenario = build_scenario(step_case(**DP_ONLY, framework="torchtitan", year="2026", notes=notes))
    assert scenario.framework.compiled is is_compiled
    assert scenario.training.is_fully_fused is is_compiled
    assert scenario.training.early_stop is is_compiled


@pytest.mark.parametrize(
    ("cells", "overlaps"),
    [
        ({"framework": "nemo (megatron-core)", "year": "2024"}, True),
        ({"framework": "nemo (megatron-core)", "year": "2025", "precision": "fp8"}, True),
        ({"framework": "nemo 23.11", "year": "2023"}, False),
        ({"framework": "nemo 24.12", "year": "2024", "lora_rank": "16"}, False),
        ({"framework": "nemo 24.07", "year": "2024", "notes": "tensor-parallel communication overlap off"}, False),
        ({"framework": "nemo 23.11", "year": "2023", "notes": "tensor-parallel communication overlap on"}, True),
        ({"framework": "megatron-lm", "year": "2024"}, False),
        ({"framework": "megatron-bridge", "year": "2026"}, True),
        ({"framework": "megatron-bridge", "year": "2026", "precision": "nvfp4"}, False),
        ({"framework": "torchtitan", "year": "2025", "notes": "asyncTP"}, True),
    ],
)
def test_recipes_overlap_tensor_parallel_collectives(cells: dict[str, str], overlaps: bool) -> None:
    """User buffers of NeMo's recipes since 2024 and of dense recipes of Megatron Bridge; none with adapters."""
    assert scenario_mapping(step_case(**cells))["layout"]["tp_comm_overlap"] is overlaps


@pytest.mark.parametrize(
    ("cells", "overlaps"),
    [
        ({"framework": "megatron-lm", "year": "2024", "schedule": "1f1b"}, False),
        ({"framework": "megatron-lm", "year": "2024", "schedule": "interleaved", "vpp": "2"}, True),
        ({"framework": "megatron-lm", "year": "2022", "schedule": "interleaved", "vpp": "2"}, False),
        ({"framework": "nemo", "year": "2024", "schedule": "1f1b"}, False),
        ({"framework": "megatron-bridge", "year": "2026", "schedule": "interleaved", "vpp": "2"}, True),
        ({"framework": "torchtitan", "year": "2025", "schedule": "1f1b"}, False),
    ],
)
def test_sends_of_interleaved_pipelines_alone_overlap(cells: dict[str, str], overlaps: bool) -> None:
    """In Megatron since October 2023, when its overlap_p2p_comm became the default."""
    assert build_scenario(step_case(**cells)).layout.overlap_p2p_comm is overlaps


@pytest.mark.parametrize(
    ("cells", "overlaps"),
    [
        ({"framework": "megatron-lm"}, False),
        ({"framework": "megatron-lm", "overlap_grad_reduce": "yes"}, True),
        ({"framework": "nemo"}, True),
        ({"framework": "megatron-bridge"}, True),
    ],
)
def test_megatron_reduces_gradients_behind_backward_only_if_told(cells: dict[str, str], overlaps: bool) -> None:
    """--overlap-grad-reduce is off unless given; recipes of NeMo and Megatron Bridge give it."""
    data = build_scenario(step_case(**DP_ONLY, year="2025", zero_stage="1", **cells)).layout.data
    assert isinstance(data, Zero1)
    assert data.overlap is overlaps
    sharded = build_scenario(step_case(**DP_ONLY, year="2025", zero_stage="3", **cells)).layout.data
    assert isinstance(sharded, FullyShard)
    assert sharded.overlap


@pytest.mark.parametrize(("model", "has_norms"), [("Qwen3-32B", True), ("qwen3_8b", True), ("Qwen2.5-7B", False)])
def test_qwen3_normalizes_queries_and_keys(model: str, has_norms: bool) -> None:
    (attention,) = Scenario.from_mapping(scenario_mapping(step_case(**DP_ONLY, model=model))).model.distinct_attentions
    assert isinstance(attention, FullAttention)
    assert (attention.qk_norm is not None) is has_norms


@pytest.mark.parametrize(
    ("notes", "loss", "gradients"),
    [
        ("eager; chunked cross entropy: peak 7.3 GiB less", "chunked", "fp32"),
        ("precision-aware optimizer, bf16 main gradients", "torch", "bf16"),
        ("fp32 gradients", "torch", "fp32"),
        ("", "torch", "fp32"),
    ],
)
def test_notes_set_the_loss_and_the_format_of_gradients(notes: str, loss: str, gradients: str) -> None:
    case = step_case(**DP_ONLY, framework="torchtitan", year="2025", notes=notes)
    assert build_scenario(case).training.loss.value == loss
    assert build_scenario(case).training.recipe.weight_formats.gradients.value == gradients


def test_a_row_states_how_many_layers_are_recomputed() -> None:
    assert scenario_mapping(step_case(recompute="layers:3"))["training"]["recompute"] == {"layers": 3}
    with pytest.raises(CannotPredictError, match="layers:all is not modelled"):
        scenario_mapping(step_case(recompute="layers:all"))


@pytest.mark.parametrize(("framework", "gradients"), [("KempnerForge", "fp32"), ("VectorLM (transformers)", "bf16")])
def test_software_that_trains_in_bf16_alone_reduces_once_in_a_format_of_its_own(framework: str, gradients: str) -> None:
    """Both leave all reductions but the last microbatch's out (set_requires_gradient_sync, no_sync)."""
    cells = {"pp": "1", "tp": "1", "dp": "8", "zero_stage": "3", "global_batch": "32", "schedule": ""}
    scenario = build_scenario(step_case(framework=framework, **cells))
    data, formats = scenario.layout.data, scenario.training.recipe.weight_formats
    assert isinstance(data, FullyShard)
    assert data.reduce is ReductionFrequency.LAST_MICROBATCH
    assert formats.gradients.value == gradients
    assert formats.master is None
