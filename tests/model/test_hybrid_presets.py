"""Presets of hybrids have the parameters of their released weights; files of their families are read."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from clustersim.common.errors import InputError
from clustersim.model.hf_config import read_hf_config
from clustersim.model.layer_stack import DenseMlp, MoeMlp, layer_specs
from clustersim.model.layers import transformer_layer
from clustersim.model.mixers.mamba1 import Mamba1
from clustersim.model.operators import LayerShard
from clustersim.model.preset_hybrid import HYBRID_PRESETS
from clustersim.model.presets import code_presets, load_preset
from clustersim.model.training import Training
from clustersim.model.transformer import active_parameter_count, layer_parameter_count, parameter_count

# Elements of the released checkpoints, minus what is no weight of the layers that are modelled.
RELEASED = {
    "nemotron-h-8b": 8_100_852_736,
    "nemotron-nano-9b-v2": 8_888_227_328,
    "minimax-text-01": 456_089_655_296,
    "granite-4.0-h-small": 32_207_337_984,
    "rwkv7-0.1b": 191_034_624,  # of RWKV-7 as converted to Transformers' format (wangyue114514/rwkv7-g1*-hf)
    "rwkv7-0.4b": 450_767_872,
    "rwkv7-1.5b": 1_527_404_544,
    "rwkv7-2.9b": 2_947_735_040,
    "zamba2-1.2b": 1_215_064_704,
}
# Billions as published: model cards and papers.
TOTAL = {
    "nemotron-h-47b": "47",
    "nemotron-h-56b": "56",
    "nemotron-nano-12b-v2": "12.31",
    "kimi-linear-48b-a3b": "49",
    "jamba-1.5-mini": "52",
    "jamba-1.5-large": "399",
    "falcon-h1-34b": "34",
}
ACTIVE = {"kimi-linear-48b-a3b": "3", "jamba-1.5-mini": "12", "jamba-1.5-large": "94", "granite-4.0-h-small": "9"}


def _billions(count: int, printed: str) -> str:
    return f"{count / 1e9:.{len(printed.partition('.')[2])}f}"


@pytest.mark.parametrize(("name", "count"), RELEASED.items())
def test_parameters_are_those_of_the_released_weights(name: str, count: int) -> None:
    assert parameter_count(load_preset(name)) == count


@pytest.mark.parametrize(
    ("name", "layers", "ranks"),
    [("rwkv7-0.1b", 12, (64, 64, 32, 128)), ("rwkv7-2.9b", 32, (96, 96, 64, 320))],
)
def test_rwkv7_has_the_parameters_of_its_papers_formula(name: str, layers: int, ranks: tuple[int, ...]) -> None:
    """2 D V + 4 D + L D (12 D + 2 (d_w + d_a + d_v + d_g) + 19) - (2 D d_v + D), less the first layer's."""
    model = load_preset(name)
    width, low = model.hidden, sum(ranks)
    stack = layers * width * (12 * width + 2 * low + 19) - (2 * width * ranks[2] + width)
    assert parameter_count(model) == 2 * width * model.vocab + 4 * width + stack


def test_channel_mixing_shifts_its_input(tmp_path: Path) -> None:
    """One more parameter a channel, and two more saved activations, than an MLP whose input is not mixed."""
    content = {"model_type": "rwkv7", "hidden_size": 128, "num_hidden_layers": 2, "vocab_size": 512}
    (tmp_path / "config.json").write_text(json.dumps(content))
    model = read_hf_config(tmp_path)
    spec = model.stack[-1].spec
    assert isinstance(spec.mlp, DenseMlp)
    plain = replace(spec, mlp=replace(spec.mlp, token_shift=False))
    mixed, unmixed = (transformer_layer(model, one, Training(256, 1), LayerShard(1, 256, 256)) for one in (spec, plain))
    assert mixed.parameter_count - unmixed.parameter_count == 128
    assert mixed.saved_bytes - unmixed.saved_bytes == 2 * 256 * 128 * 2


def test_qwen3_next_has_its_released_weights_with_the_mtp_layer() -> None:
    """That is a layer with attention and experts, a projection of [2 hidden, hidden], and three norms."""
    preset = code_presets()["qwen3-next-80b-a3b"]
    model = replace(preset.model, mtp_layers=preset.mtp_layers)
    assert parameter_count(model) == 81_324_862_720
    attention_layer = layer_parameter_count(model, layer_specs(model.stack)[-1])
    assert parameter_count(model) - parameter_count(preset.model) == attention_layer + 2 * 2048**2 + 3 * 2048


@pytest.mark.parametrize(("name", "printed"), TOTAL.items())
def test_other_models_round_to_the_published_count(name: str, printed: str) -> None:
    assert _billions(parameter_count(load_preset(name)), printed) == printed


@pytest.mark.parametrize(("name", "printed"), ACTIVE.items())
def test_active_parameters_round_to_the_published_count(name: str, printed: str) -> None:
    assert _billions(active_parameter_count(load_preset(name)), printed) == printed


def test_jamba_alternates_as_its_paper_says() -> None:
    """Attention in one of eight layers, experts in every second one."""
    specs = layer_specs(load_preset("jamba-1.5-mini").stack)
    assert [index for index, spec in enumerate(specs) if not isinstance(spec.mixer, Mamba1)] == [4, 12, 20, 28]
    assert [isinstance(spec.mlp, MoeMlp) for spec in specs] == 16 * [False, True]


def test_every_family_is_among_the_presets() -> None:
    assert {preset.model.name for preset in HYBRID_PRESETS} >= set(RELEASED) | set(TOTAL)


NANO: dict[str, Any] = {
    **{"model_type": "nemotron_h", "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 4},
    **{"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "vocab_size": 512},
    **{"max_position_embeddings": 128, "mamba_num_heads": 8, "mamba_head_dim": 16, "ssm_state_size": 16},
    **{"n_groups": 2, "hybrid_override_pattern": "M-M*"},
}


def _read(folder: Path, content: dict[str, Any]) -> int:
    (folder / "config.json").write_text(json.dumps(content))
    return parameter_count(read_hf_config(folder))


def test_a_small_nemotron_h_has_the_parameters_of_its_matrices(tmp_path: Path) -> None:
    inner, maps = 8 * 16, 2 * 2 * 16
    mamba = 64 * (2 * inner + maps + 8) + inner * 64 + (inner + maps) * 5 + 3 * 8 + inner
    attention, mlp = 64 * 16 * (4 + 2 + 2 + 4), 2 * 64 * 128
    assert _read(tmp_path, NANO) == 2 * mamba + attention + mlp + 4 * 64 + 64 + 2 * 512 * 64


def test_an_mtp_layer_of_nemotron_h_has_a_pattern_of_its_own(tmp_path: Path) -> None:
    """Attention before an MLP, two norms, a projection of [2 hidden, hidden] and three norms."""
    attention, mlp = 64 * 16 * (4 + 2 + 2 + 4), 2 * 64 * 128
    mtp = {"num_nextn_predict_layers": 2, "mtp_hybrid_override_pattern": "*-"}
    assert _read(tmp_path, {**NANO, **mtp}) - _read(tmp_path, NANO) == 2 * (attention + mlp + 2 * 64**2 + 5 * 64)


def test_layers_may_be_listed_by_name(tmp_path: Path) -> None:
    listed = {key: value for key, value in NANO.items() if key != "hybrid_override_pattern"}
    kinds = {"layers_block_type": ["mamba", "mlp", "mamba", "attention"]}
    assert _read(tmp_path, {**listed, **kinds}) == _read(tmp_path, NANO)


def test_the_text_model_of_qwen3_5_has_gated_delta_nets_and_gated_attention(tmp_path: Path) -> None:
    text = {
        **{"model_type": "qwen3_5_text", "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 4},
        **{"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "linear_num_key_heads": 2},
        **{"linear_num_value_heads": 4, "linear_key_head_dim": 16, "linear_value_head_dim": 16, "vocab_size": 512},
        "max_position_embeddings": 128,
    }
    keys, values = 2 * 16, 4 * 16
    delta = 64 * (2 * keys + 2 * values + 2 * 4) + values * 64 + (2 * keys + values) * 4 + 2 * 4 + 16
    attention = 64 * 16 * (4 + 4 + 2 + 2 + 4) + 2 * 16  # queries and their gate, keys, values, output; two norms
    layers = 3 * delta + attention + 4 * (3 * 64 * 128 + 2 * 64)
    assert _read(tmp_path, {"model_type": "qwen3_5", "text_config": text}) == layers + 64 + 2 * 512 * 64


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        ({**NANO, "hybrid_override_pattern": "M-M"}, "not a letter of M"),
        ({**NANO, "hybrid_override_pattern": "M-MX"}, "not a letter of M"),
        ({**NANO, "moe_latent_size": 64}, "moe_latent_size"),
        (
            {**NANO, "num_nextn_predict_layers": 1, "mtp_hybrid_override_pattern": "**"},
            "mtp_hybrid_override_pattern is",
        ),
        ({**NANO, "model_type": "kimi_linear"}, "linear_attn_config is None"),
        ({**NANO, "model_type": "granitemoehybrid"}, "has no layer_types"),
        (
            {"model_type": "rwkv7", "hidden_size": 100, "num_hidden_layers": 2},
            "head_dim 64 does not divide hidden_size",
        ),
        ({"model_type": "rwkv7", "num_hidden_layers": 2, "attn": {"layers": [1]}}, "attn .* is not modelled for rwkv7"),
        ({**NANO, "num_key_value_heads": 3}, "num_key_value_heads 3 does not divide"),
    ],
)
def test_files_at_fault_are_refused_in_one_sentence(tmp_path: Path, content: dict[str, Any], reason: str) -> None:
    with pytest.raises(InputError, match=reason) as error:
        _read(tmp_path, content)
    assert len(str(error.value).splitlines()) == 1
