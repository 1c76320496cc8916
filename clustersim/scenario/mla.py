"""Multi-head latent attention (MLA) of a scenario's model, and DeepSeek's sparse attention (DSA).

`model.mla` changes the MLA of a model that has it, or replaces the attention of every layer; `model.dsa` makes it
sparse.
"""

from dataclasses import replace
from typing import Any, Final

from clustersim.common.errors import InputError
from clustersim.model.attention_spec import FullAttention, LatentAttention
from clustersim.model.mixer import Mixer
from clustersim.model.sparse_attention_spec import DeepseekSparseAttention
from clustersim.model.transformer import PositionEncoding, TransformerModel, map_layers
from clustersim.scenario.config.model import DsaConfig, DsaStage, MlaConfig, ModelConfig

_EXCLUDED_KEYS: Final = (
    "kv_heads",
    "head_dim",
    "qkv_bias",
    "qk_norm",
    "window",
    "rotary_percent",
    "attn_logit_softcapping",
    "attention_output_gate",
    "causal",
)
_REQUIRED_KEYS: Final = ("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")


def with_mla(model: TransformerModel, config: ModelConfig) -> TransformerModel:
    """The model with the section's MLA in all of its layers."""
    mla_config = config.mla
    if mla_config is None:
        return model
    if conflicting := [key for key in _EXCLUDED_KEYS if key in config.layer_dimensions]:
        raise InputError(f"{conflicting[0]}: latent attention has heads of its own dimensions; leave it out")
    if model.positions is not PositionEncoding.ROTARY:
        raise InputError(f"mla needs rotary positions; {model.name} has {model.positions.value} ones")
    given_keys = mla_config.model_dump(exclude_none=True)
    if given_keys.get("q_lora_rank") == 0:
        given_keys["q_lora_rank"] = None
    return map_layers(model, lambda spec: replace(spec, mixer=_apply_mla(spec.mixer, given_keys)))


def _apply_mla(mixer: Mixer | None, given_keys: dict[str, Any]) -> Mixer | None:
    match mixer:
        case LatentAttention():
            return replace(mixer, **given_keys)
        case DeepseekSparseAttention(latent=latent):
            return replace(mixer, latent=replace(latent, **given_keys))
        case FullAttention(heads=heads):
            if missing := [key for key in _REQUIRED_KEYS if key not in given_keys]:
                raise InputError(f"mla: missing keys: {', '.join(missing)}; write such as {MlaConfig.example}")
            return LatentAttention(**{"heads": heads, "q_lora_rank": None, **given_keys})
    return mixer


def with_sparse_attention(model: TransformerModel, config: ModelConfig) -> TransformerModel:
    """The model with the section's sparse attention in all layers that have MLA."""
    dsa = config.dsa
    if dsa is None:
        return model
    sparse = map_layers(model, lambda spec: replace(spec, mixer=_apply_sparse(spec.mixer, dsa)))
    if not any(mixer.has_indexer for mixer in sparse.distinct_mixers):
        raise InputError(f"dsa needs latent attention, which no layer of {model.name} has; give mla, or leave dsa out")
    return sparse


def _apply_sparse(mixer: Mixer | None, dsa: DsaConfig) -> Mixer | None:
    sizes = dsa.index_n_heads, dsa.index_head_dim, dsa.index_topk, dsa.stage is DsaStage.DENSE_WARM_UP
    match mixer:
        case (LatentAttention() as latent) | DeepseekSparseAttention(latent=latent):
            return DeepseekSparseAttention(latent, *sizes)
    return mixer
