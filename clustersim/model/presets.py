"""Published models that can be named: most of the dense ones here, the others in the files of their kind."""

from collections.abc import Mapping, Sequence
from functools import cache
from types import MappingProxyType
from typing import Final

from clustersim.common.errors import InputError, suggest_nearest
from clustersim.model.preset_builder import ModelPreset
from clustersim.model.preset_dense import DENSE_PRESETS
from clustersim.model.published_models import published_models
from clustersim.model.transformer import TransformerModel


def load_preset(name: str) -> TransformerModel:
    """The preset model of that name; raise InputError with the nearest name if there is none.

    >>> load_preset("llama3-8b").hidden
    4096
    """
    presets = _dense_presets() if name in _dense_presets() else code_presets()
    if name in presets:
        return presets[name].model
    published = published_models()
    if name in published:
        return published[name].preset.model
    raise InputError(f"there is no model {name!r}; {_nearest_models(name, (*presets, *published))}")


@cache
def _dense_presets() -> Mapping[str, ModelPreset]:
    return _by_name(DENSE_PRESETS)


@cache
def code_presets() -> Mapping[str, ModelPreset]:
    """Every model whose dimensions are in the code, by name; the rarer ones are read only when one is asked for."""
    from clustersim.model.preset_diffusion import DIFFUSION_PRESETS
    from clustersim.model.preset_families import FAMILY_PRESETS
    from clustersim.model.preset_hybrid import HYBRID_PRESETS
    from clustersim.model.preset_moe import MOE_PRESETS
    from clustersim.model.preset_multimodal import MULTIMODAL_PRESETS
    from clustersim.model.preset_vision import VISION_PRESETS

    return _by_name(
        (
            *(*DENSE_PRESETS, *FAMILY_PRESETS, *MOE_PRESETS, *HYBRID_PRESETS),
            *(*VISION_PRESETS, *MULTIMODAL_PRESETS, *DIFFUSION_PRESETS),
        )
    )


def _by_name(presets: Sequence[ModelPreset]) -> Mapping[str, ModelPreset]:
    return MappingProxyType({preset.model.name: preset for preset in presets})


@cache
def all_presets() -> Mapping[str, ModelPreset]:
    """Every model that can be named: those in the code and those of the packaged files."""
    return MappingProxyType({**code_presets(), **{name: model.preset for name, model in published_models().items()}})


_MAX_MODELS: Final = 6  # names after "did you mean"


def _nearest_models(name: str, names: Sequence[str]) -> str:
    """What to write instead of a name that is no preset's."""
    from clustersim.common.synonyms import describe_model_name, presets_beginning, similar_preset

    if hint := describe_model_name(name, names):
        return hint
    if beginning := presets_beginning(name, names):
        return f"did you mean {' or '.join(beginning[:_MAX_MODELS])}?"
    if preset := similar_preset(name, names):
        return f"did you mean {preset}?"
    return suggest_nearest(name, names, listed_by="clustersim presets")
