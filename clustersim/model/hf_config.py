"""Which model does a Hugging Face `config.json` describe? Read as JSON; transformers is not needed.

Only families that the operators of `layers` express exactly are read: the Llama family (`hf_llama`, `hf_renamed`), the
GPT family (`hf_gpt`, `hf_gpt_like`, `hf_layernorm`), models with multi-head latent attention (`hf_mla`), hybrids with
linear attention or state spaces (`hf_hybrid`) and these alone (`hf_state_space`), MoE models (`hf_moe`) among them. Of
multimodal models the text model is read (`hf_wrapped`). Dimensions have no defaults except where a family's released
files omit them. Other families are refused, those that are known with the layer that is missing (`hf_missing`).
"""

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

from clustersim.common.data_files import read_mapping
from clustersim.common.errors import InputError, suggest_nearest
from clustersim.model.hf_dbrx import read_dbrx
from clustersim.model.hf_fields import HfConfig
from clustersim.model.hf_gpt import read_bloom, read_falcon, read_gpt2, read_opt, read_phi
from clustersim.model.hf_gpt_like import GPT_LIKE_READERS
from clustersim.model.hf_hybrid import HYBRID_READERS
from clustersim.model.hf_layernorm import (
    read_cohere,
    read_cohere2,
    read_gpt_neox,
    read_olmo,
    read_stablelm,
    read_starcoder2,
)
from clustersim.model.hf_llama import LLAMA_FAMILIES
from clustersim.model.hf_llama_like import LLAMA_LIKE_READERS, MOE_LLAMA_LIKE_READERS
from clustersim.model.hf_missing import MISSING_LAYERS
from clustersim.model.hf_mla import MLA_FAMILIES, SPARSE_FAMILIES, read_minicpm3, read_mla_model
from clustersim.model.hf_renamed import MOE_RENAMED_READERS, RENAMED_READERS
from clustersim.model.hf_rwkv import read_rwkv7
from clustersim.model.hf_state_space import STATE_SPACE_READERS
from clustersim.model.hf_wrapped import TEXT_FAMILIES, text_part
from clustersim.model.transformer import TransformerModel

_EXPERT_KEYS: Final = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")
_STATE_SPACE: Final = "a state-space layer (Mamba) of this family"
_LINEAR_ATTENTION: Final = "a layer with linear attention of this family"
_UNSUPPORTED_KEYS: Final = {
    "hybrid_override_pattern": _STATE_SPACE,
    "layers_block_type": _STATE_SPACE,
    "mamba_d_state": _STATE_SPACE,
    "mamba_num_heads": _STATE_SPACE,
    "ssm_state_size": _STATE_SPACE,
    "linear_num_key_heads": _LINEAR_ATTENTION,
    "linear_attn_config": _LINEAR_ATTENTION,
    "index_topk": "sparse attention to keys that an indexer chooses",
}
_LATENT_FAMILIES: Final = (*MLA_FAMILIES, "minicpm3")
_MOE_FAMILIES: Final = (
    *(name for name, kind in LLAMA_FAMILIES.items() if kind.moe_keys is not None),
    *MLA_FAMILIES,
    *HYBRID_READERS,
    *MOE_LLAMA_LIKE_READERS,
    *MOE_RENAMED_READERS,
    "dbrx",
    "phimoe",
)

MODEL_READERS: Final[Mapping[str, Callable[[HfConfig], TransformerModel]]] = MappingProxyType(
    {name: kind.read_model for name, kind in LLAMA_FAMILIES.items()}
    | {
        "gpt2": read_gpt2,
        "opt": read_opt,
        "bloom": read_bloom,
        "falcon": read_falcon,
        "phi": read_phi,
        "dbrx": read_dbrx,
        "gpt_neox": read_gpt_neox,
        "stablelm": read_stablelm,
        "starcoder2": read_starcoder2,
        "olmo": read_olmo,
        "cohere": read_cohere,
        "cohere2": read_cohere2,
    }
    | dict(LLAMA_LIKE_READERS)
    | dict(MOE_LLAMA_LIKE_READERS)
    | dict(GPT_LIKE_READERS)
    | dict(RENAMED_READERS)
    | dict(MOE_RENAMED_READERS)
    | dict(STATE_SPACE_READERS)
    | {"rwkv7": read_rwkv7}
    | {"minicpm3": read_minicpm3}
    | dict.fromkeys(MLA_FAMILIES, read_mla_model)
    | dict(HYBRID_READERS)
)


def config_path(path: Path) -> Path:
    """The path itself, or the `config.json` in a folder."""
    return path / "config.json" if os.path.isdir(path) else path  # noqa: PTH112 - false also for what can be no path


def read_hf_config(path: Path) -> TransformerModel:
    """Read a `config.json`, or the one in a folder; raise InputError naming the file and the key at fault."""
    file_path = config_path(path)
    content: Mapping[str, Any] = read_mapping(file_path)
    family = content.get("model_type")
    family_names = ", ".join((*MODEL_READERS, *TEXT_FAMILIES))
    if not isinstance(family, str):
        raise InputError(f"{file_path}: has no model_type; families that are read: {family_names}")
    if family in TEXT_FAMILIES:
        family, content = text_part(file_path, family, content)
    if family in MISSING_LAYERS:
        raise InputError(f"{file_path}: model_type {family!r} is not simulated, for want of {MISSING_LAYERS[family]}")
    _refuse_unsupported(file_path, family, content)
    if family not in MODEL_READERS:
        raise InputError(
            f"{file_path}: model_type {family!r} is not known; "
            f"{suggest_nearest(family, [*MODEL_READERS, *TEXT_FAMILIES])}"
        )
    return MODEL_READERS[family](HfConfig(file_path, content, family))


def _refuse_unsupported(path: Path, family: str, content: Mapping[str, Any]) -> None:
    if family in (*HYBRID_READERS, *STATE_SPACE_READERS, "rwkv7"):
        return
    is_sparse = family in SPARSE_FAMILIES
    unsupported = [key for key in _UNSUPPORTED_KEYS if content.get(key) and not (is_sparse and key == "index_topk")]
    if unsupported:
        raise InputError(
            f"{path}: {unsupported[0]} is {content[unsupported[0]]!r}: {_UNSUPPORTED_KEYS[unsupported[0]]} is not "
            "simulated"
        )
    experts = [key for key in _EXPERT_KEYS if content.get(key)]
    if experts and family not in _MOE_FAMILIES:
        raise InputError(
            f"{path}: {experts[0]} is {content[experts[0]]}, but MoE models are not read of model_type"
            f" {family!r}; of {', '.join(_MOE_FAMILIES)}"
        )
    if content.get("kv_lora_rank") and family not in _LATENT_FAMILIES:
        raise InputError(
            f"{path}: kv_lora_rank is {content['kv_lora_rank']}, but latent attention is not read of model_type"
            f" {family!r}; of {', '.join(_LATENT_FAMILIES)}"
        )
