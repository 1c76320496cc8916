"""Which model does a Hugging Face `config.json` describe? Read as JSON; transformers is not needed.

Only families that the operators of `layers` express exactly are read: those of the Llama kind (`hf_llama`), of the GPT
kind (`hf_gpt`) and with latent attention (`hf_mla`), mixtures of experts (`hf_moe`) among them. Of models with
pictures (gemma3, llama4) the text's part is read. Dimensions have no defaults but where a family's released files leave
them out. Layers that are no attention (Nemotron 3's state-space layers) are refused.
"""

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

from clustersim.common.data_files import read_mapping
from clustersim.common.errors import InputError, nearest
from clustersim.model.hf_dbrx import dbrx
from clustersim.model.hf_fields import Config
from clustersim.model.hf_gpt import bloom, falcon, gpt2, opt, phi
from clustersim.model.hf_llama import LLAMA_KINDS
from clustersim.model.hf_mla import LATENT, latent
from clustersim.model.transformer import Model

_EXPERT_KEYS: Final = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")
_STATE_SPACE: Final = "a state-space layer (Mamba), of which no published kernel times are known here,"
_LINEAR: Final = "a layer with linear attention"
_NOT_MODELLED: Final = {
    "hybrid_override_pattern": _STATE_SPACE,
    "layers_block_type": _STATE_SPACE,
    "mamba_d_state": _STATE_SPACE,
    "mamba_num_heads": _STATE_SPACE,
    "ssm_state_size": _STATE_SPACE,
    "linear_num_key_heads": _LINEAR,
    "linear_attn_config": _LINEAR,
    "index_topk": "sparse attention to keys that an indexer chooses",
}
_ROUTED: Final = (*(name for name, kind in LLAMA_KINDS.items() if kind.mixture is not None), *LATENT, "dbrx")
_TEXT_OF: Final = {"gemma3": "gemma3_text", "llama4": "llama4_text"}

FAMILIES: Final[Mapping[str, Callable[[Config], Model]]] = MappingProxyType(
    {name: kind.read for name, kind in LLAMA_KINDS.items()}
    | {"gpt2": gpt2, "opt": opt, "bloom": bloom, "falcon": falcon, "phi": phi, "dbrx": dbrx}
    | dict.fromkeys(LATENT, latent)
)


def config_file(path: Path) -> Path:
    """The path itself, or the `config.json` in a folder."""
    return path / "config.json" if os.path.isdir(path) else path  # noqa: PTH112 - false also for what can be no path


def read_hf_config(path: Path) -> Model:
    """Read a `config.json`, or the one in a folder; raise InputError naming the file and the key at fault."""
    found = config_file(path)
    content: Mapping[str, Any] = read_mapping(found)
    family = content.get("model_type")
    known = ", ".join((*FAMILIES, *_TEXT_OF))
    if not isinstance(family, str):
        raise InputError(f"{found}: has no model_type; families that are read: {known}")
    if family in _TEXT_OF:
        family, content = _TEXT_OF[family], _text(found, content)
    _refuse(found, family, content)
    if family not in FAMILIES:
        raise InputError(f"{found}: model_type {family!r} is not known; {nearest(family, [*FAMILIES, *_TEXT_OF])}")
    return FAMILIES[family](Config(found, content, family))


def _text(path: Path, content: Mapping[str, Any]) -> Mapping[str, Any]:
    """The part of a model with pictures that is about text; all of it where it is not apart."""
    text = content.get("text_config", content)
    if not isinstance(text, Mapping):
        raise InputError(f"{path}: text_config is {text!r}, not a mapping")
    return text


def _refuse(path: Path, family: str, content: Mapping[str, Any]) -> None:
    said = [key for key in _NOT_MODELLED if content.get(key)]
    if said:
        raise InputError(f"{path}: {said[0]} is {content[said[0]]!r}: {_NOT_MODELLED[said[0]]} is not simulated")
    experts = [key for key in _EXPERT_KEYS if content.get(key)]
    if experts and family not in _ROUTED:
        raise InputError(
            f"{path}: {experts[0]} is {content[experts[0]]}, but mixtures of experts are not read of model_type"
            f" {family!r}; of {', '.join(_ROUTED)}"
        )
    if content.get("kv_lora_rank") and family not in LATENT:
        raise InputError(
            f"{path}: kv_lora_rank is {content['kv_lora_rank']}, but latent attention is not read of model_type"
            f" {family!r}; of {', '.join(LATENT)}"
        )
