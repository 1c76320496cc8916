"""Heterogeneous layers and pipeline layer partitions in a scenario file; error messages."""

from pathlib import Path
from typing import Any

import pytest

from clustersim import Scenario, simulate
from clustersim.common.errors import InputError
from clustersim.model.attention_spec import FullAttention, QkNorm
from clustersim.model.layer_stack import BlockForm, LayerGroup, layer_specs
from clustersim.model.transformer import parameter_count
from clustersim.parallel.layer_partition import AccountForEnds, EndRankLayers, PipelineLayoutString
from clustersim.results.time_categories import TimeCategory

BASE_MAPPING: dict[str, Any] = {
    "model": "llama3-8b",
    "cluster": {"name": "dgx-h100", "gpus": 8},
    "layout": {"tp": 2, "pp": 4},
    "training": {"sequence": 2048, "global_batch": 8},
}


def load_scenario(*overrides: str) -> Scenario:
    return Scenario.from_mapping(BASE_MAPPING, overrides=list(overrides))


def windows(scenario: Scenario) -> list[int | None]:
    return [spec.attention.window for spec in layer_specs(scenario.model.stack) if spec.attention is not None]


@pytest.mark.parametrize(
    ("model", "expected"),
    [
        ("{preset: llama3-8b, window: 1024}", [1024] * 32),
        ("{preset: llama3-8b, window: 1024, window_attn_skip_freq: 4}", [1024, 1024, 1024, None] * 8),
        (
            "{preset: llama3-8b, window: 1024, window_attn_skip_freq: 4, layers: 6}",
            [1024, 1024, 1024, None, 1024, 1024],
        ),
        ("{preset: gemma2-9b, layers: 4}", [4096, None] * 2),
        ("{preset: gemma2-9b, layers: 4, window: 512}", [512, None] * 2),
        ("{preset: gemma2-9b, layers: 4, window: full}", [None] * 4),
        ("{preset: gemma2-9b, layers: 6, window_attn_skip_freq: 3}", [4096, 4096, None] * 2),
        ("{preset: mistral-7b-v0.1, layers: 4}", [4096] * 4),
    ],
)
def test_sliding_window_layer_pattern(model: str, expected: list[int | None]) -> None:
    assert windows(load_scenario(f"model={model}")) == expected


def test_stack_of_layer_runs() -> None:
    """One first dense layer of another width, followed by 31 parallel-block layers."""
    scenario = load_scenario(
        "model={preset: llama3-8b, stack: [{layers: 1, ffn: 8192}, {layers: 31, block: parallel}]}"
    )
    first, remaining = scenario.model.stack
    assert (first.count, remaining.count, first.spec.block, remaining.spec.block) == (
        1,
        31,
        BlockForm.PRE_NORM,
        BlockForm.PARALLEL,
    )
    # one narrower MLP of three matrices, and one norm fewer in 31 layers
    expected = parameter_count(load_scenario().model) - 3 * 4096 * (14336 - 8192) - 31 * 4096
    assert parameter_count(scenario.model) == expected


def test_inline_model_layer_count_from_stack() -> None:
    model = {"hidden": 256, "heads": 4, "vocab": 512, "ffn": 512, "stack": [{"layers": 2}, {"layers": 6, "ffn": 1024}]}
    scenario = Scenario.from_mapping({**BASE_MAPPING, "model": model})
    assert scenario.model.layer_count == 8
    assert [distinct_dense_mlp.ffn for distinct_dense_mlp in scenario.model.distinct_dense_mlps] == [512, 1024]


def test_unused_default_ffn_is_accepted() -> None:
    model = load_scenario("model={preset: llama3-8b, ffn: 64, stack: [{layers: 32, ffn: 128}]}").model
    assert [distinct_dense_mlp.ffn for distinct_dense_mlp in model.distinct_dense_mlps] == [128]


def test_qk_norm_values() -> None:
    def parse_qk_norm(written: str) -> QkNorm | None:
        return load_scenario(f"model={{preset: qwen3-8b, qk_norm: {written}}}").model.distinct_attentions[0].qk_norm

    assert [parse_qk_norm(value) for value in ("true", "heads", "whole", "false")] == [
        *(QkNorm.PER_HEAD, QkNorm.PER_HEAD, QkNorm.ALL_HEADS),
        None,
    ]


def test_nope_layers_repeat() -> None:
    scenario = load_scenario("model={preset: llama3-8b, no_rope_freq: 4, rotary_percent: 50 %}")
    (with_rope, without_rope) = scenario.model.distinct_attentions
    assert (with_rope.rotary_percent, without_rope.rotary_percent) == (0.5, 0.0)
    assert scenario.model.stack[:2] == (
        LayerGroup(scenario.model.distinct_specs[0], 3),
        LayerGroup(scenario.model.distinct_specs[1], 1),
    )


@pytest.mark.parametrize(
    ("model", "sentence"),
    [
        ("{preset: llama3-8b, window: 0}", r"model\.window: 0.*tokens from 1"),
        ("{preset: llama3-8b, window: -3}", "model.window: -3 is no window"),
        ("{preset: llama3-8b, window: 0.5}", "model.window: 0.5 is no window"),
        ("{preset: llama3-8b, window_attn_skip_freq: 3}", "window_attn_skip_freq 3 needs a window"),
        ("{preset: llama3-8b, window: 9, window_attn_skip_freq: 1}", "model.window_attn_skip_freq: 1 is too small"),
        ("{preset: gpt3-1.3b, no_rope_freq: 4}", r"no_rope_freq 4.*rotary positions; gpt3-1\.3b.*learned"),
        ("{preset: llama3-8b, block: serial}", "model.block: 'serial' is unknown; choose one of parallel"),
        ("{preset: llama3-8b, qk_norm: often}", r"model\.qk_norm: 'often'.*true, false, heads or whole"),
        ("{preset: gpt3-1.3b, rotary_percent: 0.5}", r"rotary_percent.*rotary positions; gpt3-1\.3b.*learned"),
        ("{preset: llama3-8b, rotary_percent: 1.5}", "model.rotary_percent: 1.5 is more than all of it"),
        ("{preset: llama3-8b, stack: []}", "stack: has no run"),
        ("{preset: llama3-8b, stack: [{ffn: 64}]}", "model.stack.0.layers: is missing; write layers: 1"),
        ("{preset: llama3-8b, stack: [{layers: 1, fn: 3}]}", r"model.stack.0.fn: unknown key; did you mean ffn\?"),
        ("{preset: llama3-8b, stack: [{layers: 3}], layers: 8}", "stack: has 3 layers, but layers is 8"),
        ("{preset: gemma2-9b, stack: [{layers: 3}]}", "the layers of gemma2-9b differ already"),
        ("{preset: gemma2-9b, layers: 60}", "gemma2-9b has 42 layers that differ, .* at most 42 fits"),
        ("{preset: llama3-8b, stack: [{layers: 4, heads: 30, kv_heads: 10}]}", "layout.tp|multiple|fits"),
    ],
)
def test_invalid_layers_are_rejected(model: str, sentence: str) -> None:
    with pytest.raises(InputError, match=sentence):
        load_scenario(f"model={model}", "layout.tp=4", "layout.pp=2")


@pytest.mark.parametrize(
    ("written", "split"),
    [
        ("even", None),
        ("null", None),
        ("[9, 9, 7, 7]", (9, 9, 7, 7)),
        ("Et*9|t*9|t*7|t*7L", PipelineLayoutString((9, 9, 7, 7), (0,) * 4)),
        ("{embedding: true, head: true}", AccountForEnds(embedding=True, head=True)),
        ("{first: 7, last: 7}", EndRankLayers(7, 7)),
    ],
)
def test_layer_partitions_round_trip(written: str, split: object) -> None:
    model = "model.layers=30" if isinstance(split, AccountForEnds) else "model.layers=32"
    scenario = load_scenario(model, f"layout.layers_per_stage={written}")
    assert scenario.layout.layers_per_stage == split
    result_json = simulate(scenario).to_json()
    assert Scenario.from_mapping(result_json["scenario"]).layout == scenario.layout
    assert scenario.with_overrides(["training.microbatch=2"]).layout.layers_per_stage == split
    assert scenario.with_overrides(["layout.layers_per_stage=even"]).layout.layers_per_stage is None


@pytest.mark.parametrize(
    ("written", "sentence"),
    [
        ("Et*8|t*8|t*8|t*8mL", r"has 1 m.*0 layers.*no m, or model\.mtp"),
        ("Et*8|x|t*16|L", "'x' stands for nothing"),
        ("Et*8|t*8|t*16L", "3 stages with 32 layers, but pp 4 x 1 chunks = 4 stages"),
        ("Et*8|t*8|t*8|t*7L", "4 stages with 31 layers, .* llama3-8b has 32 layers; layers_per_stage"),
        ("Et*16||t*8|t*8L", r"layout.layers_per_stage: stage 1 of .* holds nothing; layers_per_stage \\[8, 8, 8, 8\\]"),
        ("uneven", "'u' stands for nothing; .* or write even, "),
        ("{embedding: true}", "32 layers.*33 slots, which 4 stages do not divide; layers_per_stage"),
        ("{first: 7}", "7 on rank 0 leave 25 of 32 layers"),
        ("{first: 7, embedding: true}", "says more than one of"),
        ("{frst: 7}", r"layout\.layers_per_stage\.frst:.*first\?"),
        ("5", "layout.layers_per_stage: 5 is not a mapping .*; write even, "),
    ],
)
def test_invalid_layer_partitions_are_rejected(written: str, sentence: str) -> None:
    with pytest.raises(InputError, match=sentence.replace("\\\\", "\\")):
        load_scenario(f"layout.layers_per_stage={written}")


def test_window_of_sequence_length_equals_full_attention() -> None:
    full, windowed, short_window = (simulate(load_scenario(f"model.window={window}")) for window in ("full", 2048, 256))
    assert (windowed.step_time, windowed.peak_memory, windowed.mfu) == (full.step_time, full.peak_memory, full.mfu)
    assert short_window.step_time < full.step_time
    assert short_window.peak_memory == full.peak_memory


def test_parallel_block_saves_tp_all_reduces() -> None:
    serial, parallel = (simulate(load_scenario(f"model.block={block}")) for block in ("pre_norm", "parallel"))
    exposed_tp = [result.breakdown.category_total(TimeCategory.EXPOSED_TP) for result in (serial, parallel)]
    assert exposed_tp[1] < 0.6 * exposed_tp[0]
    assert parallel.step_time < serial.step_time


def test_attention_sinks_are_read_and_rejected_for_mla() -> None:
    assert all(
        distinct_attention.attention_sinks
        for distinct_attention in load_scenario("model.attention_sinks=true").model.distinct_attentions
        if isinstance(distinct_attention, FullAttention)
    )
    with pytest.raises(InputError, match="attention_sinks: latent attention"):
        load_scenario("model={preset: deepseek-v2-lite, attention_sinks: true}")


def test_even_layout_string_equals_even_partition() -> None:
    even, written = (
        simulate(load_scenario(f"layout.layers_per_stage={partition}")) for partition in ("even", "E(t*8|)*3t*8L")
    )
    assert written.step_time == even.step_time
    assert written.peak_memory == even.peak_memory


def test_hf_config_with_layer_pattern_round_trip(tmp_path: Path) -> None:
    config = tmp_path / "config.json"
    config.write_text(
        '{"model_type": "gemma2", "hidden_size": 4096, "intermediate_size": 8192, "num_hidden_layers": 8,'
        ' "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 512,'
        ' "max_position_embeddings": 4096, "sliding_window": 512}',
        encoding="utf-8",
    )
    scenario = load_scenario(f"model={{path: {config}}}")
    assert windows(scenario) == [512, None] * 4
    result = simulate(scenario)
    full_attention = simulate(scenario.with_overrides(["model.window=full"]))
    assert result.step_time < full_attention.step_time
    assert Scenario.from_mapping(result.to_json()["scenario"]).model == scenario.model
