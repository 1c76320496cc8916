"""Which model is a configuration with latent attention: DeepSeek-V2, -V3, or of their form (Moonlight, Kimi K2)?

Layers that predict further tokens (`num_nextn_predict_layers`) are not among the `num_hidden_layers`; transformers
builds none, Megatron Bridge as many as the file says.
Reference: transformers, src/transformers/models/deepseek_v{2,3}/configuration_*.py and modeling_*.py;
moonshotai/Kimi-K2-Base config.json, which is of DeepSeek-V3's class.
"""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

from clustersim.model.hf_fields import Config
from clustersim.model.hf_moe import MIXTURES, Mixture
from clustersim.model.layer_stack import LatentAttention, LayerSpec, stacked
from clustersim.model.transformer import Model, Norm, Positions

LATENT: Final[Mapping[str, Mixture]] = MappingProxyType(
    {"deepseek_v2": MIXTURES["deepseek_v2"]} | dict.fromkeys(("deepseek_v3", "kimi_k2"), MIXTURES["deepseek_v3"])
)
"""By family, what it calls the parts of its mixture."""


def latent(config: Config) -> Model:
    """Read the model; raise InputError naming file and key."""
    config.refuse("attention_bias", False, default=False)
    attention = _attention(config)
    mlps = LATENT[config.family].read(config, config.layers("num_hidden_layers"))
    return Model(
        name=config.name,
        stack=stacked(LayerSpec(attention, mlp) for mlp in mlps),
        hidden=config.positive("hidden_size"),
        vocab=config.positive("vocab_size"),
        max_positions=config.positive("max_position_embeddings"),
        norm=Norm.RMSNORM,
        positions=Positions.ROTARY,
        tied_embeddings=config.truth("tie_word_embeddings", default=False),
        linear_bias=False,
        mtp_layers=config.further,
    )


def _attention(config: Config) -> LatentAttention:
    return LatentAttention(
        heads=config.positive("num_attention_heads"),
        query_rank=config.whole("q_lora_rank", 0) or None,
        kv_rank=config.positive("kv_lora_rank"),
        nope=config.positive("qk_nope_head_dim"),
        rope=config.positive("qk_rope_head_dim"),
        value_dim=config.positive("v_head_dim"),
    )
