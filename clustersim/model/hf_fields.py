"""Typed access to the keys of a Hugging Face `config.json`; errors name the file, the key and the value."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from clustersim.common.errors import InputError
from clustersim.model.layer_stack import MAX_LAYERS, MAX_MTP_LAYERS

FULL, SLIDING = "full_attention", "sliding_attention"
_MTP_KEY = "num_nextn_predict_layers"


@dataclass(frozen=True, slots=True)
class HfConfig:
    """A configuration, its model family, and the file that it comes from."""

    path: Path
    content: Mapping[str, Any]
    family: str

    def with_values(self, **values: Any) -> "HfConfig":
        """The configuration with other values, under the keys that a reader expects."""
        return replace(self, content={**self.content, **values})

    def positive_int(self, key: str, default: int | None = None) -> int:
        """An integer above zero; `default` if the key is missing or null."""
        value = self.content.get(key)
        if value is None and default is not None:
            return default
        if value is None:
            raise InputError(f"{self.path}: has no {key}, which a {self.family} model needs")
        if isinstance(value, bool) or not isinstance(value, int) or value <= 0:
            raise InputError(f"{self.path}: {key} is {value!r}, not a whole number above 0")
        return value

    def nonnegative_int(self, key: str, default: int) -> int:
        """An integer from zero; `default` if the key is missing or null."""
        value = self.content.get(key)
        if value is None:
            return default
        if isinstance(value, bool) or not isinstance(value, int) or value < 0:
            raise InputError(f"{self.path}: {key} is {value!r}, not a whole number from 0")
        return value

    @property
    def mtp_layer_count(self) -> int:
        """Number of multi-token prediction layers."""
        value = self.nonnegative_int(_MTP_KEY, 0)
        if value > MAX_MTP_LAYERS:
            raise InputError(f"{self.path}: {_MTP_KEY} {value} is too large; {MAX_MTP_LAYERS} is the most")
        return value

    def layer_count(self, key: str) -> int:
        """Number of layers; raise InputError above MAX_LAYERS, since layers are listed one by one."""
        value = self.positive_int(key)
        if value > MAX_LAYERS:
            raise InputError(f"{self.path}: {key} {value:,} is too large; {MAX_LAYERS:,} is the most")
        return value

    def boolean(self, key: str, *, default: bool) -> bool:
        """True or false; `default` if the key is missing or null."""
        value = self.content.get(key)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise InputError(f"{self.path}: {key} is {value!r}, not true or false")
        return value

    def fraction_below_one(self, key: str, default: float) -> float:
        """A number from 0 to below 1; `default` if the key is missing or null."""
        value = self.content.get(key)
        if value is None:
            return default
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < 1:
            raise InputError(f"{self.path}: {key} is {value!r}, not a number from 0 to below 1")
        return float(value)

    def positive_number(self, key: str) -> float | None:
        """A number above zero; None if the key is missing or null."""
        value = self.content.get(key)
        if value is not None and (isinstance(value, bool) or not isinstance(value, int | float) or value <= 0):
            raise InputError(f"{self.path}: {key} is {value!r}, not a number above 0")
        return value

    def rotary_fraction(self, default: float, key: str = "partial_rotary_factor") -> float:
        """Fraction of each head with rotary positions (partial_rotary_factor, since 2025 in rope_parameters)."""
        rope_parameters = self.content.get("rope_parameters")
        value = self.content.get(key, rope_parameters.get(key) if isinstance(rope_parameters, Mapping) else None)
        if value is None:
            return default
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= 1:
            raise InputError(f"{self.path}: {key} is {value!r}, not a number above 0 and up to 1")
        return float(value)

    def per_layer_values(self, key: str, legal: tuple[Any, ...], layer_count: int) -> list[Any] | None:
        """One of the legal values per layer; None if the key is missing or null."""
        value = self.content.get(key)
        if value is None:
            return None
        if not isinstance(value, list) or len(value) != layer_count:
            given = f"{len(value)} values" if isinstance(value, list) else repr(value)
            raise InputError(f"{self.path}: {key} is {given}, not one for each of the {layer_count} layers")
        for layer, layer_value in enumerate(value):
            if layer_value not in legal:
                legal_values = " and ".join(map(str, legal))
                raise InputError(f"{self.path}: {key} of layer {layer} is {layer_value!r}; {legal_values} are modelled")
        return value

    def layer_indices(self, key: str, layer_count: int) -> frozenset[int] | None:
        """The listed layers, counted from 0; None if the key is missing or null."""
        value = self.content.get(key)
        if value is None:
            return None
        legal = range(layer_count)
        if not isinstance(value, list) or not all(type(index) is int and index in legal for index in value):
            raise InputError(f"{self.path}: {key} is {value!r}, not a list of layers from 0 to {layer_count - 1}")
        return frozenset(value)

    def require_value(self, key: str, required: object, *, default: object) -> None:
        """Raise InputError unless a key is missing or has the only value that is supported."""
        value = self.content.get(key, default)
        if value != required:
            raise InputError(f"{self.path}: {key} {value!r} is not modelled for {self.family}; {required!r} is")

    def require_divides(self, key: str, divisor: int, total_key: str, total: int) -> None:
        """Raise InputError unless `divisor` divides `total`."""
        if total % divisor:
            raise InputError(f"{self.path}: {key} {divisor} does not divide {total_key} {total}")

    @property
    def name(self) -> str:
        """The folder's name for a file called config.json, else the file's name."""
        return self.path.resolve().parent.name if self.path.stem == "config" else self.path.stem
