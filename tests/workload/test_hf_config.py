"""Configurations of released models give their released parameter counts; everything else is refused in a sentence."""

import json
from pathlib import Path
from typing import Any

import pytest

from clustersim.errors import InputError
from clustersim.workload.hf_config import read_hf_config
from clustersim.workload.presets import preset
from clustersim.workload.stack import Mlp
from clustersim.workload.transformer import Norm, Positions, parameters
from tests.uniform import sizes

LLAMA3_8B = {
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "max_position_embeddings": 131072,
    "attention_bias": False,
    "tie_word_embeddings": False,
}
GPT2 = {"model_type": "gpt2", "n_embd": 768, "n_layer": 12, "n_head": 12, "vocab_size": 50257, "n_positions": 1024}


def _llama_kind(model_type: str, sizes: tuple[int, int, int, int, int, int], **more: Any) -> dict[str, Any]:
    keys = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads")
    named = dict(zip((*keys, "vocab_size"), sizes, strict=True))
    return {"model_type": model_type, "max_position_embeddings": 32768, **named, **more}


# Dimensions of the released config.json files; counts of unique weights from their model cards.
RELEASED = [
    (LLAMA3_8B, 8_030_261_248),
    (GPT2, 124_439_808),
    # meta-llama/Llama-3.2-1B
    (_llama_kind("llama", (2048, 8192, 16, 32, 8, 128256), tie_word_embeddings=True, head_dim=64), 1_235_814_400),
    # mistralai/Mistral-7B-v0.3
    (_llama_kind("mistral", (4096, 14336, 32, 32, 8, 32768), sliding_window=None), 7_248_023_552),
    # Qwen/Qwen2.5-0.5B
    (_llama_kind("qwen2", (896, 4864, 24, 14, 2, 151936), tie_word_embeddings=True), 494_032_768),
    # Qwen/Qwen2.5-7B, whose window is switched off
    (
        _llama_kind("qwen2", (3584, 18944, 28, 28, 4, 152064), sliding_window=4096, use_sliding_window=False),
        7_615_616_512,
    ),
    # Qwen/Qwen3-8B
    (_llama_kind("qwen3", (4096, 12288, 36, 32, 8, 151936), head_dim=128), 8_190_735_360),
    # google/gemma-2b: tied and head_dim 256 by default
    (_llama_kind("gemma", (2048, 16384, 18, 8, 1, 256000)), 2_506_172_416),
]


def _written(folder: Path, content: object) -> Path:
    path = folder / "config.json"
    path.write_text(content if isinstance(content, str) else json.dumps(content), encoding="utf-8")
    return path


@pytest.mark.parametrize(("content", "count"), RELEASED, ids=lambda value: str(value)[:40])
def test_released_configurations_give_released_counts(tmp_path: Path, content: dict[str, Any], count: int) -> None:
    assert parameters(read_hf_config(_written(tmp_path, content))) == count


def test_llama_and_gpt2_have_their_families_parts(tmp_path: Path) -> None:
    llama = read_hf_config(_written(tmp_path, LLAMA3_8B))
    assert (sizes(llama).mlp, llama.norm, llama.positions) == (Mlp.SWIGLU, Norm.RMSNORM, Positions.ROTARY)
    assert not llama.dropout
    gpt2 = read_hf_config(_written(tmp_path, GPT2))
    assert (sizes(gpt2).mlp, gpt2.norm, gpt2.positions) == (Mlp.GELU, Norm.LAYERNORM, Positions.LEARNED)
    assert gpt2.dropout  # 0.1 is GPT2Config's default
    off = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0)
    assert not read_hf_config(_written(tmp_path, {**GPT2, **off})).dropout


def test_a_folder_stands_for_its_config_and_names_the_model(tmp_path: Path) -> None:
    folder = tmp_path / "my-llama"
    folder.mkdir()
    _written(folder, LLAMA3_8B)
    model = read_hf_config(folder)
    assert model.name == "my-llama"
    assert parameters(model) == parameters(preset("llama3-8b"))


@pytest.mark.parametrize("key", [key for key in LLAMA3_8B if not key.endswith(("bias", "embeddings", "value_heads"))])
def test_a_missing_key_is_named(tmp_path: Path, key: str) -> None:
    content = {name: value for name, value in LLAMA3_8B.items() if name != key}
    with pytest.raises(InputError, match=rf"config\.json: has no {key}"):
        read_hf_config(_written(tmp_path, content))


@pytest.mark.parametrize("value", [0, -1, 2.5, 4096.0, "4096", True, [], {}])
@pytest.mark.parametrize("key", ["hidden_size", "num_hidden_layers", "num_key_value_heads", "head_dim"])
def test_a_value_that_is_no_size_is_named(tmp_path: Path, key: str, value: object) -> None:
    with pytest.raises(InputError, match=rf"config\.json: {key} is .*, not a whole number above 0"):
        read_hf_config(_written(tmp_path, {**LLAMA3_8B, key: value}))


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        ('{"model_type": "llama", "hidden', "is not valid JSON"),
        ("", "is empty"),
        ("[1, 2]", "holds a list, not a mapping"),
        ({}, "has no model_type; families that are read: llama, mistral"),
        ({"model_type": 7}, "has no model_type"),
        ({**LLAMA3_8B, "model_type": "lama"}, r"model_type 'lama' is not known; did you mean llama\?$"),
        ({**LLAMA3_8B, "model_type": "bert"}, "model_type 'bert' is not known; choose one of gemma, gpt2"),
        (
            {**LLAMA3_8B, "model_type": "mixtral", "num_local_experts": 8},
            r"experts \(num_local_experts is 8\)",
        ),
        ({**LLAMA3_8B, "model_type": "qwen3_moe"}, r"mixture of experts \(model_type is qwen3_moe\)"),
        ({**LLAMA3_8B, "num_key_value_heads": 5}, "num_key_value_heads 5 does not divide num_attention_heads 32"),
        ({**LLAMA3_8B, "hidden_size": 4100}, "num_attention_heads 32 does not divide hidden_size 4100"),
        ({**LLAMA3_8B, "attention_bias": True}, "attention_bias True with mlp_bias False is not modelled for llama"),
        ({**LLAMA3_8B, "attention_bias": "no"}, "attention_bias is 'no', not true or false"),
        ({**LLAMA3_8B, "model_type": "mistral", "sliding_window": 4096}, "sliding_window 4096 is not modelled"),
        ({**GPT2, "n_embd": 770}, "n_head 12 does not divide n_embd 770"),
        ({**GPT2, "resid_pdrop": 1.5}, "resid_pdrop is 1.5, not a number from 0 to below 1"),
    ],
)
def test_what_cannot_be_read_is_refused_in_one_sentence(tmp_path: Path, content: object, sentence: str) -> None:
    with pytest.raises(InputError, match=rf"config\.json: .*{sentence}") as refused:
        read_hf_config(_written(tmp_path, content))
    assert "\n" not in str(refused.value)


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"nowhere\.json: cannot be read"):
        read_hf_config(tmp_path / "nowhere.json")


def test_biases_of_attention_and_mlp_together_are_read(tmp_path: Path) -> None:
    both = read_hf_config(_written(tmp_path, {**LLAMA3_8B, "attention_bias": True, "mlp_bias": True}))
    # per layer: q 4096, k and v 1024 each, o 4096, gate and up 14336 each, down 4096
    added = 32 * (4096 + 2 * 1024 + 4096 + 2 * 14336 + 4096)
    assert parameters(both) == 8_030_261_248 + added
