"""How is a published model written down? By its name, a source and dimensions, most as its config.json has them."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from clustersim.model.hf_config import MODEL_READERS
from clustersim.model.hf_fields import HfConfig
from clustersim.model.transformer import TransformerModel


@dataclass(frozen=True, slots=True)
class ModelPreset:
    """A model and the source of its dimensions.

    mtp_layers: layers that predict further tokens, which were released with the model and are not among it: who trains
    it says whether they are trained, too (`model.mtp_layers`).
    """

    model: TransformerModel
    source: str
    mtp_layers: int = 0


def preset_from_config(name: str, family: str, source: str, content: Mapping[str, Any]) -> ModelPreset:
    """A model as its released config.json has it, whose dimensions (or what differs from its family's) are given."""
    model = MODEL_READERS[family](HfConfig(Path(f"{name}.json"), content, family))
    return ModelPreset(replace(model, mtp_layers=0), f"{source} config.json", model.mtp_layers)


def config_dimensions(*values: int) -> dict[str, int]:
    """Dimensions as most config.json files call them."""
    keys = ("num_hidden_layers", "hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads")
    return dict(zip((*keys, "vocab_size", "max_position_embeddings"), values, strict=True))
