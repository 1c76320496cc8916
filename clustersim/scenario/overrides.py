"""How does `--set layout.tp=4` change a scenario?

An override is a dotted path into the file's mapping and a YAML value. It is applied before validation, so a
misspelt path gives the same error as a misspelt key in the file. Where the file has a shorthand (`cluster:
dgx-h100`), it is first expanded (`cluster: {name: dgx-h100}`).
"""

import copy
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from typing import Any

from clustersim.common.data_files import parse_yaml
from clustersim.common.errors import InputError, format_value
from clustersim.scenario.config.scenario import ScenarioConfig
from clustersim.scenario.config_reader import OneOfConfig


def apply_overrides(mapping: Mapping[str, Any], overrides: Iterable[str]) -> dict[str, Any]:
    """A copy of the mapping with every `key=value` applied in order; the last one wins."""
    result = copy.deepcopy(dict(mapping))
    for override in [overrides] if isinstance(overrides, str) else overrides:
        path, value = _parse_override(override)
        _set_value(result, path, copy.deepcopy(value))
    return result


@lru_cache(maxsize=1024)  # a search repeats the same overrides
def _parse_override(override: str) -> tuple[tuple[str, ...], object]:
    key, separator, text = override.partition("=")
    path = tuple(key.strip().split("."))
    if not separator or not all(path):
        raise InputError(f"--set {override}: write a dotted key and a value, such as --set layout.tp=4")
    try:
        return path, parse_yaml(text)
    except InputError as error:
        raise InputError(f"--set {override}: {error}") from error


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
        raise InputError(
            f"--set {'.'.join(path)}: {'.'.join(path[:depth])} is {format_value(value)}, which has no keys"
        )
    replaces = model is not None and issubclass(model, OneOfConfig) and path[depth] not in value
    return {} if replaces else copy.deepcopy(value)
