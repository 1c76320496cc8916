"""What do two scenarios say otherwise?

Both are read as the file door reads them, so shorthands and keys that are left out do not differ from what they stand
for. Shown is what the file has, and its default where it has nothing. What files say that a scenario only names is not
a key of it; `other_files` says which of them differ.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any

from clustersim.scenario.config.scenario import ScenarioFile
from clustersim.scenario.config_reader import Choice, Section
from clustersim.scenario.scenario import Scenario

Key = tuple[str, ...]
Plain = str | int | float | bool | list[Any] | dict[str, Any] | None


@dataclass(frozen=True, slots=True)
class Changed:
    """A key with two values. first, second: as the files have them, or the default; None where there is no value."""

    key: str
    first: Plain
    second: Plain


def changed_keys(first: Scenario, second: Scenario) -> tuple[Changed, ...]:
    """What differs, by dotted keys, in the order of the file; no defaults of options that only one of them can have."""
    before, after = _Said.of(first), _Said.of(second)
    keys = [*before.values, *(key for key in after.values if key not in before.values)]
    return tuple(
        Changed(".".join(key), before.shown(key), after.shown(key))
        for key in sorted(keys, key=_place)
        if before.values.get(key) != after.values.get(key) and before.tells(key, after) and after.tells(key, before)
    )


def other_files(first: Scenario, second: Scenario) -> list[str]:
    """What is read from a file and differs, though both scenarios name it by the same words."""
    keys = {change.key.partition(".")[0] for change in changed_keys(first, second)}
    pairs: dict[str, tuple[object, object]] = {
        "model": (first.model, second.model),
        "cluster": (first.cluster.accelerator, second.cluster.accelerator),
        "framework": (first.framework, second.framework),
        "cost": (first.cost.record, second.cost.record),
    }
    return [name for name, (one, other) in pairs.items() if name not in keys and one != other]


@dataclass(frozen=True, slots=True)
class _Said:
    """values: what a scenario says or stands for, by path; written: what its file has of that."""

    values: Mapping[Key, Plain]
    written: Mapping[Key, Any]

    @classmethod
    def of(cls, scenario: Scenario) -> "_Said":
        """Read as the file door reads it."""
        mapping = scenario.to_mapping()
        values = dict(_values(ScenarioFile.model_validate(mapping)))
        return cls(values, _written(mapping, (), values))

    def shown(self, key: Key) -> Plain:
        """What the file has, with its unit; else what it stands for."""
        return self.written.get(key, self.values[key]) if key in self.values else None

    def tells(self, key: Key, other: "_Said") -> bool:
        """Whether a value is worth a line beside another scenario's, or is only the default of an option."""
        return key not in self.values or key in other.values or key in self.written


def _values(section: Section, path: Key = ()) -> Iterator[tuple[Key, Plain]]:
    """Every value of a section and those inside it, by path."""
    if isinstance(section, Choice):
        name, options = section.chosen
        yield path, name
        yield from _values(options, (*path, name))
        return
    for name, field in type(section).model_fields.items():
        yield from _inside(getattr(section, name), (*path, field.alias or name))


def _inside(value: object, path: Key) -> Iterator[tuple[Key, Plain]]:
    match value:
        case Section():
            yield from _values(value, path)
        case Mapping():
            for key, inner in value.items():
                yield from _inside(inner, (*path, str(_plain(key))))
        case None | []:
            pass
        case _:
            yield path, _plain(value)


def _plain(value: object) -> Any:
    """A value that JSON has."""
    match value:
        case Enum():
            return value.value
        case Section():
            return {".".join(key): inner for key, inner in _values(value)}
        case list() | tuple():
            return [_plain(item) for item in value]
        case _:
            return value


def _written(value: object, path: Key, values: Mapping[Key, Plain]) -> dict[Key, Any]:
    """The values that a file has, by the same paths, shorthands written out."""
    section = ScenarioFile.at(path)
    expanded = value if section is None else section.written_out(value)
    if section is not None and issubclass(section, Choice) and isinstance(expanded, Mapping):
        name = str(next(iter(expanded)))
        return {path: name, **_written(expanded[name], (*path, name), values)}
    if path in values or not isinstance(expanded, Mapping):
        return {path: value}
    inner = [_written(item, (*path, str(key)), values) for key, item in expanded.items()]
    return {key: element for part in inner for key, element in part.items()}


def _place(key: Key) -> int:
    """Where a key's section stands in the file."""
    return list(ScenarioFile.model_fields).index(key[0])
