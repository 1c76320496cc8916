"""Which part of a multimodal model's configuration is the text model?

Its `text_config` (`llm_config` in InternVL's own files, `language_config` in DeepSeek-VL2's), of Qwen's omni models
that of the `thinker_config`, or the file itself (Qwen2.5-VL before 2025, Phi-3-vision). Whether the logits matrix is
tied, the file says for the whole model where the part does not.
"""

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

from clustersim.common.errors import InputError

_TIED: Final = "tie_word_embeddings"
_SECTIONS: Final = ("text_config", "llm_config", "language_config")
_OUTER_SECTION: Final = "thinker_config"
TEXT_FAMILIES: Final[Mapping[str, str | None]] = MappingProxyType(
    {
        "gemma3": "gemma3_text",
        "llama4": "llama4_text",
        "qwen2_vl": "qwen2",
        "qwen2_5_vl": "qwen2",
        "qwen3_vl": "qwen3",
        "qwen3_vl_moe": "qwen3_moe",
        "qwen3_5": "qwen3_5_text",
        "qwen3_5_moe": "qwen3_5_moe_text",
        "glm4v": "glm4",
        "glm4v_moe": "glm4_moe",
        "kimi_k25": "kimi_k2",
        "mistral3": None,
        "internvl": None,
        "internvl_chat": None,
        "llava": None,
        "cohere2_vision": "cohere2",
        "phi3_v": "phi3",
        "qwen2_5_omni": "qwen2",
        "qwen3_omni_moe": "qwen3_moe",
        "deepseek_vl_v2": "deepseek_v2",
        **dict.fromkeys(
            (
                "llava_next",
                "llava_next_video",
                "llava_onevision",
                "vipllava",
                "video_llava",
                "idefics3",
                "smolvlm",
                "paligemma",
                "aya_vision",
                "kimi_vl",
                "qwen2_audio",
                "voxtral",
                "pixtral",
                "got_ocr2",
            ),
        ),
    }
)
"""The text model's family by the multimodal one; None: its section says it."""


def text_part(path: Path, family: str, content: Mapping[str, Any]) -> tuple[str, Mapping[str, Any]]:
    """The family and the configuration of a multimodal model's text model."""
    outer = content.get(_OUTER_SECTION)
    content = outer if isinstance(outer, Mapping) else content
    section = next((key for key in _SECTIONS if key in content), None)
    text = content if section is None else content[section]
    if not isinstance(text, Mapping):
        raise InputError(f"{path}: {section} is {text!r}, not a mapping")
    text_family = TEXT_FAMILIES[family] or text.get("model_type")
    if section is None and TEXT_FAMILIES[family] is None:
        raise InputError(f"{path}: has no text_config, which a {family} model needs")
    if not isinstance(text_family, str):
        raise InputError(f"{path}: {section} has no model_type, which a {family} model needs")
    tied = {_TIED: content[_TIED]} if isinstance(content.get(_TIED), bool) else {}
    return text_family, {**tied, **text}
