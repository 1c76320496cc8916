"""How is a published model written down? By its name, a source and dimensions, most as its config.json has them."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from clustersim.workload.hf_config import FAMILIES
from clustersim.workload.hf_fields import Config
from clustersim.workload.transformer import Model


@dataclass(frozen=True, slots=True)
class Preset:
    """A model and the source of its dimensions."""

    model: Model
    source: str


def released(name: str, family: str, source: str, content: Mapping[str, Any]) -> Preset:
    """A model as its released config.json has it, whose dimensions (or what differs from its family's) are given."""
    return Preset(FAMILIES[family](Config(Path(f"{name}.json"), content, family)), f"{source} config.json")


def sizes(*numbers: int) -> dict[str, int]:
    """Dimensions as most config.json files call them."""
    keys = ("num_hidden_layers", "hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads")
    return dict(zip((*keys, "vocab_size", "max_position_embeddings"), numbers, strict=True))
