"""Multi-head latent attention (MLA) of a scenario's model.

`model.mla` changes the MLA of a model that has it, or replaces the attention of every layer.
"""

from dataclasses import replace
from typing import Any, Final

from clustersim.common.errors import InputError
from clustersim.model.attention_spec import FullAttention, LatentAttention
from clustersim.model.layer_stack import merge_groups
from clustersim.model.mixer import Mixer
from clustersim.model.transformer import PositionEncoding, TransformerModel
from clustersim.scenario.config.model import MlaConfig, ModelConfig

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
    layer_groups = (
        replace(group, spec=replace(group.spec, mixer=_apply_mla(group.spec.mixer, given_keys)))
        for group in model.stack
    )
    return replace(model, stack=merge_groups(layer_groups))


def _apply_mla(mixer: Mixer | None, given_keys: dict[str, Any]) -> Mixer | None:
    match mixer:
        case LatentAttention():
            return replace(mixer, **given_keys)
        case FullAttention(heads=heads):
            if missing := [key for key in _REQUIRED_KEYS if key not in given_keys]:
                raise InputError(f"mla: missing keys: {', '.join(missing)}; write such as {MlaConfig.example}")
            return LatentAttention(**{"heads": heads, "q_lora_rank": None, **given_keys})
    return mixer
