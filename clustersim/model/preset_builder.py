"""Builders of model presets: a name, a source, and dimensions, mostly as in the model's config.json."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from clustersim.model.transformer import TransformerModel


@dataclass(frozen=True, slots=True)
class ModelPreset:
    """A model and the source of its dimensions.

    mtp_layers: multi-token prediction layers that were released with the model but are not part of `model`;
    the scenario says whether they are trained (`model.mtp_layers`).
    """

    model: TransformerModel
    source: str
    mtp_layers: int = 0


def preset_from_config(name: str, family: str, source: str, content: Mapping[str, Any]) -> ModelPreset:
    """A preset as in the released config.json, given its keys (or those that differ from the family's defaults)."""
    from clustersim.model.hf_config import MODEL_READERS
    from clustersim.model.hf_fields import HfConfig

    model = MODEL_READERS[family](HfConfig(Path(f"{name}.json"), content, family))
    return ModelPreset(replace(model, mtp_layers=0), f"{source} config.json", model.mtp_layers)


def config_dimensions(*values: int) -> dict[str, int]:
    """Dimensions under the keys that most config.json files use."""
    keys = ("num_hidden_layers", "hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads")
    return dict(zip((*keys, "vocab_size", "max_position_embeddings"), values, strict=True))
