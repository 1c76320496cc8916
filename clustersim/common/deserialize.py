"""How does plain content of a data file become typed values?

Strictly: the keys of a dataclass are its field names, enums are stored by value, and nothing is converted except
integers to floats and lists to tuples. A union is one type or None, or several dataclasses; then the one with the
most matching field names is taken. Error messages name the key, the value and what would be valid.

`common.mapping_reader` reads files written by hand on top of this: key by key, with units and bounds.
"""

import math
from collections.abc import Collection, Mapping
from dataclasses import MISSING, fields, is_dataclass
from enum import Enum
from functools import cache
from types import MappingProxyType, NoneType, UnionType
from typing import Any, Final, get_args, get_origin, get_type_hints

from clustersim.common.errors import InputError, format_value, suggest_nearest

_MAX_INTEGER: Final = 2**63  # bound on integers: no measured quantity comes near
_TYPE_ERRORS: Final = MappingProxyType(
    {
        int: "is not a whole number",
        float: "is not a finite number",
        str: "is not a text",
        bool: "is neither true nor false",
        list: "is not a list",
        Mapping: "is not a mapping of keys to values",
    }
)


def deserialize(value: Any, kind: Any, key: str = "") -> Any:
    """Convert a value to `kind`: a dataclass, enum, number, text, list or mapping, or a tuple or union of such.

    key: path of the value in the file. Raises InputError where the value does not have that type.
    """
    if isinstance(kind, UnionType):
        return _union_value(value, get_args(kind), key)
    if is_dataclass(kind):
        return _dataclass_instance(value, kind, key)
    origin = get_origin(kind)
    if origin is tuple:
        return _tuple_items(value, get_args(kind), key)
    if origin is Mapping:
        key_type, value_type = get_args(kind)
        content = _require_type(value, Mapping, key)
        return {
            deserialize(name, key_type, key): deserialize(value, value_type, _join_keys(key, name))
            for name, value in content.items()
        }
    if issubclass(kind, Enum):
        return _enum_member(value, kind, key)
    return _scalar(value, kind, key)


def _scalar(value: Any, kind: Any, key: str) -> Any:
    """A number, text or boolean, or a list or mapping whatever it holds."""
    if kind is not float:
        scalar = _require_type(value, kind, key)
        if kind is int and abs(scalar) >= _MAX_INTEGER:
            raise InputError(f"{key}: {format_value(scalar)} is too large")
        return scalar
    as_float = float(value) if type(value) is int and abs(value) < _MAX_INTEGER else _require_type(value, float, key)
    if not math.isfinite(as_float):
        raise InputError(f"{key}: {format_value(as_float)} {_TYPE_ERRORS[float]}")
    return as_float


def _require_type(value: Any, kind: type, key: str) -> Any:
    """The value, if it is of this type: true is not a number."""
    if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
        raise InputError(f"{key}: {format_value(value)} {_TYPE_ERRORS[kind]}")
    return value


def require_choice(value: Any, choices: Collection[str], key: str) -> str:
    """The value, if it is one of the choices."""
    if not isinstance(value, str) or value not in choices:
        raise InputError(f"{key}: {format_value(value)} is unknown; {suggest_nearest(str(value), choices)}")
    return value


def _enum_member(value: Any, kind: type[Enum], key: str) -> Enum:
    members = {member.value: member for member in kind}
    return members[require_choice(value, members, key)]


def _tuple_items(value: Any, kinds: tuple[Any, ...], key: str) -> tuple[Any, ...]:
    content = _require_type(value, list, key)
    if kinds[-1] is Ellipsis:
        kinds = (kinds[0],) * len(content)
    if len(kinds) != len(content):
        raise InputError(f"{key}: {format_value(value)} has not {len(kinds)} values")
    return tuple(
        deserialize(value, kind, f"{key}[{index}]")
        for index, (value, kind) in enumerate(zip(content, kinds, strict=True))
    )


def _dataclass_instance(value: Any, kind: Any, key: str) -> Any:
    content, hints = _require_type(value, Mapping, key), _field_types(kind)
    for name in content:
        if name not in hints:
            raise InputError(f"{_join_keys(key, name)}: unknown key; {suggest_nearest(name, hints)}")
    for field in fields(kind):
        if field.name not in content and field.default is MISSING and field.default_factory is MISSING:
            raise InputError(f"{_join_keys(key, field.name)}: is missing")
    return kind(**{name: deserialize(value, hints[name], _join_keys(key, name)) for name, value in content.items()})


def _union_value(value: Any, kinds: tuple[Any, ...], key: str) -> Any:
    """The value as the member type that matches it best."""
    if value is None and NoneType in kinds:
        return None
    candidates = [kind for kind in kinds if kind is not NoneType]
    keys = set(value) if isinstance(value, Mapping) else set()
    best = (
        candidates[0] if len(candidates) == 1 else max(candidates, key=lambda kind: len(keys & set(_field_types(kind))))
    )
    return deserialize(value, best, key)


def _join_keys(key: str, name: str) -> str:
    return f"{key}.{name}" if key else str(name)


@cache
def _field_types(kind: type) -> dict[str, Any]:
    hints = get_type_hints(kind)
    return {field.name: hints[field.name] for field in fields(kind)}
