"""How does `--set layout.tp=4`, or `changed({"layout.tp": 4})`, change a scenario?

An override is a dotted path into the file's mapping and a value, written as YAML or given from Python. It is
applied before validation, so a misspelt path gives the same error as a misspelt key in the file. Where the file
has a shorthand (`cluster: dgx-h100`), it is first expanded (`cluster: {name: dgx-h100}`).
"""

import copy
import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from pathlib import PurePath
from typing import Any

import numpy as np

from clustersim.common.data_files import parse_yaml
from clustersim.common.errors import InputError, format_value
from clustersim.scenario.config.scenario import ScenarioConfig
from clustersim.scenario.config_reader import OneOfConfig


def apply_overrides(mapping: Mapping[str, Any], overrides: Iterable[str]) -> dict[str, Any]:
    """A copy of the mapping with every `key=value` applied in order; the last one wins."""
    listed = [overrides] if isinstance(overrides, str) else overrides
    return _set_values(mapping, map(_parse_override, listed))


def apply_changes(mapping: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """A copy of the mapping with changed values by dotted key.

    A mapping as value changes the keys that it names and leaves the others; all other values replace. NumPy numbers and
    arrays become numbers and lists, tuples lists, paths texts; a text is never parsed as YAML.
    """
    return _set_values(
        mapping,
        (
            (path, _to_plain(value))
            for key, changed in changes.items()
            for path, value in _flatten(_split_key(str(key), str(key)), changed)
        ),
    )


def command_arguments(overrides: Iterable[str]) -> str:
    """Overrides as arguments of the command line, to be copied.

    >>> command_arguments(["layout.tp=8", "training.recompute.modules=[mlp, moe]"])
    "--set layout.tp=8 --set 'training.recompute.modules=[mlp, moe]'"
    """
    return shlex.join(argument for override in overrides for argument in ("--set", override))


def _set_values(mapping: Mapping[str, Any], path_values: Iterable[tuple[tuple[str, ...], object]]) -> dict[str, Any]:
    result = copy.deepcopy(dict(mapping))
    for path, value in path_values:
        _set_value(result, path, copy.deepcopy(value))
    return result


def _flatten(path: tuple[str, ...], value: object) -> Iterator[tuple[tuple[str, ...], object]]:
    """The values inside mappings, each with its path; an empty mapping is a value."""
    if isinstance(value, Mapping) and value:
        for key, inner in value.items():
            yield from _flatten((*path, str(key)), inner)
    else:
        yield path, value


def _to_plain(value: object) -> object:
    """A value as a YAML file would hold it."""
    match value:
        case np.generic() | np.ndarray():
            return value.tolist()
        case Mapping():
            return {key: _to_plain(inner) for key, inner in value.items()}
        case list() | tuple():
            return [_to_plain(inner) for inner in value]
        case PurePath():
            return str(value)
    return value


@lru_cache(maxsize=1024)  # a search repeats the same overrides
def _parse_override(override: str) -> tuple[tuple[str, ...], object]:
    key, separator, text = override.partition("=")
    path = _split_key(key.strip() if separator else "", f"--set {override}")
    try:
        return path, parse_yaml(text)
    except InputError as error:
        raise InputError(f"--set {override}: {error}") from error


def _split_key(key: str, label: str) -> tuple[str, ...]:
    """The parts of a dotted key; label: how an error names it."""
    path = tuple(key.split("."))
    if not all(path):
        raise InputError(f"{label}: write a dotted key and a value, such as --set layout.tp=4")
    return path


def _set_value(mapping: dict[str, Any], path: Sequence[str], value: object) -> None:
    for depth, key in enumerate(path[:-1], start=1):
        mapping[key] = _child_mapping(path, depth, mapping.get(key))
        mapping = mapping[key]
    mapping[path[-1]] = value


def _child_mapping(path: Sequence[str], depth: int, value: object) -> dict[str, Any]:
    """The mapping at path[:depth] that holds the next key; the new key of a one-of section replaces its old one."""
    model = ScenarioConfig.config_at(path[:depth])
    if model is not None and value is not None:
        value = model.expand_shorthand(value)
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise InputError(f"{'.'.join(path)}: {'.'.join(path[:depth])} is {format_value(value)}, which has no keys")
    replaces = model is not None and issubclass(model, OneOfConfig) and path[depth] not in value
    return {} if replaces else copy.deepcopy(value)
