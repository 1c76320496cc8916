"""Multi-token prediction (MTP) layers in a scenario file: reading, round trip and error messages."""

import json
from pathlib import Path
from typing import Any

import pytest

from clustersim import Scenario
from clustersim.common.errors import InputError
from clustersim.model.layer_stack import MoeMlp
from clustersim.parallel.layer_partition import PipelineLayoutString

BASE_MAPPING: dict[str, Any] = {
    "model": {"preset": "llama3-8b", "mtp_layers": 1},
    "cluster": {"name": "dgx-h100", "gpus": 32},
    "layout": {"tp": 2, "pp": 4, "sequence_parallel": True},
    "training": {"sequence": 2048, "global_batch": 64},
}


def load_scenario(*overrides: str) -> Scenario:
    return Scenario.from_mapping(BASE_MAPPING, overrides=overrides)


def test_mtp_layers_round_trip_and_override() -> None:
    scenario = load_scenario()
    assert scenario.model.mtp_layers == 1
    assert Scenario.from_mapping(scenario.to_mapping()).model == scenario.model
    assert load_scenario("model.mtp_layers=0").model == load_scenario("model=llama3-8b").model
    assert load_scenario("model=deepseek-v3").model.mtp_layers == 0, "trained only where the file says so"


def test_mtp_layers_with_inline_dimensions() -> None:
    inline = "{layers: 4, hidden: 1024, heads: 8, vocab: 1024, mtp_layers: 2, experts: {count: 8, top_k: 2, ffn: 512}}"
    model = load_scenario(f"model={inline}").model
    assert (model.mtp_layers, model.layer_count) == (2, 4)
    assert isinstance(model.mtp_stack[0].spec.mlp, MoeMlp)


def test_mtp_layers_from_hf_config(tmp_path: Path) -> None:
    content = {
        **{"model_type": "glm4_moe", "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 4},
        **{"num_attention_heads": 4, "num_key_value_heads": 4, "n_routed_experts": 8, "num_experts_per_tok": 2},
        **{"moe_intermediate_size": 64, "first_k_dense_replace": 1, "vocab_size": 512, "head_dim": 64},
        **{"max_position_embeddings": 2048, "num_nextn_predict_layers": 1},
    }
    path = tmp_path / "config.json"
    path.write_text(json.dumps(content), encoding="utf-8")
    assert load_scenario(f"model={{path: {path}}}").model.mtp_layers == 1
    assert load_scenario(f"model={{path: {path}, mtp_layers: 0}}").model.mtp_layers == 0
    path.write_text(json.dumps(content | {"num_nextn_predict_layers": 1000}), encoding="utf-8")
    with pytest.raises(InputError, match="num_nextn_predict_layers 1000 is too large; 64 is the most"):
        load_scenario(f"model={{path: {path}}}")


def test_layout_string_positions_mtp_layers() -> None:
    split = load_scenario("layout.layers_per_stage=Et*9|t*9|t*7|t*7mL").layout.layers_per_stage
    assert split == PipelineLayoutString((9, 9, 7, 7), (0, 0, 0, 1))
    separate_stage = load_scenario("layout.layers_per_stage=Et*11|t*11|t*10|mL")
    assert separate_stage.layout.layers_per_stage == PipelineLayoutString((11, 11, 10, 0), (0, 0, 0, 1))
    between = load_scenario("layout.layers_per_stage=Et*16|t*16|m|L")
    assert between.layout.layers_per_stage == PipelineLayoutString((16, 16, 0, 0), (0, 0, 1, 0))


@pytest.mark.parametrize(
    ("override", "sentence"),
    [
        ("model.mtp_layers=-1", r"model.mtp_layers: .*-1.* greater than or equal to 0|model.mtp_layers: -1"),
        ("model.mtp_layers=65", r"model.mtp_layers: .*65"),
        ("model.mtp_layers=one", r"model.mtp_layers: .*one"),
        ("layout.layers_per_stage=Et*8|t*8|t*8|t*8L", "has 0 m, but llama3-8b has 1 layers .*; write 1 m, or .* 0"),
        ("layout.layers_per_stage=Et*8|t*8|t*8|t*8mmL", "has 2 m, but llama3-8b has 1 layers .*; write 1 m, or .* 2"),
        ("layout.layers_per_stage=Et*8|t*8|mt*8|t*8L", "m comes behind all t, and all m on one stage"),
        ("layout.layers_per_stage=Et*8|t*8|t*8|t*8xL", "'x' stands for nothing; E .*, t .*, m .* and L .* are known"),
        ("layout.layers_per_stage=Et*16||t*16|mL", "stage 1 of .* holds nothing"),
        ("model={preset: gpt3-1.3b, mtp_layers: 1}", "1 further tokens, but gpt3-1.3b has learned positions"),
        ("training.lora={rank: 8}", r"model\.mtp_layers: 1.*adapters.*not modelled"),
        ("model={preset: llama3-8b, mtp_layers: 1, hidden: 4097}", "2 does not divide hidden 4097 of llama3-8b"),
    ],
)
def test_invalid_mtp_settings_are_rejected(override: str, sentence: str) -> None:
    with pytest.raises(InputError, match=sentence):
        load_scenario(override)
