"""How does the plain content of a file become the dataclasses that it describes?

Strictly: keys are the fields' names, enums stand as their values, and nothing is converted but whole numbers to floats
and lists to tuples. A union is one kind or nothing, or several dataclasses, of which a value is the one whose fields
it names most of. Messages name the key, the value and what would be legal.
"""

import math
from collections.abc import Mapping
from dataclasses import MISSING, fields, is_dataclass
from enum import Enum
from functools import cache
from types import MappingProxyType, NoneType, UnionType
from typing import Any, Final, get_args, get_origin, get_type_hints

from clustersim.common.errors import InputError, nearest, shown

_MOST: Final = 2**63  # of whole numbers: none that is measured comes near
_NAMES: Final = MappingProxyType(
    {
        int: "a whole number",
        float: "a finite number",
        str: "a text",
        bool: "true or false",
        tuple: "a list",
        Mapping: "a mapping of keys to values",
    }
)


def decode(value: Any, kind: Any, key: str = "") -> Any:
    """The value as a `kind`: a dataclass, enum, number, text, or a tuple, mapping or union of such.

    key: where it stands. Raise InputError where it is something else.
    """
    if isinstance(kind, UnionType):
        return _one_of(value, get_args(kind), key)
    if is_dataclass(kind):
        return _object(value, kind, key)
    origin = get_origin(kind)
    if origin is tuple:
        return _tuple(value, get_args(kind), key)
    if origin is Mapping:
        named, inner = get_args(kind)
        content = _require(value, dict, key, _NAMES[Mapping])
        return {decode(name, named, key): decode(item, inner, _join(key, name)) for name, item in content.items()}
    if issubclass(kind, Enum):
        return _member(value, kind, key)
    return _plain(value, kind, key)


def _plain(value: Any, kind: Any, key: str) -> Any:
    """A number, text or truth value."""
    if kind is not float:
        found = _require(value, kind, key, _NAMES[kind])
        if kind is int and abs(found) >= _MOST:
            raise InputError(f"{key}: {shown(found)} is too large")
        return found
    number = float(value) if type(value) is int and abs(value) < _MOST else _require(value, float, key, _NAMES[float])
    if not math.isfinite(number):
        raise InputError(f"{key}: {shown(number)} is not {_NAMES[float]}")
    return number


def _require(value: Any, kind: type, key: str, name: str) -> Any:
    """A value of exactly this type: true is no number."""
    if type(value) is not kind:
        raise InputError(f"{key}: {shown(value)} is not {name}")
    return value


def _member(value: Any, kind: type[Enum], key: str) -> Enum:
    names = {item.value: item for item in kind}
    if not isinstance(value, str) or value not in names:
        raise InputError(f"{key}: {shown(value)} is unknown; {nearest(str(value), names)}")
    return names[value]


def _tuple(value: Any, kinds: tuple[Any, ...], key: str) -> tuple[Any, ...]:
    content = _require(value, list, key, _NAMES[tuple])
    if kinds[-1] is Ellipsis:
        kinds = (kinds[0],) * len(content)
    if len(kinds) != len(content):
        raise InputError(f"{key}: {shown(value)} has not {len(kinds)} values")
    return tuple(decode(item, kind, f"{key}[{at}]") for at, (item, kind) in enumerate(zip(content, kinds, strict=True)))


def _object(value: Any, kind: Any, key: str) -> Any:
    content, hints = _require(value, dict, key, _NAMES[Mapping]), _hints(kind)
    for name in content:
        if name not in hints:
            raise InputError(f"{_join(key, name)}: unknown key; {nearest(name, hints)}")
    for dataclass_field in fields(kind):
        if (
            dataclass_field.name not in content
            and dataclass_field.default is MISSING
            and dataclass_field.default_factory is MISSING
        ):
            raise InputError(f"{_join(key, dataclass_field.name)}: is missing")
    return kind(**{name: decode(item, hints[name], _join(key, name)) for name, item in content.items()})


def _one_of(value: Any, kinds: tuple[Any, ...], key: str) -> Any:
    """The value as the kind that fits it best."""
    if value is None and NoneType in kinds:
        return None
    able = [kind for kind in kinds if kind is not NoneType]
    named = set(value) if isinstance(value, dict) else set()
    best = able[0] if len(able) == 1 else max(able, key=lambda kind: len(named & set(_hints(kind))))
    return decode(value, best, key)


def _join(key: str, name: str) -> str:
    return f"{key}.{name}" if key else str(name)


@cache
def _hints(kind: type) -> dict[str, Any]:
    hints = get_type_hints(kind)
    return {dataclass_field.name: hints[dataclass_field.name] for dataclass_field in fields(kind)}
