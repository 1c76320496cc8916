"""What does one key of a Hugging Face `config.json` say? Read strictly; errors name the file, the key and the value."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from clustersim.common.errors import InputError
from clustersim.model.layer_stack import MOST_AHEAD, MOST_LAYERS

FULL, SLIDING = "full_attention", "sliding_attention"
_FURTHER = "num_nextn_predict_layers"


@dataclass(frozen=True, slots=True)
class Config:
    """A configuration and the file that it comes from."""

    path: Path
    content: Mapping[str, Any]
    family: str

    def positive(self, key: str, default: int | None = None) -> int:
        """A whole number above zero; `default` if the key is missing or null."""
        value = self.content.get(key)
        if value is None and default is not None:
            return default
        if value is None:
            raise InputError(f"{self.path}: has no {key}, which a {self.family} model needs")
        if isinstance(value, bool) or not isinstance(value, int) or value <= 0:
            raise InputError(f"{self.path}: {key} is {value!r}, not a whole number above 0")
        return value

    def whole(self, key: str, default: int) -> int:
        """A whole number from zero; `default` if the key is missing or null."""
        value = self.content.get(key)
        if value is None:
            return default
        if isinstance(value, bool) or not isinstance(value, int) or value < 0:
            raise InputError(f"{self.path}: {key} is {value!r}, not a whole number from 0")
        return value

    @property
    def further(self) -> int:
        """How many layers predict further tokens."""
        value = self.whole(_FURTHER, 0)
        if value > MOST_AHEAD:
            raise InputError(f"{self.path}: {_FURTHER} {value} is too large; {MOST_AHEAD} is the most")
        return value

    def layers(self, key: str) -> int:
        """How many layers there are, few enough to be told one by one."""
        value = self.positive(key)
        if value > MOST_LAYERS:
            raise InputError(f"{self.path}: {key} {value:,} is too large; {MOST_LAYERS:,} is the most")
        return value

    def truth(self, key: str, *, default: bool) -> bool:
        """True or false; `default` if the key is missing or null."""
        value = self.content.get(key)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise InputError(f"{self.path}: {key} is {value!r}, not true or false")
        return value

    def rate(self, key: str, default: float) -> float:
        """A number from 0 to below 1; `default` if the key is missing or null."""
        value = self.content.get(key)
        if value is None:
            return default
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < 1:
            raise InputError(f"{self.path}: {key} is {value!r}, not a number from 0 to below 1")
        return float(value)

    def number(self, key: str) -> float | None:
        """A number above zero; None if the key is missing or null."""
        value = self.content.get(key)
        if value is not None and (isinstance(value, bool) or not isinstance(value, int | float) or value <= 0):
            raise InputError(f"{self.path}: {key} is {value!r}, not a number above 0")
        return value

    def turned(self, default: float) -> float:
        """The share of each head that rotary positions turn (partial_rotary_factor, since 2025 in rope_parameters)."""
        key, nested = "partial_rotary_factor", self.content.get("rope_parameters")
        value = self.content.get(key, nested.get(key) if isinstance(nested, Mapping) else None)
        if value is None:
            return default
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= 1:
            raise InputError(f"{self.path}: {key} is {value!r}, not a number above 0 and up to 1")
        return float(value)

    def each_layer(self, key: str, legal: tuple[Any, ...], layers: int) -> list[Any] | None:
        """One of the legal values for each layer; None if the key is missing or null."""
        value = self.content.get(key)
        if value is None:
            return None
        if not isinstance(value, list) or len(value) != layers:
            many = f"{len(value)} values" if isinstance(value, list) else repr(value)
            raise InputError(f"{self.path}: {key} is {many}, not one for each of the {layers} layers")
        for layer, item in enumerate(value):
            if item not in legal:
                words = " and ".join(map(str, legal))
                raise InputError(f"{self.path}: {key} of layer {layer} is {item!r}; {words} are modelled")
        return value

    def places(self, key: str, layers: int) -> frozenset[int] | None:
        """The layers that are listed, counted from 0; None if the key is missing or null."""
        value = self.content.get(key)
        if value is None:
            return None
        legal = range(layers)
        if not isinstance(value, list) or not all(type(item) is int and item in legal for item in value):
            raise InputError(f"{self.path}: {key} is {value!r}, not a list of layers from 0 to {layers - 1}")
        return frozenset(value)

    def refuse(self, key: str, wanted: object, *, default: object) -> None:
        """Raise InputError unless a key is missing or has the only value that is modelled."""
        value = self.content.get(key, default)
        if value != wanted:
            raise InputError(f"{self.path}: {key} {value!r} is not modelled for {self.family}; {wanted!r} is")

    def dividing(self, key: str, part: int, whole_key: str, whole: int) -> None:
        """Raise InputError unless `part` divides `whole`."""
        if whole % part:
            raise InputError(f"{self.path}: {key} {part} does not divide {whole_key} {whole}")

    @property
    def name(self) -> str:
        """The folder's name for a file that is called config.json, else the file's."""
        return self.path.resolve().parent.name if self.path.stem == "config" else self.path.stem
