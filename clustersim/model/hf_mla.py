"""Reader of configurations with MLA: DeepSeek-V2, -V3, and derivatives (Moonlight, Kimi K2), and MiniCPM 3.

DeepSeek-V3.2 and GLM-5 have an indexer (`index_topk`); layers that share another layer's selection are not modelled.

Multi-token prediction layers (`num_nextn_predict_layers`) are not among the `num_hidden_layers`;
transformers builds none, Megatron Bridge as many as the file says. Reference: transformers,
src/transformers/models/deepseek_v{2,3}/configuration_*.py and modeling_*.py; moonshotai/Kimi-K2-Base
config.json, which uses DeepSeek-V3's class.
"""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

from clustersim.common.errors import InputError
from clustersim.model.attention_spec import LatentAttention
from clustersim.model.hf_fields import HfConfig
from clustersim.model.hf_moe import MOE_CONFIG_KEYS, MoeConfigKeys
from clustersim.model.hf_rmsnorm import rmsnorm_model
from clustersim.model.layer_stack import DenseMlp, LayerSpec, MlpType
from clustersim.model.sparse_attention_spec import DeepseekSparseAttention
from clustersim.model.transformer import TransformerModel

MLA_FAMILIES: Final[Mapping[str, MoeConfigKeys]] = MappingProxyType(
    {"deepseek_v2": MOE_CONFIG_KEYS["deepseek_v2"]}
    | dict.fromkeys(
        ("deepseek_v3", "kimi_k2", "glm4_moe_lite", "deepseek_v32", "glm_moe_dsa"), MOE_CONFIG_KEYS["deepseek_v3"]
    )
)
"""MoE configuration keys by MLA family."""
SPARSE_FAMILIES: Final = MappingProxyType({"deepseek_v32": 64, "glm_moe_dsa": 32})
"""Families with sparse attention, and the heads of their indexer where files do not say."""


def read_mla_model(config: HfConfig) -> TransformerModel:
    """Read the model; raise InputError naming file and key."""
    config.require_value("attention_bias", False, default=False)
    latent = read_latent_attention(config)
    attention = _read_sparse_attention(config, latent) if config.family in SPARSE_FAMILIES else latent
    mlps = MLA_FAMILIES[config.family].read_mlps(config, config.layer_count("num_hidden_layers"))
    return rmsnorm_model(config, (LayerSpec(attention, mlp) for mlp in mlps), mtp_layers=config.mtp_layer_count)


def read_minicpm3(config: HfConfig) -> TransformerModel:
    """Read a MiniCPM 3 configuration: latent attention, whose values are hidden / heads wide, and dense MLPs."""
    config.require_value("attention_bias", False, default=False)
    hidden, heads = config.positive_int("hidden_size"), config.positive_int("num_attention_heads")
    config.require_divides("num_attention_heads", heads, "hidden_size", hidden)
    spec = LayerSpec(
        read_latent_attention(config.with_values(v_head_dim=config.positive_int("v_head_dim", hidden // heads))),
        DenseMlp(config.positive_int("intermediate_size"), MlpType.SWIGLU),
    )
    return rmsnorm_model(config, [spec] * config.layer_count("num_hidden_layers"), tied=True)


def _read_sparse_attention(config: HfConfig, latent: LatentAttention) -> DeepseekSparseAttention:
    """Latent attention with an indexer; raise InputError where layers share what one of them selects."""
    config.require_value("index_topk_freq", 1, default=1)
    kinds = config.content.get("indexer_types") or config.content.get("index_topk_pattern") or ""
    if any(str(kind).lower().startswith("s") for kind in kinds):
        raise InputError(
            f"{config.path}: indexer_types: layers that share the keys another layer selects are not modelled"
        )
    return DeepseekSparseAttention(
        latent,
        config.positive_int("index_n_heads", SPARSE_FAMILIES[config.family]),
        config.positive_int("index_head_dim", 128),
        config.positive_int("index_topk", 2048),
    )


def read_latent_attention(config: HfConfig) -> LatentAttention:
    """Multi-head latent attention with the sizes that the file states."""
    return LatentAttention(
        heads=config.positive_int("num_attention_heads"),
        q_lora_rank=config.nonnegative_int("q_lora_rank", 0) or None,
        kv_lora_rank=config.positive_int("kv_lora_rank"),
        qk_nope_head_dim=config.positive_int("qk_nope_head_dim"),
        qk_rope_head_dim=config.positive_int("qk_rope_head_dim"),
        v_head_dim=config.positive_int("v_head_dim"),
    )
