"""Which published models are packaged as dimensions of their config.json?

The files of `topologies/models`: a name, the repository, the family (`model_type`), and what the reader of that family
reads. They are read when a model is named that no preset in the code is.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from types import MappingProxyType
from typing import Any

from clustersim.common.data_files import find_file, list_names, read_mapping
from clustersim.model.preset_builder import ModelPreset, config_dimensions, preset_from_config


@dataclass(frozen=True, slots=True)
class PublishedModel:
    """A model of a file. repository: on Hugging Face's hub; parameters: their published count; config: of its keys."""

    name: str
    repository: str
    family: str
    parameters: int
    config: Mapping[str, Any]

    @property
    def preset(self) -> ModelPreset:
        """The model, read as the config.json of its family."""
        return preset_from_config(self.name, self.family, self.repository, self.config)


@cache
def published_models() -> Mapping[str, PublishedModel]:
    """All models of the packaged files, by name."""
    return MappingProxyType(
        {
            name: _published_model(name, entry)
            for file in list_names("models")
            for name, entry in read_mapping(find_file("models", file))["models"].items()
        }
    )


def _published_model(name: str, entry: Mapping[str, Any]) -> PublishedModel:
    sizes = config_dimensions(*entry["sizes"]) if "sizes" in entry else {}
    config = MappingProxyType({**sizes, **entry.get("config", {})})
    return PublishedModel(name, entry["repository"], entry["family"], entry["parameters"], config)
