"""Families of 2023 to 2026 give their published parameter counts, alone and inside multimodal models."""

import json
from pathlib import Path
from typing import Any

import pytest

from clustersim.common.errors import InputError
from clustersim.model.attention_spec import FullAttention
from clustersim.model.hf_config import MODEL_READERS, read_hf_config
from clustersim.model.hf_missing import MISSING_LAYERS
from clustersim.model.hf_wrapped import TEXT_FAMILIES
from clustersim.model.layer_stack import BlockForm, MoeMlp, layer_specs
from clustersim.model.presets import load_preset
from clustersim.model.transformer import (
    Norm,
    PositionEncoding,
    TransformerModel,
    active_parameter_count,
    parameter_count,
)

_SIZES = (
    "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "vocab_size",
)  # fmt: skip
Sizes = tuple[int, int, int, int, int, int]


def _config(family: str, sizes: Sizes, **others: Any) -> dict[str, Any]:
    return {
        "model_type": family, "max_position_embeddings": 4096, **dict(zip(_SIZES, sizes, strict=True)), **others,
    }  # fmt: skip


BAICHUAN_13B = {
    **{
        key: value for key, value in _config("baichuan", (5120, 13696, 40, 40, 40, 125696)).items() if "max_" not in key
    },
    "model_max_length": 4096,
}
ERNIE_21B = _config(
    "ernie4_5_moe", (2560, 12288, 28, 20, 4, 103424), moe_num_experts=64, moe_k=6, moe_intermediate_size=1536,
    moe_num_shared_experts=2, moe_layer_start_index=1, moe_layer_end_index=-1, moe_layer_interval=1,
)  # fmt: skip
HUNYUAN_A13B = _config(
    "hunyuan_v1_moe", (4096, 3072, 32, 32, 8, 128167), moe_intermediate_size=[3072] * 32, num_experts=64,
    moe_topk=[8] * 32, num_shared_expert=[1] * 32, tie_word_embeddings=True, head_dim=128,
)  # fmt: skip
MINIMAX_M2 = _config(
    "minimax_m2", (3072, 1536, 62, 48, 8, 200064), head_dim=128, rotary_dim=64, num_local_experts=256,
    num_experts_per_tok=8, scoring_func="sigmoid", num_mtp_modules=3, use_mtp=False, shared_intermediate_size=0,
)  # fmt: skip
LING_LITE = _config(
    "bailing_moe", (2048, 5632, 28, 16, 4, 126464), num_experts=64, num_experts_per_tok=6, num_shared_experts=2,
    moe_intermediate_size=1408, head_dim=128, first_k_dense_replace=0,
)  # fmt: skip
LING_MINI = _config(
    "bailing_moe_v2", (2048, 5120, 20, 16, 4, 157184), num_experts=256, num_experts_per_tok=8, num_shared_experts=1,
    moe_intermediate_size=512, head_dim=128, first_k_dense_replace=1, n_group=8, topk_group=4,
)  # fmt: skip
EXAONE_32B = _config(
    "exaone4", (5120, 27392, 64, 40, 8, 102400), sliding_window=4096, sliding_window_pattern="LLLG", head_dim=128
)
DOTS1 = _config(
    "dots1", (4096, 10944, 62, 32, 32, 152064), n_routed_experts=128, n_shared_experts=2, num_experts_per_tok=6,
    moe_intermediate_size=1408, first_k_dense_replace=1, scoring_func="noaux_tc",
)  # fmt: skip
GLM_FLASH = _config(
    "glm4_moe_lite", (2048, 10240, 47, 20, 20, 154880), q_lora_rank=768, kv_lora_rank=512, qk_nope_head_dim=192,
    qk_rope_head_dim=64, v_head_dim=256, n_routed_experts=64, n_shared_experts=1, num_experts_per_tok=4,
    moe_intermediate_size=1536, first_k_dense_replace=1,
)  # fmt: skip
MIMO = _config("mimo", (4096, 11008, 36, 32, 8, 151680), attention_bias=True, num_nextn_predict_layers=1, head_dim=128)
COMMAND_A = _config("cohere2", (12288, 36864, 64, 96, 8, 256000), sliding_window=4096, sliding_window_pattern=4)

# Dimensions of the released config.json, counts of the safetensors index or the model card.
RELEASED: dict[str, tuple[dict[str, Any], int]] = {
    "c4ai-command-r-v01": (_config("cohere", (8192, 22528, 40, 64, 64, 256000)), 34_980_831_232),
    "c4ai-command-r-plus": (
        _config("cohere", (12288, 33792, 64, 96, 8, 256000), use_qk_norm=True),
        103_810_674_688,
    ),
    "c4ai-command-r7b-12-2024": (
        _config("cohere2", (4096, 14336, 32, 32, 8, 256000), sliding_window=4096),
        8_028_033_024,
    ),
    "c4ai-command-a-03-2025": (COMMAND_A, 111_057_580_032),
    "pythia-1.4b": (_config("gpt_neox", (2048, 8192, 24, 16, 16, 50304)), 1_414_647_808),
    "pythia-12b": (_config("gpt_neox", (5120, 20480, 36, 40, 40, 50688)), 11_846_072_320),
    # Black et al. 2022, arXiv:2204.06745, section 2
    "gpt-neox-20b": (_config("gpt_neox", (6144, 24576, 44, 64, 64, 50432)), 20_554_567_680),
    "stablelm-3b-4e1t": (_config("stablelm", (2560, 6912, 32, 32, 32, 50304)), 2_795_443_200),
    "stablelm-2-1_6b": (_config("stablelm", (2048, 5632, 24, 32, 32, 100352), use_qkv_bias=True), 1_644_515_328),
    "starcoder2-3b": (_config("starcoder2", (3072, 12288, 30, 24, 2, 49152), sliding_window=4096), 3_030_371_328),
    "starcoder2-7b": (_config("starcoder2", (4608, 18432, 32, 36, 4, 49152), sliding_window=4096), 7_173_923_840),
    # the released weights have the logits matrix, which is tied, once more
    "starcoder2-15b": (_config("starcoder2", (6144, 24576, 40, 48, 4, 49152)), 15_957_889_024 - 49152 * 6144),
    "OLMo-7B-hf": (_config("olmo", (4096, 11008, 32, 32, 32, 50304)), 6_888_095_744),
    "OLMo-1B-hf": (_config("olmo", (2048, 8192, 16, 16, 16, 50304), tie_word_embeddings=True), 1_176_764_416),
    "Baichuan2-7B-Base": (_config("baichuan", (4096, 11008, 32, 32, 32, 125696)), 7_505_973_248),
    "Baichuan2-13B-Base": (BAICHUAN_13B, 13_896_668_160),
    "internlm2-7b": (_config("internlm2", (4096, 14336, 32, 32, 8, 92544), bias=False), 7_737_708_544),
    "internlm2-20b": (_config("internlm2", (6144, 16384, 48, 48, 8, 92544), bias=False), 19_861_149_696),
    "internlm3-8b-instruct": (
        _config("internlm3", (4096, 10240, 48, 32, 2, 128512), head_dim=128, qkv_bias=False, bias=False),
        8_804_241_408,
    ),
    "granite-3.0-2b-base": (
        _config("granite", (2048, 8192, 40, 32, 8, 49155), tie_word_embeddings=True),
        2_533_531_648,
    ),
    "granite-3.0-8b-base": (
        _config("granite", (4096, 12800, 40, 32, 8, 49155), tie_word_embeddings=True),
        8_170_848_256,
    ),
    "granite-3.0-1b-a400m-base": (
        _config(
            "granitemoe", (1024, 512, 24, 16, 8, 49155), num_local_experts=32, num_experts_per_tok=8,
            tie_word_embeddings=True,
        ),
        1_334_628_352,
    ),
    "ERNIE-4.5-0.3B-PT": (_config("ernie4_5", (1024, 3072, 18, 16, 2, 103424), head_dim=128), 360_748_032),
    # less the correction biases of 27 routers, which are not trained by gradients
    "ERNIE-4.5-21B-A3B-PT": (ERNIE_21B, 21_825_437_888 - 27 * 64),
    "Hunyuan-A13B-Instruct": (HUNYUAN_A13B, 80_393_183_232),
    "Hunyuan-A13B": ({**HUNYUAN_A13B, "model_type": "hunyuan", "use_qk_norm": True, "use_mla": False}, 80_393_183_232),
    "Seed-OSS-36B-Base": (_config("seed_oss", (5120, 27648, 64, 80, 8, 155136), head_dim=128), 36_151_104_512),
    "Olmo-3-1025-7B": (_config("olmo3", (4096, 11008, 32, 32, 32, 100278), sliding_window=4096), 7_298_011_136),
    "Olmo-3-1125-32B": (_config("olmo3", (5120, 27648, 64, 40, 8, 100278), sliding_window=4096), 32_233_522_176),
    "EXAONE-4.0-32B": (EXAONE_32B, 32_003_216_384),
    "EXAONE-4.0-1.2B": (
        _config("exaone4", (2048, 4096, 30, 32, 8, 102400), tie_word_embeddings=True, sliding_window=None, head_dim=64),
        1_279_391_488,
    ),
    "MiniMax-M2": (MINIMAX_M2, 228_689_748_992),
    "Ling-lite": (LING_LITE, 16_801_974_272),
    "Ling-mini-2.0": (LING_MINI, 16_255_643_392 - 19 * 256),
}  # fmt: skip


def _read(folder: Path, content: dict[str, Any]) -> TransformerModel:
    path = folder / "config.json"
    path.write_text(json.dumps(content), encoding="utf-8")
    return read_hf_config(path)


@pytest.mark.parametrize("name", RELEASED)
def test_a_released_configuration_has_its_published_count(tmp_path: Path, name: str) -> None:
    content, count = RELEASED[name]
    assert parameter_count(_read(tmp_path, content)) == count


QWEN3_8B = _config("qwen3_vl_text", (4096, 12288, 36, 32, 8, 151936), head_dim=128)
MISTRAL_24B = _config("mistral", (5120, 32768, 40, 32, 8, 131072), head_dim=128, sliding_window=None)
WRAPPED: dict[str, tuple[dict[str, Any], int]] = {
    # the text model of Qwen3-VL-8B is Qwen3-8B, that of Qwen2.5-VL-7B Qwen2.5-7B, and so on
    "Qwen3-VL-8B": ({"model_type": "qwen3_vl", "text_config": QWEN3_8B, "vision_config": {}}, 8_190_735_360),
    "Qwen3-VL-2B": (
        {
            "model_type": "qwen3_vl",
            "tie_word_embeddings": True,
            "text_config": _config("qwen3_vl_text", (2048, 6144, 28, 16, 8, 151936), head_dim=128),
        },
        1_720_574_976,
    ),
    "Qwen2.5-VL-7B": (
        {**_config("qwen2_5_vl", (3584, 18944, 28, 28, 4, 152064)), "vision_config": {"depth": 32}},
        7_615_616_512,
    ),
    "Mistral-Small-3.1-24B": (
        {"model_type": "mistral3", "text_config": MISTRAL_24B, "vision_config": {}},
        23_572_403_200,
    ),
    "InternVL3-8B": (
        {"model_type": "internvl_chat", "llm_config": _config("qwen2", (3584, 18944, 28, 28, 4, 151674))},
        7_615_616_512 - 2 * (152064 - 151674) * 3584,
    ),
}


@pytest.mark.parametrize("name", WRAPPED)
def test_the_text_model_of_a_multimodal_one_is_read(tmp_path: Path, name: str) -> None:
    content, count = WRAPPED[name]
    assert parameter_count(_read(tmp_path, content)) == count


def test_the_text_model_of_kimi_k25_is_kimi_k2(tmp_path: Path) -> None:
    text = {
        "model_type": "kimi_k2", "hidden_size": 7168, "intermediate_size": 18432, "num_hidden_layers": 61,
        "num_attention_heads": 64, "num_key_value_heads": 64, "n_routed_experts": 384, "num_experts_per_tok": 8,
        "moe_intermediate_size": 2048, "n_shared_experts": 1, "first_k_dense_replace": 1, "moe_layer_freq": 1,
        "n_group": 1, "topk_group": 1, "scoring_func": "sigmoid", "q_lora_rank": 1536, "kv_lora_rank": 512,
        "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128, "vocab_size": 163840,
        "max_position_embeddings": 262144,
    }  # fmt: skip
    model = _read(tmp_path, {"model_type": "kimi_k25", "text_config": text, "tie_word_embeddings": False})
    assert parameter_count(model) == parameter_count(load_preset("kimi-k2"))


def test_a_multimodal_configuration_without_a_text_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="text_config"):
        _read(tmp_path, {"model_type": "internvl", "hidden_size": 64})
    with pytest.raises(InputError, match="model_type"):
        _read(tmp_path, {"model_type": "mistral3", "text_config": {"hidden_size": 64}})


@pytest.mark.parametrize(("content", "billions"), [(DOTS1, 142), (GLM_FLASH, 30), (MIMO, 7.83)])
def test_a_configuration_has_the_count_that_its_card_rounds(
    tmp_path: Path, content: dict[str, Any], billions: float
) -> None:
    """MiMo's 7.83 billion have its layer for multi-token prediction."""
    assert parameter_count(_read(tmp_path, content)) / 1e9 == pytest.approx(billions, rel=0.01)


@pytest.mark.parametrize(
    ("content", "active"),
    [
        # "A13B" with embedding, MiniMax's "10 billion activated" without its two matrices of 0.6 billion each
        (HUNYUAN_A13B, 13e9),
        (ERNIE_21B, 3.2e9),
        (MINIMAX_M2, 10e9 + 200064 * 3072),
        (LING_LITE, 2.75e9),
        (LING_MINI, 1.4e9),
        (DOTS1, 14e9),
    ],
)
def test_active_parameters_are_as_published(tmp_path: Path, content: dict[str, Any], active: float) -> None:
    assert active_parameter_count(_read(tmp_path, content)) == pytest.approx(active, rel=0.06)


def _attentions(model: TransformerModel) -> list[FullAttention]:
    return [spec.attention for spec in layer_specs(model.stack) if isinstance(spec.attention, FullAttention)]


def test_layers_without_a_window_have_no_positions(tmp_path: Path) -> None:
    """Command A and EXAONE 4: three layers with a window and rotary positions, then one with neither."""
    for content in (COMMAND_A, EXAONE_32B):
        layers = _attentions(_read(tmp_path, content))
        assert [layer.window for layer in layers] == [4096, 4096, 4096, None] * 16
        assert [layer.rotary_percent for layer in layers] == [1.0, 1.0, 1.0, 0.0] * 16
    olmo3 = _attentions(_read(tmp_path, RELEASED["Olmo-3-1025-7B"][0]))
    assert [layer.window for layer in olmo3] == [4096, 4096, 4096, None] * 8
    assert {layer.rotary_percent for layer in olmo3} == {1.0}


def test_blocks_and_norms_are_the_families(tmp_path: Path) -> None:
    def read(name: str) -> TransformerModel:
        return _read(tmp_path, RELEASED[name][0])

    assert read("c4ai-command-r-v01").stack[0].spec.block is BlockForm.PARALLEL
    assert read("gpt-neox-20b").stack[0].spec.block is BlockForm.PARALLEL_NORMS
    sequential = _read(tmp_path, {**RELEASED["pythia-1.4b"][0], "use_parallel_residual": False})
    assert sequential.stack[0].spec.block is BlockForm.PRE_NORM
    assert _attentions(read("pythia-1.4b"))[0].rotary_percent == 0.25
    quarter = _read(tmp_path, {**RELEASED["pythia-1.4b"][0], "rotary_pct": 0.5})
    assert _attentions(quarter)[0].rotary_percent == 0.5
    assert _attentions(read("MiniMax-M2"))[0].rotary_percent == 0.5
    assert read("Baichuan2-13B-Base").positions is PositionEncoding.ALIBI
    assert read("Baichuan2-7B-Base").positions is PositionEncoding.ROTARY
    assert (read("OLMo-7B-hf").norm, read("OLMo-7B-hf").layernorm_vectors) == (Norm.LAYERNORM, 0)
    assert read("Seed-OSS-36B-Base").dropout  # 0.1 is SeedOssConfig's default


def test_mtp_layers_of_minimax_count_where_it_trains_them(tmp_path: Path) -> None:
    assert _read(tmp_path, MINIMAX_M2).mtp_layers == 0
    assert _read(tmp_path, {**MINIMAX_M2, "use_mtp": True}).mtp_layers == 3


def test_a_shared_expert_of_width_zero_is_none(tmp_path: Path) -> None:
    content = _config(
        "qwen2_moe", (64, 128, 2, 4, 2, 256), num_experts=8, num_experts_per_tok=2, moe_intermediate_size=32,
        shared_expert_intermediate_size=0,
    )  # fmt: skip
    mlps = [spec.mlp for spec in layer_specs(_read(tmp_path, content).stack)]
    assert all(isinstance(mlp, MoeMlp) and mlp.shared == 0 and not mlp.shared_gate for mlp in mlps)


@pytest.mark.parametrize(
    ("content", "key"),
    [
        (_config("internlm", (64, 128, 2, 4, 4, 256)), "bias"),  # InternLM 1's default
        ({**RELEASED["c4ai-command-r-v01"][0], "attention_bias": True}, "attention_bias"),
        ({**ERNIE_21B, "moe_layer_end_index": 20}, "moe_layer_end_index"),
        ({**HUNYUAN_A13B, "moe_topk": [8] * 31 + [4]}, "moe_topk"),
        ({**HUNYUAN_A13B, "use_cla": True}, "use_cla"),
        ({**MINIMAX_M2, "shared_intermediate_size": 64}, "shared_intermediate_size"),
        ({**RELEASED["Seed-OSS-36B-Base"][0], "attention_out_bias": True}, "attention_out_bias"),
        ({**LING_MINI, "score_function": "softmax"}, "score_function"),
        ({**EXAONE_32B, "sliding_window_pattern": "LXG"}, "sliding_window_pattern"),
    ],
)
def test_what_a_family_has_and_operators_have_not_is_refused(tmp_path: Path, content: dict[str, Any], key: str) -> None:
    with pytest.raises(InputError, match=key):
        _read(tmp_path, content)


@pytest.mark.parametrize(
    ("family", "layer"),
    [
        ("lfm2", "a short gated convolution"),
        ("mllama", "cross-attention to the states of an image encoder"),
        ("bert", "attention in both directions"),
        ("rwkv6", "time mixing"),
    ],
)
def test_a_family_that_cannot_be_said_names_the_layer_that_is_missing(tmp_path: Path, family: str, layer: str) -> None:
    with pytest.raises(InputError, match=f"model_type '{family}' is not simulated, for want of .*{layer}") as refused:
        _read(tmp_path, {**_config("llama", (64, 128, 2, 4, 2, 256)), "model_type": family})
    assert "\n" not in str(refused.value)


def test_no_family_is_both_read_and_missing() -> None:
    assert not set(MISSING_LAYERS) & {*MODEL_READERS, *TEXT_FAMILIES}


@pytest.mark.parametrize(
    ("family", "section", "inner"),
    [
        ("llava_next", "text_config", None),
        ("kimi_vl", "text_config", None),
        ("deepseek_vl_v2", "language_config", None),
        ("qwen2_5_omni", "text_config", "thinker_config"),
    ],
)
def test_text_models_inside_multimodal_ones_are_read(
    tmp_path: Path, family: str, section: str, inner: str | None
) -> None:
    mla = {"q_lora_rank": 8, "kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "v_head_dim": 16}
    experts = {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "n_shared_experts": 1}
    text_family = {"kimi_vl": "deepseek_v3", "deepseek_vl_v2": "deepseek_v2", "qwen2_5_omni": "qwen2"}.get(
        family, "llama"
    )
    text = (
        _config(text_family, (64, 128, 2, 4, 2, 256), **mla | experts)
        if "deepseek" in text_family
        else _config(text_family, (64, 128, 2, 4, 2, 256))
    )
    part = {section: text}
    whole = {"model_type": family, **({inner: part} if inner else part)}
    wrapped, alone = _read(tmp_path, whole), _read(tmp_path, text)
    assert parameter_count(wrapped) == parameter_count(alone)


@pytest.mark.parametrize(
    ("content", "key"),
    [
        (
            {"model_type": "mpt", "d_model": 64, "n_heads": 4, "n_layers": 2, "vocab_size": 256, "attn_config": 3},
            "attn_config",
        ),
        (
            {"model_type": "gptj", "n_embd": 64, "n_head": 5, "n_layer": 2, "vocab_size": 256, "n_positions": 8},
            "n_head",
        ),
        ({"model_type": "chatglm", "rmsnorm": False}, "rmsnorm"),
        ({"model_type": "qwen", "no_bias": False}, "no_bias"),
        ({"model_type": "mamba", "use_bias": True}, "use_bias"),
        ({"model_type": "nemotron", "attention_bias": True}, "attention_bias"),
    ],
)
def test_what_newer_readers_cannot_say_is_refused(tmp_path: Path, content: dict[str, Any], key: str) -> None:
    with pytest.raises(InputError, match=key):
        _read(tmp_path, content)
