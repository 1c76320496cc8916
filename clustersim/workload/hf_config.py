"""Which model does a Hugging Face `config.json` describe? Read as JSON; transformers is not needed.

Only families that the operators of `layers` express exactly are read: those of the Llama kind (`hf_llama`) and of the
GPT kind (`hf_gpt`), with mixtures of experts (`hf_experts`) among them. Of models with pictures (gemma3, llama4) the
text's part is read. Dimensions have no defaults but where a family's released files leave them out. Layers that are no
attention are refused.
"""

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

from clustersim.errors import InputError, nearest
from clustersim.shipped import read_mapping
from clustersim.workload.hf_dbrx import dbrx
from clustersim.workload.hf_experts import MIXTURES
from clustersim.workload.hf_fields import Config
from clustersim.workload.hf_gpt import bloom, falcon, gpt2, opt, phi
from clustersim.workload.hf_llama import LLAMA_KINDS
from clustersim.workload.transformer import Model

_EXPERT_KEYS: Final = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")
_NOT_MODELLED: Final = {"kv_lora_rank": "latent attention (MLA)", "mamba_d_state": "a state-space layer (Mamba)"}
_ROUTED: Final = (*MIXTURES, "dbrx")
_TEXT_OF: Final = {"gemma3": "gemma3_text", "llama4": "llama4_text"}

FAMILIES: Final[Mapping[str, Callable[[Config], Model]]] = MappingProxyType(
    {name: kind.read for name, kind in LLAMA_KINDS.items()}
    | {"gpt2": gpt2, "opt": opt, "bloom": bloom, "falcon": falcon, "phi": phi, "dbrx": dbrx}
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
    experts = [key for key in _EXPERT_KEYS if content.get(key)]
    if experts and family in FAMILIES and family not in _ROUTED:
        why = f"{experts[0]} is {content[experts[0]]}"
        raise InputError(
            f"{path}: is a mixture of experts ({why}), which {family} is not read as; of {', '.join(_ROUTED)}"
        )
    for key, what in _NOT_MODELLED.items():
        if content.get(key):
            raise InputError(
                f"{path}: {key} is {content[key]!r}: {what} is not simulated; families that are read: "
                f"{', '.join((*FAMILIES, *_TEXT_OF))}"
            )
