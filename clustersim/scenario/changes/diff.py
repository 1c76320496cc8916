"""Which keys differ between two scenarios?

Both are parsed by the config models, so shorthands and omitted keys compare equal to what they stand for.
Reported is the file's value, or its default where the file has none (of kernels, the framework's). Contents
of files that a scenario only refers to are not keys of it; `changed_referenced_files` reports which of them
differ.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any

from clustersim.model.framework import KERNEL_KEYS
from clustersim.scenario.config.scenario import ScenarioConfig
from clustersim.scenario.config_reader import ConfigModel, OneOfConfig
from clustersim.scenario.scenario import Scenario

KeyPath = tuple[str, ...]
JsonValue = str | int | float | bool | list[Any] | dict[str, Any] | None


@dataclass(frozen=True, slots=True)
class ChangedKey:
    """A key with two values. first, second: as in the files, or the default; None where there is no value."""

    key: str
    first: JsonValue
    second: JsonValue


def changed_keys(first: Scenario, second: Scenario) -> tuple[ChangedKey, ...]:
    """The keys with different values, in the file's order, without defaults of options that only one side can have."""
    first_values, second_values = _FlatScenario.from_scenario(first), _FlatScenario.from_scenario(second)
    keys = [*first_values.values, *(key for key in second_values.values if key not in first_values.values)]
    return tuple(
        ChangedKey(".".join(key), first_values.display_value(key), second_values.display_value(key))
        for key in sorted(keys, key=_section_index)
        if first_values.values.get(key) != second_values.values.get(key)
        and first_values.is_comparable(key, second_values)
        and second_values.is_comparable(key, first_values)
    )


def changed_referenced_files(first: Scenario, second: Scenario) -> list[str]:
    """Sections whose referenced file content differs although both scenarios refer to it by the same name."""
    keys = {change.key.partition(".")[0] for change in changed_keys(first, second)}
    values_by_section: dict[str, tuple[object, object]] = {
        "model": (first.model, second.model),
        "cluster": (first.cluster.accelerator, second.cluster.accelerator),
        "framework": (first.framework, second.framework),
        "cost": (first.cost.record, second.cost.record),
    }
    return [name for name, (one, other) in values_by_section.items() if name not in keys and one != other]


@dataclass(frozen=True, slots=True)
class _FlatScenario:
    """A scenario by key path. values: explicit or default; raw_values: as the file spells them."""

    values: Mapping[KeyPath, JsonValue]
    raw_values: Mapping[KeyPath, Any]

    @classmethod
    def from_scenario(cls, scenario: Scenario) -> "_FlatScenario":
        """Parse a scenario's mapping as a scenario file."""
        mapping = scenario.to_mapping()
        training = scenario.training
        defaults: dict[KeyPath, JsonValue] = {
            ("training", name): _to_json(getattr(training, name)) for name in KERNEL_KEYS
        }
        defaults["training", "precision", "gradients"] = _to_json(training.recipe.weight_formats.gradients)
        values = defaults | dict(_flatten(ScenarioConfig.model_validate(mapping)))
        return cls(values, _flatten_raw(mapping, (), values))

    def display_value(self, key: KeyPath) -> JsonValue:
        """The value as the file spells it, with its unit; else the default; None for an unknown key."""
        return self.raw_values.get(key, self.values[key]) if key in self.values else None

    def is_comparable(self, key: KeyPath, other: "_FlatScenario") -> bool:
        """Whether a value is worth reporting next to another scenario's, or is only the default of an option."""
        return key not in self.values or key in other.values or key in self.raw_values


def _flatten(model: ConfigModel, path: KeyPath = ()) -> Iterator[tuple[KeyPath, JsonValue]]:
    """Every value of a config model and its nested models, by key path."""
    if isinstance(model, OneOfConfig):
        name, options = model.chosen
        yield path, name
        yield from _flatten(options, (*path, name))
        return
    for name, field in type(model).model_fields.items():
        yield from _flatten_value(getattr(model, name), (*path, field.alias or name))


def _flatten_value(value: object, path: KeyPath) -> Iterator[tuple[KeyPath, JsonValue]]:
    match value:
        case ConfigModel():
            yield from _flatten(value, path)
        case Mapping():
            for key, inner in value.items():
                yield from _flatten_value(inner, (*path, str(_to_json(key))))
        case None | []:
            pass
        case _:
            yield path, _to_json(value)


def _to_json(value: object) -> Any:
    """The value as JSON data."""
    match value:
        case Enum():
            return value.value
        case ConfigModel():
            return {".".join(key): inner for key, inner in _flatten(value)}
        case frozenset():
            return sorted(map(_to_json, value))
        case list() | tuple():
            return [_to_json(element) for element in value]
        case _:
            return value


def _flatten_raw(value: object, path: KeyPath, values: Mapping[KeyPath, JsonValue]) -> dict[KeyPath, Any]:
    """The values of a raw mapping by the same key paths, shorthands expanded."""
    model = ScenarioConfig.config_at(path)
    expanded = value if model is None else model.expand_shorthand(value)
    if model is not None and issubclass(model, OneOfConfig) and isinstance(expanded, Mapping):
        name = str(next(iter(expanded)))
        return {path: name, **_flatten_raw(expanded[name], (*path, name), values)}
    if path in values or not isinstance(expanded, Mapping):
        return {path: value}
    nested = [_flatten_raw(inner, (*path, str(key)), values) for key, inner in expanded.items()]
    return {key: inner for flattened in nested for key, inner in flattened.items()}


def _section_index(key: KeyPath) -> int:
    """Index of a key's top-level section in the file."""
    return list(ScenarioConfig.model_fields).index(key[0])
