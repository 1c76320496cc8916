"""Consistency checks across sections: errors name the conflicting values and the nearest valid ones."""

from collections.abc import Callable
from typing import Any

import pytest

from clustersim.common.errors import InputError
from clustersim.scenario import Scenario
from tests.sentences import parts

Refusal = Callable[..., str]


@pytest.mark.parametrize(
    ("overrides", "sentence"),
    [
        # 4 x 2 x 8 = 64 ranks need 64 GPUs; 32 leave dp 32 / 8 = 4
        (["cluster.gpus=32"], "tp 4 x cp 1 x pp 2 x dp 8 = 64 ranks ... 32 GPUs; dp 4"),
        # 64 / (4 x 8) = 2: pp may be any divisor of 2
        (["layout.pp=3"], "tp 4 x cp 1 x pp 3 x dp 8 = 96 ranks ... 64 GPUs; pp 2"),
        (["layout.tp=3"], "tp 3 x cp 1 x pp 2 x dp 8 = 48 ranks ... 64 GPUs; tp 4"),
        (["layout.tp=64", "layout.pp=1", "layout.dp=1"], "layout.tp: 64 does not divide the 32 heads"),
        (["model.heads=30", "model.kv_heads=10"], "layout.tp: 4 ... 30 heads of llama3-8b; tp 2 with dp 16"),
        (["model.kv_heads=7"], "heads 32 ... kv_heads 7; kv_heads 4 or 8"),
        (["model.ffn=14338"], "layout.tp: 4 does not divide ffn 14338"),
        # Megatron-LM pads to a multiple of 128 x tp = 512: 50,257 becomes 99 x 512 = 50,688
        (["model.vocab=50257"], "layout.tp: 4 ... vocab 50257 of llama3-8b; Megatron-LM pads"),
        (["model.vocab=50257"], "vocab 50688 fits"),
        (["model.layers=1", "layout.pp=2", "schedule.interleaved.chunks=4"], "has only 1 layers"),
        (["layout.layers_per_stage=[16, 15]"], "2 stages with 31 layers, but pp 2 x 1 chunks = 2 stages"),
        (["layout.layers_per_stage=[8, 8, 16]"], "3 stages with 32 layers; "[:-2]),
        (["training.global_batch=100"], "100 ... multiple of dp 8 x microbatch 1 = 8; global_batch 96 or 104"),
        (["training.global_batch=4"], "4 sequences ... at most 4 data-parallel ranks ... microbatches of 1"),
        (
            ["training.sequence=8190", "layout.sequence_parallel=true"],
            "8190 is not a multiple of tp 4 = 4; sequence 8188 or 8192",
        ),
        (["layout.cp=2", "layout.dp=4", "training.sequence=8190"], "2 x cp 2 = 4; sequence 8188 or 8192 fits"),
        (["schedule=interleaved", "layout.pp=1", "layout.dp=16"], "interleaved needs a pipeline, but layout.pp is 1"),
        (["schedule=interleaved", "layout.pp=4", "layout.dp=4", "training.global_batch=36"], "equal rounds"),
        (["cluster.name=dgx-v100"], "training.precision: v100-sxm-32gb ... bf16 peak; it computes in"),
        (["training.recompute={layers: 17}"], "layers: 17 ... more than 16 layers; layers 16"),
        (["training.recompute={layers: 17}", "layout.layers_per_stage=[16, 16]"], "no stage holds more than 16"),
        (["training.global_batch=2147483640"], "passes a step are the most"),
    ],
)
def test_conflicting_values_suggest_valid_ones(refusal: Refusal, overrides: list[str], sentence: str) -> None:
    assert parts(sentence).search(refusal(*overrides))


def test_too_long_sequence_fails_for_learned_warns_for_rotary(mapping: dict[str, Any], refusal: Refusal) -> None:
    assert parts("2048 learned positions of gpt3-1.3b; sequence 2048").search(
        refusal("model=gpt3-1.3b", "training.sequence=4096")
    )
    long = Scenario.from_mapping(mapping, overrides=["training.sequence=262144"])
    assert any("131072 positions" in warning for warning in long.warnings)


def test_too_small_batch_suggests_a_layout() -> None:
    # 8,192 sequences are one for each of at most 8,192 ranks; half of 16,384 GPUs are used by tp 2
    mapping = {
        "model": "llama3-70b",
        "cluster": {"name": "dgx-h100", "gpus": 16384},
        "layout": {"data": "fsdp"},
        "training": {"sequence": 8192, "global_batch": 8192},
    }
    with pytest.raises(Exception, match=r"feed at most 8192 data-parallel ranks .* dp is 16384; tp 2 fits"):
        Scenario.from_mapping(mapping)
    assert Scenario.from_mapping(mapping, overrides=["layout.tp=2"]).microbatch_count == 1


def test_indivisible_layer_count_is_valid(mapping: dict[str, Any]) -> None:
    scenario = Scenario.from_mapping(mapping, overrides=["model=llama3-405b", "layout.pp=4", "layout.dp=4"])
    assert scenario.layout.layers_per_stage is None  # 126 over 4 stages: lowering deals 31, 32, 32, 31


def test_tp_above_kv_heads_needs_even_replication(mapping: dict[str, Any], refusal: Refusal) -> None:
    # llama3-8b has 8 kv_heads: 16 ranks replicate each twice; 8 ranks can neither split nor replicate 12 kv_heads
    replicated_heads = Scenario.from_mapping(mapping, overrides=["layout.tp=16", "layout.dp=2"])
    assert any("8 kv_heads" in warning and "2 ranks hold each" in warning for warning in replicated_heads.warnings)
    assert "8 neither divides the 12 kv_heads" in refusal(
        "model.heads=48", "model.kv_heads=12", "layout.tp=8", "layout.dp=4"
    )


def test_tp_across_nvlink_domains_warns(mapping: dict[str, Any]) -> None:
    within_domain = Scenario.from_mapping(mapping)
    across_domains = Scenario.from_mapping(mapping, overrides=["layout.tp=16", "layout.dp=2"])
    assert not within_domain.warnings
    assert any("reach beyond one NVLink domain" in warning for warning in across_domains.warnings)


def test_tp_comm_overlap_needs_one_nvlink_domain(mapping: dict[str, Any]) -> None:
    """TP communication overlap (user buffers) works within an NVLink domain, not between nodes."""
    within = ["layout.tp=8", "layout.dp=4", "layout.tp_comm_overlap=true"]
    across_nodes = ["layout.tp=16", "layout.dp=2", "layout.tp_comm_overlap=true"]
    for overrides, rack, works in ((within, False, True), (across_nodes, False, False), (across_nodes, True, True)):
        cluster = ["cluster={name: gb200-nvl72, gpus: 64}"] if rack else []
        scenario = Scenario.from_mapping(mapping, overrides=[*overrides, *cluster])
        assert scenario.layout.tp_comm_overlap
        assert scenario.effective_layout.tp_comm_overlap is works
        assert any("layout.tp_comm_overlap has no effect" in warning for warning in scenario.warnings) is not works


def test_recomputed_layers_up_to_largest_stage_are_valid(mapping: dict[str, Any]) -> None:
    uneven = ["layout.layers_per_stage=[15, 17]", "training.recompute={layers: 17}"]
    assert not Scenario.from_mapping(mapping, uneven).warnings


def test_mla_recompute_module_needs_mla(mapping: dict[str, Any]) -> None:
    """Megatron-LM's transformer_config.py raises the same."""
    overrides = ["training.recompute={modules: [mla_up_proj, mlp]}"]
    with pytest.raises(InputError, match=r"mla_up_proj.*latent attention.*llama3-8b.*layernorm,"):
        Scenario.from_mapping(mapping, overrides)


def test_recompute_modules_without_effect_warn(mapping: dict[str, Any]) -> None:
    def warning_text(*overrides: str) -> str:
        return " ".join(Scenario.from_mapping(mapping, overrides).warnings)

    assert not warning_text("training.recompute={modules: [layernorm, mlp]}")
    assert "moe_act has no effect" in warning_text("training.recompute={modules: [mlp, moe_act]}")
    fused_norm = ["training.recompute={modules: [layernorm]}", "framework=megatron"]
    assert "layernorm has no effect: no layer" in warning_text(*fused_norm)
    assert not warning_text(*fused_norm, "training.overheads.norm_in_linear=false")
    assert "core_attn only costs time with flash attention" in warning_text(
        "training.recompute={modules: [core_attn, mlp]}"
    )


def test_symmetry_off_at_scale_warns_with_pass_count(mapping: dict[str, Any]) -> None:
    # dp 4,096 / 8 = 512, so 1,024 / 512 = 2 microbatches, forward and backward: 4 passes on each of 4,096 ranks
    large = ["cluster.gpus=4096", "layout.dp=512", "training.global_batch=1024", "cost.network=uncontended"]
    assert not Scenario.from_mapping(mapping, large).warnings
    (warning,) = Scenario.from_mapping(mapping, [*large, "cost.symmetry=off"]).warnings
    assert "4,096 x 4 = 16,384 passes" in warning
    assert not Scenario.from_mapping(mapping, ["cost.symmetry=off"]).warnings


def test_jitter_on_shared_network_at_scale_warns(mapping: dict[str, Any]) -> None:
    large = ["cluster.gpus=4096", "layout.dp=512", "training.global_batch=512"]
    (warning,) = Scenario.from_mapping(mapping, [*large, "degradations.jitter=1 %"]).warnings
    assert "jitter makes every rank differ" in warning and "4,096" in warning
    assert not Scenario.from_mapping(mapping, ["degradations.jitter=1 %"]).warnings
    uncontended = "cost.network=uncontended"
    assert not Scenario.from_mapping(mapping, [*large, "degradations.jitter=1 %", uncontended]).warnings


def test_flash_attention_on_old_gpu_warns(mapping: dict[str, Any]) -> None:
    old = ["cluster=dgx-v100", "training.precision=fp16"]
    (warning,) = Scenario.from_mapping(mapping, old).warnings
    assert "FlashAttention-2 needs compute capability 8.0" in warning
    assert not Scenario.from_mapping(mapping, [*old, "training.attention=standard"]).warnings


def test_interleaved_settings_rejected_by_megatron_warn(mapping: dict[str, Any]) -> None:
    four = ["layout.pp=4", "layout.dp=4", "schedule=interleaved"]
    assert not Scenario.from_mapping(mapping, four).warnings
    # 24 / 4 = 6 microbatches are one round of 6 to torch, but no multiple of 4
    (batch,) = Scenario.from_mapping(mapping, [*four, "training.global_batch=24"]).warnings
    assert "6 microbatches are not a multiple of pp 4" in batch
    (split,) = Scenario.from_mapping(mapping, [*four, "model.layers=29"]).warnings
    assert "29 layers do not divide into pp 4 x 2 chunks = 8 stages" in split
    # Llama 3: embedding and loss count as layers, 30 + 2 = 8 x 4
    assert not Scenario.from_mapping(mapping, [*four, "model.layers=30"]).warnings


def test_zb_2p_warns_about_visible_bubble(mapping: dict[str, Any]) -> None:
    four = ["layout.pp=4", "layout.dp=4", "schedule=zb-2p", "model.tied_embeddings=false"]
    (single_step,) = Scenario.from_mapping(mapping, four).warnings
    assert "steps 3" in single_step
    assert not Scenario.from_mapping(mapping, [*four, "steps=3"]).warnings
    assert not Scenario.from_mapping(mapping, [*four, "schedule=zb-1p"]).warnings
    (tied,) = Scenario.from_mapping(mapping, [*four, "steps=3", "model.tied_embeddings=true"]).warnings
    assert "cannot begin the next step early" in tied


def test_absurd_rank_counts_are_rejected_early() -> None:
    mapping = {
        "model": "llama3-8b",
        "cluster": "dgx-h100",
        "layout": {"tp": 1_000_000, "pp": 1_000_000, "dp": 1_000_000},
        "training": {"sequence": 8192, "global_batch": 128},
    }
    with pytest.raises(Exception, match=r"1,000,000,000,000,000,000 GPUs are out of range; .* 1,048,576"):
        Scenario.from_mapping(mapping)


def test_sliding_window_with_ring_attention_warns(mapping: dict[str, Any]) -> None:
    ring = ["layout.cp=2", "layout.dp=4", "layout.cp_kind=ring"]
    assert not Scenario.from_mapping(mapping, ring).warnings
    (warning,) = Scenario.from_mapping(mapping, [*ring, "model.window=1024"]).warnings
    assert "the ring passes all keys and values on" in warning


@pytest.mark.parametrize(("key", "value"), [("layout.pp", "2"), ("training.lora", "8")])
def test_deepspeed_zero3_rejects_unsupported_combinations(mapping: dict[str, Any], key: str, value: str) -> None:
    scenario_mapping = {**mapping, "layout": {"data": "deepspeed_zero3"}, "cluster": {"name": "dgx-h100", "gpus": 8}}
    section, name = key.split(".")
    scenario_mapping = {**scenario_mapping, section: {**scenario_mapping[section], name: int(value)}}
    with pytest.raises(InputError, match=f"deepspeed_zero3 does not run with {key}"):
        Scenario.from_mapping(scenario_mapping)
