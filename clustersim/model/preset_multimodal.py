"""Published language models with an encoder of images in front of them, with the sources of their dimensions."""

from dataclasses import replace
from typing import Final

from clustersim.model.gradient_flow import GradientFlow, ModelGradients
from clustersim.model.model_ends import PatchEmbedding, Projector
from clustersim.model.preset_builder import ModelPreset, config_dimensions, preset_from_config
from clustersim.model.preset_vision import CLIP_L_336, vision_transformer
from clustersim.model.transformer import Encoder, PositionEncoding, TransformerModel

_LABEL: Final = "encoder"
_FROZEN: Final = ModelGradients(GradientFlow.NONE, GradientFlow.NONE)
_INTERN_VIT: Final = vision_transformer(
    "internvit-300m-448", (24, 1024, 4096, 16), PatchEmbedding((448, 448), (14, 14), 3, class_tokens=1)
)
_QWEN3_VIT: Final = vision_transformer(
    "qwen3-vl-vit",
    (27, 1152, 4304, 16),
    PatchEmbedding((2, 768, 768), (2, 16, 16), 3, position_rows=48 * 48),
)


def _language(name: str, family: str, dimensions: dict[str, int]) -> TransformerModel:
    return preset_from_config(name, family, "", dimensions).model


def _preset(language: TransformerModel, encoder: TransformerModel, source: str) -> ModelPreset:
    """A language model whose sequences have one image each, unless a scenario says otherwise."""
    tower = Encoder(replace(encoder, label=_LABEL), 1.0)
    return ModelPreset(replace(language, encoder=tower), source)


MULTIMODAL_PRESETS: Final = (
    _preset(
        _language("llava-1.5-7b", "llama", config_dimensions(32, 4096, 11008, 32, 32, 32064, 4096)),
        replace(CLIP_L_336, head=Projector((4096, 4096), drops=1), gradients=_FROZEN),
        "Liu et al. 2023, arXiv:2310.03744, section 3 (the encoder is frozen); llava-hf/llava-1.5-7b-hf config.json",
    ),
    _preset(
        _language("internvl3-8b", "qwen2", config_dimensions(28, 3584, 18944, 28, 4, 151674, 32768)),
        replace(
            _INTERN_VIT,
            head=Projector((3584, 3584), merge=4, drops=1, norms_merged=True),
            layer_scale=True,
        ),
        "Zhu et al. 2025, arXiv:2504.10479, Table 1; OpenGVLab/InternVL3-8B config.json",
    ),
    _preset(
        _language("qwen3-vl-8b", "qwen3", config_dimensions(36, 4096, 12288, 32, 8, 151936, 262144)),
        replace(
            _QWEN3_VIT,
            head=Projector((4608, 4096), merge=4, copies=3),
            positions=PositionEncoding.ROTARY,
        ),
        "Qwen3-VL, arXiv:2511.21631, section 2; Qwen/Qwen3-VL-8B-Instruct config.json",
    ),
)
