"""Published mixture-of-experts models that can be named, with the sources of their dimensions.

Multi-token prediction layers (DeepSeek-V3, GLM-4.5) are listed separately from the preset's model.
Grok-1's gated GELU is treated as SwiGLU; DBRX's norms have biases here, which the released model's have
not (`hf_dbrx`).
"""

from typing import Final

from clustersim.model.attention_spec import FullAttention
from clustersim.model.layer_stack import BlockForm, LayerGroup, LayerSpec, MlpType, MoeMlp
from clustersim.model.preset_builder import ModelPreset, config_dimensions, preset_from_config
from clustersim.model.transformer import Norm, PositionEncoding, TransformerModel


def _qwen_experts(count: int, top_k: int, ffn: int) -> dict[str, int]:
    """MoE dimensions by the keys of Qwen's config.json files."""
    return {"num_experts": count, "num_experts_per_tok": top_k, "moe_intermediate_size": ffn}


def _deepseek_experts(*expert_dimensions: int, shared_count: int, dense_layer_count: int) -> dict[str, int | None]:
    """DeepSeek's head and MoE dimensions.

    expert_dimensions: routed experts, experts per token, expert width.
    """
    keys = ("n_routed_experts", "num_experts_per_tok", "moe_intermediate_size")
    heads = {"kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128}
    layer_keys = {"n_shared_experts": shared_count, "first_k_dense_replace": dense_layer_count}
    return {**heads, **dict(zip(keys, expert_dimensions, strict=True)), **layer_keys, "q_lora_rank": 1536}


_GPT_OSS: Final = {"num_experts_per_tok": 4, "head_dim": 64, "sliding_window": 128, "attention_bias": True}
_LLAMA4: Final = {"num_experts_per_tok": 1, "intermediate_size_mlp": 16384, "head_dim": 128}
_GLM45: Final = {
    "n_routed_experts": 160, "num_experts_per_tok": 8, "moe_intermediate_size": 1536, "n_shared_experts": 1,
    "first_k_dense_replace": 3, "attention_bias": True, "use_qk_norm": True, "num_nextn_predict_layers": 1,
}  # fmt: skip
_GROK_MOE: Final = MoeMlp(experts=8, top_k=2, ffn=32768, form=MlpType.SWIGLU)  # gated GELU
_GROK1: Final = TransformerModel(
    name="grok-1",
    stack=(LayerGroup(LayerSpec(FullAttention(48, 8, 128), _GROK_MOE, BlockForm.SANDWICH), 64),),
    hidden=6144,
    vocab=131072,
    max_positions=8192,
    norm=Norm.RMSNORM,
    positions=PositionEncoding.ROTARY,
    tied_embeddings=True,
    linear_bias=False,
)

MOE_PRESETS: Final = (
    preset_from_config(
        "mixtral-8x7b",
        "mixtral",
        "Jiang et al. 2024, arXiv:2401.04088, Table 1; mistralai/Mixtral-8x7B-v0.1",
        config_dimensions(32, 4096, 14336, 32, 8, 32000, 32768) | {"num_local_experts": 8, "num_experts_per_tok": 2},
    ),
    preset_from_config(
        "mixtral-8x22b",
        "mixtral",
        "mistralai/Mixtral-8x22B-v0.1",
        config_dimensions(56, 6144, 16384, 48, 8, 32000, 65536) | {"num_local_experts": 8, "num_experts_per_tok": 2},
    ),
    preset_from_config(
        "qwen2-57b-a14b",
        "qwen2_moe",
        "Qwen2, arXiv:2407.10671, Table 1; Qwen/Qwen2-57B-A14B",
        config_dimensions(28, 3584, 18944, 28, 4, 151936, 131072)
        | _qwen_experts(64, 8, 2560)
        | {"shared_expert_intermediate_size": 20480},
    ),
    preset_from_config(
        "qwen3-30b-a3b",
        "qwen3_moe",
        "Qwen3, arXiv:2505.09388, Table 2; Qwen/Qwen3-30B-A3B",
        config_dimensions(48, 2048, 6144, 32, 4, 151936, 40960) | _qwen_experts(128, 8, 768),
    ),
    preset_from_config(
        "qwen3-235b-a22b",
        "qwen3_moe",
        "Qwen3, arXiv:2505.09388, Table 2; Qwen/Qwen3-235B-A22B",
        config_dimensions(94, 4096, 12288, 64, 4, 151936, 40960) | _qwen_experts(128, 8, 1536),
    ),
    preset_from_config(
        "gpt-oss-20b",
        "gpt_oss",
        "gpt-oss, arXiv:2508.10925, Table 1; openai/gpt-oss-20b",
        config_dimensions(24, 2880, 2880, 64, 8, 201088, 131072) | _GPT_OSS | {"num_local_experts": 32},
    ),
    preset_from_config(
        "gpt-oss-120b",
        "gpt_oss",
        "gpt-oss, arXiv:2508.10925, Table 1; openai/gpt-oss-120b",
        config_dimensions(36, 2880, 2880, 64, 8, 201088, 131072) | _GPT_OSS | {"num_local_experts": 128},
    ),
    preset_from_config(
        "llama4-scout",
        "llama4_text",
        "the text_config of meta-llama/Llama-4-Scout-17B-16E",
        config_dimensions(48, 5120, 8192, 40, 8, 202048, 262144) | _LLAMA4 | {"num_local_experts": 16},
    ),
    preset_from_config(
        "llama4-maverick",
        "llama4_text",
        "the text_config of meta-llama/Llama-4-Maverick-17B-128E",
        config_dimensions(48, 5120, 8192, 40, 8, 202048, 262144)
        | _LLAMA4
        | {"num_local_experts": 128, "interleave_moe_layer_step": 2},
    ),
    preset_from_config(
        "glm-4.5",
        "glm4_moe",
        "GLM-4.5, arXiv:2508.06471, Table 1; zai-org/GLM-4.5",
        config_dimensions(92, 5120, 12288, 96, 8, 151552, 131072) | _GLM45,
    ),
    preset_from_config(
        "olmoe-1b-7b",
        "olmoe",
        "OLMoE, arXiv:2409.02060, Table 1; allenai/OLMoE-1B-7B-0924",
        config_dimensions(16, 2048, 1024, 16, 16, 50304, 4096) | {"num_experts": 64, "num_experts_per_tok": 8},
    ),
    preset_from_config(
        "dbrx",
        "dbrx",
        "databricks/dbrx-base",
        {
            "d_model": 6144,
            "n_heads": 48,
            "n_layers": 40,
            "vocab_size": 100352,
            "max_seq_len": 32768,
            "attn_config": {"kv_n_heads": 8},
            "ffn_config": {"ffn_hidden_size": 10752, "moe_num_experts": 16, "moe_top_k": 4},
        },
    ),
    ModelPreset(_GROK1, "xai-org/grok-1, run.py and model.py"),
    preset_from_config(
        "deepseek-v2",
        "deepseek_v2",
        "DeepSeek-V2, arXiv:2405.04434, section 3.1.2; deepseek-ai/DeepSeek-V2",
        config_dimensions(60, 5120, 12288, 128, 128, 102400, 163840)
        | _deepseek_experts(160, 6, 1536, shared_count=2, dense_layer_count=1)
        | {"n_group": 8, "topk_group": 3},
    ),
    preset_from_config(
        "deepseek-v2-lite",
        "deepseek_v2",
        "DeepSeek-V2, arXiv:2405.04434, appendix B; deepseek-ai/DeepSeek-V2-Lite",
        config_dimensions(27, 2048, 10944, 16, 16, 102400, 163840)
        | _deepseek_experts(64, 6, 1408, shared_count=2, dense_layer_count=1)
        | {"q_lora_rank": None},
    ),
    preset_from_config(
        "deepseek-v3",
        "deepseek_v3",
        "DeepSeek-V3, arXiv:2412.19437, section 4.2; deepseek-ai/DeepSeek-V3",
        config_dimensions(61, 7168, 18432, 128, 128, 129280, 163840)
        | _deepseek_experts(256, 8, 2048, shared_count=1, dense_layer_count=3)
        | {"n_group": 8, "topk_group": 4, "num_nextn_predict_layers": 1},
    ),
    preset_from_config(
        "deepseek-v3.2",
        "deepseek_v32",
        "DeepSeek-V3.2, arXiv:2512.02556; deepseek-ai/DeepSeek-V3.2-Exp",
        config_dimensions(61, 7168, 18432, 128, 128, 129280, 163840)
        | _deepseek_experts(256, 8, 2048, shared_count=1, dense_layer_count=3)
        | {"n_group": 8, "topk_group": 4, "num_nextn_predict_layers": 1}
        | {"index_n_heads": 64, "index_head_dim": 128, "index_topk": 2048},
    ),
    preset_from_config(
        "moonlight-16b-a3b",
        "deepseek_v3",
        "Moonlight, arXiv:2502.16982; moonshotai/Moonlight-16B-A3B",
        config_dimensions(27, 2048, 11264, 16, 16, 163840, 8192)
        | _deepseek_experts(64, 6, 1408, shared_count=2, dense_layer_count=1)
        | {"q_lora_rank": None},
    ),
    preset_from_config(
        "kimi-k2",
        "kimi_k2",
        "Kimi K2, arXiv:2507.20534, Table 2; moonshotai/Kimi-K2-Base",
        config_dimensions(61, 7168, 18432, 64, 64, 163840, 131072)
        | _deepseek_experts(384, 8, 2048, shared_count=1, dense_layer_count=1),
    ),
)
