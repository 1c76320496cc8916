"""MoE and MLA models from released config.json files; unsupported values are named."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from clustersim.common.errors import InputError
from clustersim.model.attention_spec import LatentAttention
from clustersim.model.hf_config import read_hf_config
from clustersim.model.layer_stack import DenseMlp, ScoreFunction, layer_specs
from clustersim.model.presets import code_presets, load_preset
from clustersim.model.sparse_attention_spec import DeepseekSparseAttention
from clustersim.model.transformer import TransformerModel, parameter_count

LLAMA4_ROPE = [1, 1, 1, 0]

# The released files' keys that define the architecture, by the equal preset.
RELEASED: dict[str, dict[str, Any]] = {
    "mixtral-8x7b": {
        **{"model_type": "mixtral", "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32},
        **{"num_attention_heads": 32, "num_key_value_heads": 8, "num_local_experts": 8, "num_experts_per_tok": 2},
        **{"vocab_size": 32000, "max_position_embeddings": 32768, "sliding_window": None, "tie_word_embeddings": False},
    },
    "qwen2-57b-a14b": {
        **{"model_type": "qwen2_moe", "hidden_size": 3584, "intermediate_size": 18944, "num_hidden_layers": 28},
        **{"num_attention_heads": 28, "num_key_value_heads": 4, "num_experts": 64, "num_experts_per_tok": 8},
        **{"moe_intermediate_size": 2560, "shared_expert_intermediate_size": 20480, "decoder_sparse_step": 1},
        **{"vocab_size": 151936, "max_position_embeddings": 131072, "use_sliding_window": False},
        **{"max_window_layers": 28, "sliding_window": 65536, "tie_word_embeddings": False},
    },
    "qwen3-30b-a3b": {
        **{"model_type": "qwen3_moe", "hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 48},
        **{"num_attention_heads": 32, "num_key_value_heads": 4, "num_experts": 128, "num_experts_per_tok": 8},
        **{"moe_intermediate_size": 768, "decoder_sparse_step": 1, "mlp_only_layers": [], "head_dim": 128},
        **{"vocab_size": 151936, "max_position_embeddings": 40960, "attention_bias": False, "sliding_window": None},
    },
    "gpt-oss-20b": {
        **{"model_type": "gpt_oss", "hidden_size": 2880, "intermediate_size": 2880, "num_hidden_layers": 24},
        **{"num_attention_heads": 64, "num_key_value_heads": 8, "num_local_experts": 32, "num_experts_per_tok": 4},
        **{"head_dim": 64, "sliding_window": 128, "layer_types": ["sliding_attention", "full_attention"] * 12},
        **{"vocab_size": 201088, "max_position_embeddings": 131072, "attention_bias": True},
    },
    "llama4-maverick": {
        "model_type": "llama4",
        "text_config": {
            **{"hidden_size": 5120, "intermediate_size": 8192, "intermediate_size_mlp": 16384, "head_dim": 128},
            **{"num_hidden_layers": 48, "num_attention_heads": 40, "num_key_value_heads": 8, "vocab_size": 202048},
            **{"num_local_experts": 128, "num_experts_per_tok": 1, "interleave_moe_layer_step": 2},
            **{"attention_chunk_size": 8192, "no_rope_layers": LLAMA4_ROPE * 12, "max_position_embeddings": 262144},
        },
    },
    "glm-4.5": {
        **{"model_type": "glm4_moe", "hidden_size": 5120, "intermediate_size": 12288, "num_hidden_layers": 92},
        **{"num_attention_heads": 96, "num_key_value_heads": 8, "n_routed_experts": 160, "num_experts_per_tok": 8},
        **{"moe_intermediate_size": 1536, "n_shared_experts": 1, "first_k_dense_replace": 3, "n_group": 1},
        **{"topk_group": 1, "use_qk_norm": True, "attention_bias": True, "partial_rotary_factor": 0.5},
        **{"vocab_size": 151552, "max_position_embeddings": 131072, "head_dim": 128, "num_nextn_predict_layers": 1},
    },
    "olmoe-1b-7b": {
        **{"model_type": "olmoe", "hidden_size": 2048, "intermediate_size": 1024, "num_hidden_layers": 16},
        **{"num_attention_heads": 16, "num_key_value_heads": 16, "num_experts": 64, "num_experts_per_tok": 8},
        **{"vocab_size": 50304, "max_position_embeddings": 4096, "clip_qkv": None},
    },
    "dbrx": {
        **{"model_type": "dbrx", "d_model": 6144, "n_heads": 48, "n_layers": 40, "vocab_size": 100352},
        **{"max_seq_len": 32768, "attn_config": {"kv_n_heads": 8, "clip_qkv": 8}},
        "ffn_config": {"ffn_hidden_size": 10752, "moe_num_experts": 16, "moe_top_k": 4},
    },
    "deepseek-v2-lite": {
        **{"model_type": "deepseek_v2", "hidden_size": 2048, "intermediate_size": 10944, "num_hidden_layers": 27},
        **{"num_attention_heads": 16, "num_key_value_heads": 16, "n_routed_experts": 64, "num_experts_per_tok": 6},
        **{"moe_intermediate_size": 1408, "n_shared_experts": 2, "first_k_dense_replace": 1, "moe_layer_freq": 1},
        **{"n_group": 1, "topk_group": 1, "topk_method": "greedy", "scoring_func": "softmax", "q_lora_rank": None},
        **{"kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128},
        **{"vocab_size": 102400, "max_position_embeddings": 163840},
    },
    "deepseek-v3": {
        **{"model_type": "deepseek_v3", "hidden_size": 7168, "intermediate_size": 18432, "num_hidden_layers": 61},
        **{"num_attention_heads": 128, "num_key_value_heads": 128, "n_routed_experts": 256, "num_experts_per_tok": 8},
        **{"moe_intermediate_size": 2048, "n_shared_experts": 1, "first_k_dense_replace": 3, "moe_layer_freq": 1},
        **{"n_group": 8, "topk_group": 4, "topk_method": "noaux_tc", "scoring_func": "sigmoid", "q_lora_rank": 1536},
        **{"kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128},
        **{"vocab_size": 129280, "max_position_embeddings": 163840, "num_nextn_predict_layers": 1},
    },
    "kimi-k2": {
        **{"model_type": "kimi_k2", "hidden_size": 7168, "intermediate_size": 18432, "num_hidden_layers": 61},
        **{"num_attention_heads": 64, "num_key_value_heads": 64, "n_routed_experts": 384, "num_experts_per_tok": 8},
        **{"moe_intermediate_size": 2048, "n_shared_experts": 1, "first_k_dense_replace": 1, "moe_layer_freq": 1},
        **{"n_group": 1, "topk_group": 1, "topk_method": "noaux_tc", "scoring_func": "sigmoid", "q_lora_rank": 1536},
        **{"kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128},
        **{"vocab_size": 163840, "max_position_embeddings": 131072, "num_nextn_predict_layers": 0},
    },
}
QWEN3, V3, LLAMA4 = RELEASED["qwen3-30b-a3b"], RELEASED["deepseek-v3"], RELEASED["llama4-maverick"]["text_config"]


def _read(folder: Path, content: dict[str, Any], name: str = "config") -> TransformerModel:
    path = folder / f"{name}.json"
    path.write_text(json.dumps(content), encoding="utf-8")
    return read_hf_config(path)


def _layer_kinds(model: TransformerModel) -> str:
    return "".join("d" if isinstance(spec.mlp, DenseMlp) else "m" for spec in layer_specs(model.stack))


@pytest.mark.parametrize(("name", "content"), RELEASED.items())
def test_a_released_config_equals_the_preset(tmp_path: Path, name: str, content: dict[str, Any]) -> None:
    model = _read(tmp_path, content, name)
    assert replace(model, mtp_layers=0) == load_preset(name), "a preset's further layers are told apart"
    assert code_presets()[name].mtp_layers == model.mtp_layers == content.get("num_nextn_predict_layers", 0)


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ({**QWEN3, "num_hidden_layers": 6, "decoder_sparse_step": 2}, "dmdmdm"),  # (layer + 1) % step
        ({**QWEN3, "num_hidden_layers": 6, "mlp_only_layers": [0, 5]}, "dmmmmd"),
        ({**V3, "num_hidden_layers": 7, "moe_layer_freq": 2}, "ddddmdm"),  # layer % freq
        ({**V3, "num_hidden_layers": 4, "first_k_dense_replace": 0}, "mmmm"),
        ({**LLAMA4, "model_type": "llama4_text", "num_hidden_layers": 4, "no_rope_layers": LLAMA4_ROPE}, "dmdm"),
        (
            {**LLAMA4, "model_type": "llama4_text", "num_hidden_layers": 4, "no_rope_layers": None, "moe_layers": [3]},
            "dddm",
        ),
    ],
)
def test_moe_layers_are_those_of_transformers(tmp_path: Path, content: dict[str, Any], expected: str) -> None:
    assert _layer_kinds(_read(tmp_path, content)) == expected


def test_routers_and_shared_experts_are_read(tmp_path: Path) -> None:
    (moe,) = _read(tmp_path, {**V3, "n_shared_experts": 3}).distinct_moes
    assert moe.shared == 3 * 2048
    assert (moe.router.scores, moe.router.num_groups, moe.router.group_topk) == (ScoreFunction.SIGMOID, 8, 4)
    (unlimited,) = _read(
        tmp_path, {**V3, "topk_group": 8, "scoring_func": "softmax", "n_shared_experts": None}
    ).distinct_moes
    assert (unlimited.shared, unlimited.router.scores, unlimited.router.group_topk) == (0, ScoreFunction.SOFTMAX, None)


def test_mla_is_read(tmp_path: Path) -> None:
    assert _read(tmp_path, V3).distinct_attentions == (LatentAttention(128, 1536, 512, 128, 64, 128),)
    assert _read(tmp_path, {**V3, "q_lora_rank": None}).distinct_attentions == (
        LatentAttention(128, None, 512, 128, 64, 128),
    )


def test_windows_and_chunks_are_in_the_layers_of_transformers(tmp_path: Path) -> None:
    def windows(content: dict[str, Any]) -> list[int | None]:
        model = _read(tmp_path, content)
        return [spec.attention.window for spec in layer_specs(model.stack) if spec.attention is not None]

    oss = {key: value for key, value in RELEASED["gpt-oss-20b"].items() if key != "layer_types"}
    assert windows(oss) == [128, None] * 12  # (i + 1) % 2
    assert windows(RELEASED["llama4-maverick"]) == [8192, 8192, 8192, None] * 12  # no_rope_layers is 0: all keys


def test_the_parameters_of_a_small_moe_model_by_hand(tmp_path: Path) -> None:
    """Two layers of 8, 4 experts of 3, with biases: q, k, v, o; router; gate, up and down; norms; two tables of 16."""
    content = {
        **RELEASED["gpt-oss-20b"],
        **{"hidden_size": 8, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 4},
        **{"intermediate_size": 3, "num_local_experts": 4, "num_experts_per_tok": 2, "vocab_size": 16},
        "layer_types": ["sliding_attention", "full_attention"],
    }
    attention = (8 * 8 + 8) + 2 * (8 * 4 + 4) + (8 * 8 + 8) + 2  # and a sink of each head
    experts = 4 * (8 + 1) + 4 * (2 * (8 * 3 + 3) + 3 * 8 + 8)
    assert parameter_count(_read(tmp_path, content)) == 2 * (attention + experts + 2 * 8) + 8 + 2 * 16 * 8


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        ({"model_type": "bamba", "mamba_d_state": 16}, "mamba_d_state is 16: a state-space layer"),
        ({**QWEN3, "model_type": "olmo_hybrid", "linear_num_key_heads": 16}, "16: a layer with linear attention"),
        ({**V3, "index_topk": 2048}, "index_topk is 2048: sparse attention"),
        ({**V3, "model_type": "deepseek_v32", "index_topk": -1}, "index_topk is -1"),
        (
            {**V3, "model_type": "glm_moe_dsa", "index_topk_freq": 4},
            "index_topk_freq 4 is not modelled for glm_moe_dsa",
        ),
        ({**V3, "model_type": "glm_moe_dsa", "indexer_types": ["full", "shared"]}, "layers that share the keys"),
        ({**V3, "model_type": "glm_moe_dsa", "index_topk_pattern": "FFS"}, "layers that share the keys"),
        ({**V3, "num_experts_per_tok": 300}, r"num_experts_per_tok 300.*n_routed_experts 256.*at most 256"),
        ({**V3, "n_group": 7}, "n_group 7 does not divide n_routed_experts 256"),
        ({**V3, "scoring_func": "tanh"}, "scoring_func 'tanh' is not modelled; softmax and sigmoid are"),
        ({**V3, "attention_bias": True}, r"attention_bias True.*deepseek_v3; False"),
        ({**V3, "first_k_dense_replace": -1}, "first_k_dense_replace is -1, not a whole number from 0"),
        ({**V3, "num_hidden_layers": 10**9}, "num_hidden_layers 1,000,000,000 is too large; 10,000"),
        ({key: value for key, value in V3.items() if key != "kv_lora_rank"}, "has no kv_lora_rank"),
        ({key: value for key, value in QWEN3.items() if key != "num_experts"}, "has no num_experts"),
        ({**QWEN3, "mlp_only_layers": [48]}, r"mlp_only_layers is \[48\], not a list of layers from 0 to 47"),
        ({**QWEN3, "mlp_only_layers": 3}, "mlp_only_layers is 3, not a list of layers"),
        ({"model_type": "dbrx", "d_model": 64, "n_heads": 4}, "attn_config is None, not a mapping"),
    ],
)
def test_unsupported_configurations_are_rejected_in_one_sentence(
    tmp_path: Path, content: dict[str, Any], sentence: str
) -> None:
    with pytest.raises(InputError, match=rf"config\.json: .*{sentence}") as refused:
        _read(tmp_path, content)
    assert "\n" not in str(refused.value)


def test_a_file_of_deepseek_v3_2_is_its_preset(tmp_path: Path) -> None:
    """Sizes of the indexer are those of the family where the file leaves them out; GLM-5's has half as many heads."""
    content = {**V3, "model_type": "deepseek_v32"}
    assert _read(tmp_path, content).stack == load_preset("deepseek-v3.2").stack
    (glm,) = _read(tmp_path, {**content, "model_type": "glm_moe_dsa"}).distinct_mixers
    assert isinstance(glm, DeepseekSparseAttention)
    assert (glm.index_heads, glm.index_head_dim, glm.index_topk) == (32, 128, 2048)
