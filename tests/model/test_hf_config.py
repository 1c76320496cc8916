"""Configurations of released models give their parameter counts; unsupported ones are rejected in one sentence."""

import json
from pathlib import Path
from typing import Any

import pytest

from clustersim.common.errors import InputError
from clustersim.model.attention_spec import FullAttention, QkNorm
from clustersim.model.hf_config import read_hf_config
from clustersim.model.layer_stack import BlockForm, MlpType, layer_specs
from clustersim.model.presets import load_preset
from clustersim.model.transformer import Norm, PositionEncoding, TransformerModel, parameter_count
from tests.uniform_models import model_dimensions

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


GEMMA3_4B = {
    "model_type": "gemma3",
    "text_config": {"hidden_size": 2560, "intermediate_size": 10240, "num_hidden_layers": 34, "sliding_window": 1024},
}
FALCON_7B = {
    **{"model_type": "falcon", "hidden_size": 4544, "num_hidden_layers": 32, "num_attention_heads": 71},
    **{"vocab_size": 65024, "multi_query": True, "parallel_attn": True, "bias": False},
}
OPT_125M = {
    **{"model_type": "opt", "hidden_size": 768, "num_hidden_layers": 12, "num_attention_heads": 12, "ffn_dim": 3072},
    **{"max_position_embeddings": 2048, "vocab_size": 50272, "word_embed_proj_dim": 768, "do_layer_norm_before": True},
}


def _llama_like(model_type: str, sizes: tuple[int, int, int, int, int, int], **extra: Any) -> dict[str, Any]:
    keys = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads")
    size_values = dict(zip((*keys, "vocab_size"), sizes, strict=True))
    return {"model_type": model_type, "max_position_embeddings": 32768, **size_values, **extra}


# Dimensions of the released config.json files; counts of unique weights from their model cards.
RELEASED = [
    (LLAMA3_8B, 8_030_261_248),
    (GPT2, 124_439_808),
    # meta-llama/Llama-3.2-1B
    (_llama_like("llama", (2048, 8192, 16, 32, 8, 128256), tie_word_embeddings=True, head_dim=64), 1_235_814_400),
    # mistralai/Mistral-7B-v0.3
    (_llama_like("mistral", (4096, 14336, 32, 32, 8, 32768), sliding_window=None), 7_248_023_552),
    # Qwen/Qwen2.5-0.5B
    (_llama_like("qwen2", (896, 4864, 24, 14, 2, 151936), tie_word_embeddings=True), 494_032_768),
    # Qwen/Qwen2.5-7B, whose window is switched off
    (
        _llama_like("qwen2", (3584, 18944, 28, 28, 4, 152064), sliding_window=4096, use_sliding_window=False),
        7_615_616_512,
    ),
    # Qwen/Qwen3-8B
    (_llama_like("qwen3", (4096, 12288, 36, 32, 8, 151936), head_dim=128), 8_190_735_360),
    # google/gemma-2b: tied and head_dim 256 by default
    (_llama_like("gemma", (2048, 16384, 18, 8, 1, 256000)), 2_506_172_416),
    # Since here: dimensions of the released config.json, counts of the safetensors index unless it is said otherwise.
    (_llama_like("gemma2", (2304, 9216, 26, 8, 4, 256000), sliding_window=4096), 2_614_341_888),  # google/gemma-2-2b
    (_llama_like("gemma2", (3584, 14336, 42, 16, 8, 256000), sliding_window=4096), 9_241_705_984),
    (_llama_like("gemma2", (4608, 36864, 46, 32, 16, 256000), head_dim=128), 27_227_128_320),
    # google/gemma-3-1b-pt
    (_llama_like("gemma3_text", (1152, 6912, 26, 4, 1, 262144), head_dim=256, sliding_window=512), 999_885_952),
    # google/gemma-3-4b-pt leaves out what is the configuration class's: 4,300,079,472 less the vision tower's
    # 416,866,032 and the projector's 1152 x 2560 + 1152
    (GEMMA3_4B, 4_300_079_472 - 416_866_032 - (1152 * 2560 + 1152)),
    # google/gemma-3-27b-pt, likewise: 27,432,406,640 in all
    (
        {
            "model_type": "gemma3",
            "text_config": {
                **{"hidden_size": 5376, "intermediate_size": 21504, "num_hidden_layers": 62, "head_dim": 128},
                **{"num_attention_heads": 32, "num_key_value_heads": 16, "sliding_window": 1024},
            },
        },
        27_432_406_640 - 416_866_032 - (1152 * 5376 + 1152),
    ),
    # allenai/OLMo-2-1124-7B and -13B
    (_llama_like("olmo2", (4096, 11008, 32, 32, 32, 100352)), 7_298_617_344),
    (_llama_like("olmo2", (5120, 13824, 40, 40, 40, 100352)), 13_716_198_400),
    # microsoft/Phi-3-mini-4k-instruct and -medium-4k-instruct
    (_llama_like("phi3", (3072, 8192, 32, 32, 32, 32064), sliding_window=2047), 3_821_079_552),
    (_llama_like("phi3", (5120, 17920, 40, 40, 10, 32064), sliding_window=2047), 13_960_238_080),
    # mistralai/Mistral-7B-v0.1
    (_llama_like("mistral", (4096, 14336, 32, 32, 8, 32000), sliding_window=4096), 7_241_732_096),
    # HuggingFaceTB/SmolLM3-3B
    (_llama_like("smollm3", (2048, 11008, 36, 16, 4, 128256), no_rope_layer_interval=4), 3_075_098_624),
    # THUDM/GLM-4-9B-0414 and glm-4-9b-chat-hf (its tensors as its authors count them)
    (_llama_like("glm4", (4096, 13696, 40, 32, 2, 151552), attention_bias=True), 9_400_279_040),
    (_llama_like("glm", (4096, 13696, 40, 32, 2, 151552), attention_bias=True), 9_399_951_360),
    # tiiuae/falcon-7b and falcon-180B: 7,217,189,760 and 179,522,565,120 with a logits matrix that is tied here
    (FALCON_7B, 7_217_189_760 - 65024 * 4544),
    (
        {
            **{"model_type": "falcon", "hidden_size": 14848, "num_hidden_layers": 80, "num_attention_heads": 232},
            **{"num_kv_heads": 8, "vocab_size": 65024, "new_decoder_architecture": True},
        },
        179_522_565_120 - 65024 * 14848,
    ),
    # bigscience/bloom-560m, bloom-7b1 and bloom, by their model cards
    ({"model_type": "bloom", "hidden_size": 1024, "n_layer": 24, "n_head": 16, "vocab_size": 250880}, 559_214_592),
    ({"model_type": "bloom", "hidden_size": 4096, "n_layer": 30, "n_head": 32, "vocab_size": 250880}, 7_069_016_064),
    (
        {"model_type": "bloom", "n_embed": 14336, "n_layer": 70, "num_attention_heads": 112, "vocab_size": 250880},
        176_247_271_424,
    ),
    (OPT_125M, 125_239_296),  # facebook/opt-125m
    # microsoft/phi-2
    (
        _llama_like("phi", (2560, 10240, 32, 32, 32, 51200), partial_rotary_factor=0.4, resid_pdrop=0.1),
        2_779_683_840,
    ),
]


def _write_config(folder: Path, content: object) -> Path:
    path = folder / "config.json"
    path.write_text(content if isinstance(content, str) else json.dumps(content), encoding="utf-8")
    return path


@pytest.mark.parametrize(("content", "count"), RELEASED, ids=lambda value: str(value)[:40])
def test_released_configurations_give_released_counts(tmp_path: Path, content: dict[str, Any], count: int) -> None:
    assert parameter_count(read_hf_config(_write_config(tmp_path, content))) == count


def test_llama_and_gpt2_have_their_families_components(tmp_path: Path) -> None:
    llama = read_hf_config(_write_config(tmp_path, LLAMA3_8B))
    assert (model_dimensions(llama).mlp, llama.norm, llama.positions) == (
        MlpType.SWIGLU,
        Norm.RMSNORM,
        PositionEncoding.ROTARY,
    )
    assert not llama.dropout
    gpt2 = read_hf_config(_write_config(tmp_path, GPT2))
    assert (model_dimensions(gpt2).mlp, gpt2.norm, gpt2.positions) == (
        MlpType.GELU,
        Norm.LAYERNORM,
        PositionEncoding.LEARNED,
    )
    assert gpt2.dropout  # 0.1 is GPT2Config's default
    off = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0)
    assert not read_hf_config(_write_config(tmp_path, {**GPT2, **off})).dropout


def test_a_folder_is_read_by_its_config_and_names_the_model(tmp_path: Path) -> None:
    folder = tmp_path / "my-llama"
    folder.mkdir()
    _write_config(folder, LLAMA3_8B)
    model = read_hf_config(folder)
    assert model.name == "my-llama"
    assert parameter_count(model) == parameter_count(load_preset("llama3-8b"))


@pytest.mark.parametrize("key", [key for key in LLAMA3_8B if not key.endswith(("bias", "embeddings", "value_heads"))])
def test_a_missing_key_is_named(tmp_path: Path, key: str) -> None:
    content = {name: value for name, value in LLAMA3_8B.items() if name != key}
    with pytest.raises(InputError, match=rf"config\.json: has no {key}"):
        read_hf_config(_write_config(tmp_path, content))


@pytest.mark.parametrize("value", [0, -1, 2.5, 4096.0, "4096", True, [], {}])
@pytest.mark.parametrize("key", ["hidden_size", "num_hidden_layers", "num_key_value_heads", "head_dim"])
def test_an_invalid_size_is_named(tmp_path: Path, key: str, value: object) -> None:
    with pytest.raises(InputError, match=rf"config\.json: {key} is .*, not a whole number above 0"):
        read_hf_config(_write_config(tmp_path, {**LLAMA3_8B, key: value}))


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        ('{"model_type": "llama", "hidden', "is not valid JSON"),
        ("", "is empty"),
        ("[1, 2]", "holds a list, not a mapping"),
        ({}, "has no model_type; families that are read: llama, mistral"),
        ({"model_type": 7}, "has no model_type"),
        ({**LLAMA3_8B, "model_type": "lama"}, r"model_type 'lama' is not known; did you mean llama\?$"),
        ({**LLAMA3_8B, "model_type": "unheard"}, "model_type .unheard. is not known; choose one of "),
        (
            {**LLAMA3_8B, "num_local_experts": 8},
            "num_local_experts is 8, but MoE models are not read of .*llama",
        ),
        ({**LLAMA3_8B, "model_type": "helium", "num_local_experts": 16}, "not read of model_type 'helium'; of mixtral"),
        ({**LLAMA3_8B, "num_key_value_heads": 5}, "num_key_value_heads 5 does not divide num_attention_heads 32"),
        ({**LLAMA3_8B, "hidden_size": 4100}, "num_attention_heads 32 does not divide hidden_size 4100"),
        ({**LLAMA3_8B, "attention_bias": True}, r"attention_bias True.*mlp_bias False.*llama"),
        ({**LLAMA3_8B, "attention_bias": "no"}, "attention_bias is 'no', not true or false"),
        ({**LLAMA3_8B, "model_type": "mistral", "sliding_window": 0}, "sliding_window is 0, not a whole number above"),
        (
            {**LLAMA3_8B, "model_type": "minicpm4", "kv_lora_rank": 256},
            "latent attention is not read of .*; of deepseek",
        ),
        ({**LLAMA3_8B, "model_type": "qwen3", "layer_types": ["full_attention"]}, "layer_types is 1 values, not one"),
        (
            {**LLAMA3_8B, "model_type": "qwen3", "layer_types": ["linear_attention"] * 32},
            r"layer_types.*layer 0.*'linear_attention'.*full_attention and sliding_attention",
        ),
        ({**LLAMA3_8B, "model_type": "smollm3", "no_rope_layers": [2] * 32}, "no_rope_layers of layer 0 is 2; 0 and 1"),
        ({**LLAMA3_8B, "model_type": "glm4", "partial_rotary_factor": 2}, "partial_rotary_factor is 2, not a number"),
        ({**LLAMA3_8B, "model_type": "qwen2", "max_window_layers": -1}, "max_window_layers is -1, not a whole number"),
        ({**LLAMA3_8B, "model_type": "gemma2", "num_hidden_layers": 10**9}, "num_hidden_layers 1,000,000,000 is too"),
        ({"model_type": "gemma3", "text_config": [1]}, r"text_config is \[1\], not a mapping"),
        # facebook/opt-350m has norms after the sums and a narrower embedding
        ({**OPT_125M, "do_layer_norm_before": False}, "do_layer_norm_before False is not modelled for opt; True is"),
        ({**OPT_125M, "word_embed_proj_dim": 512}, "word_embed_proj_dim 512 is not modelled for opt; 768 is"),
        ({**FALCON_7B, "num_attention_heads": 70}, "num_attention_heads 70 does not divide hidden_size 4544"),
        ({**GPT2, "n_embd": 770}, "n_head 12 does not divide n_embd 770"),
        ({**GPT2, "resid_pdrop": 1.5}, "resid_pdrop is 1.5, not a number from 0 to below 1"),
    ],
)
def test_unsupported_configurations_are_rejected_in_one_sentence(
    tmp_path: Path, content: object, sentence: str
) -> None:
    with pytest.raises(InputError, match=rf"config\.json: .*{sentence}") as refused:
        read_hf_config(_write_config(tmp_path, content))
    assert "\n" not in str(refused.value)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"nowhere\.json: cannot be read"):
        read_hf_config(tmp_path / "nowhere.json")


def test_attention_and_mlp_biases_are_both_read(tmp_path: Path) -> None:
    biased = read_hf_config(_write_config(tmp_path, {**LLAMA3_8B, "attention_bias": True, "mlp_bias": True}))
    # per layer: q 4096, k and v 1024 each, o 4096, gate and up 14336 each, down 4096
    bias_count = 32 * (4096 + 2 * 1024 + 4096 + 2 * 14336 + 4096)
    assert parameter_count(biased) == 8_030_261_248 + bias_count


def _windows(tmp_path: Path, content: dict[str, Any]) -> list[int | None]:
    model = read_hf_config(_write_config(tmp_path, content))
    return [spec.attention.window for spec in layer_specs(model.stack) if spec.attention is not None]


SMALL = (64, 128, 12, 4, 2, 256)


def test_sliding_windows_are_in_the_layers_of_transformers(tmp_path: Path) -> None:
    """As the configuration classes' `layer_types`: sliding where the comment says, counted from layer 0."""
    window, window_key = 512, {"sliding_window": 512}
    assert _windows(tmp_path, _llama_like("mistral", SMALL, **window_key)) == [window] * 12
    assert _windows(tmp_path, _llama_like("mistral", SMALL)) == [4096] * 12  # MistralConfig's default
    assert _windows(tmp_path, _llama_like("mistral", SMALL, sliding_window=None)) == [None] * 12
    assert _windows(tmp_path, _llama_like("gemma2", SMALL, **window_key)) == [window, None] * 6  # (i + 1) % 2
    assert (
        _windows(tmp_path, _llama_like("gemma3_text", SMALL, **window_key)) == [*[window] * 5, None] * 2
    )  # (i + 1) % 6
    switched = _llama_like("qwen2", SMALL, use_sliding_window=True, max_window_layers=8, **window_key)
    assert _windows(tmp_path, switched) == [None] * 8 + [window] * 4  # i >= max_window_layers
    assert _windows(tmp_path, {**switched, "use_sliding_window": False}) == [None] * 12
    layer_types = ["full_attention", "sliding_attention", "full_attention"] * 4
    assert _windows(tmp_path, {**switched, "layer_types": layer_types}) == [None, window, None] * 4
    assert _windows(tmp_path, _llama_like("llama", SMALL, **window_key)) == [None] * 12  # LlamaConfig has no such key


def test_families_have_their_blocks_norms_and_positions(tmp_path: Path) -> None:
    def read(content: dict[str, Any]) -> TransformerModel:
        return read_hf_config(_write_config(tmp_path, content))

    def first(model: TransformerModel) -> FullAttention:
        assert model.distinct_attentions
        return model.distinct_attentions[0]

    gemma2, olmo2 = read(_llama_like("gemma2", SMALL)), read(_llama_like("olmo2", SMALL))
    assert (gemma2.distinct_specs[0].block, first(gemma2).attn_logit_softcapping, gemma2.final_logit_softcapping) == (
        BlockForm.SANDWICH,
        True,
        True,
    )
    assert (olmo2.distinct_specs[0].block, first(olmo2).qk_norm) == (BlockForm.POST_NORM, QkNorm.ALL_HEADS)
    gemma3 = read(GEMMA3_4B)
    assert (first(gemma3).qk_norm, first(gemma3).attn_logit_softcapping, gemma3.final_logit_softcapping) == (
        QkNorm.PER_HEAD,
        False,
        False,
    )
    glm4 = read(_llama_like("glm4", SMALL, attention_bias=True))
    assert (glm4.distinct_specs[0].block, first(glm4).rotary_percent, first(glm4).qkv_bias, glm4.linear_bias) == (
        *(BlockForm.SANDWICH, 0.5, True),
        False,
    )
    smollm3 = read(_llama_like("smollm3", SMALL))
    assert [distinct_attention.rotary_percent for distinct_attention in smollm3.distinct_attentions] == [1.0, 0.0]
    assert [run.count for run in smollm3.stack] == [3, 1] * 3
    assert read(FALCON_7B).distinct_specs[0].block is BlockForm.PARALLEL
    grouped = read({**FALCON_7B, "new_decoder_architecture": True, "num_kv_heads": 71})
    assert grouped.distinct_specs[0].block is BlockForm.PARALLEL_NORMS
    assert read({**FALCON_7B, "alibi": True, "parallel_attn": False}).positions is PositionEncoding.ALIBI
    assert read({**OPT_125M, "dropout": 0.0}).position_table_rows == 2050


@pytest.mark.parametrize("name", ["gemma2-9b", "gemma3-27b", "olmo2-7b", "smollm3-3b", "falcon-7b", "bloom-176b"])
def test_presets_have_the_released_counts(name: str) -> None:
    assert parameter_count(load_preset(name)) in {count for _, count in RELEASED}
