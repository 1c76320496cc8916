"""How is one mapping of a data file read?

Strictly: every key is asked for by name and with its type; what nobody asked for is refused with the nearest key that
somebody did. Messages name the file, the dotted key and the value.
"""

import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from clustersim.common import data_files
from clustersim.common.errors import InputError, nearest, shown
from clustersim.common.units import Dimension, parse_quantity


class Section:
    """One mapping of a file; sections of one file share the record of what was asked, which `finish` checks."""

    def __init__(self, path: Path, content: Mapping[str, Any], changes: Mapping[str, Any] | None = None) -> None:
        self._path, self._prefix = path, ""
        self._content = _changed(path, content, changes or {})
        self._asked: dict[str, None] = {}

    def _inner(self, key: str, content: Mapping[str, Any]) -> "Section":
        inner = Section(self._path, content)
        inner._prefix, inner._asked = f"{self._prefix}{key}.", self._asked
        return inner

    def refuse(self, key: str, reason: str) -> InputError:
        """The error for a key of this section."""
        return InputError(f"{data_files.described(self._path)}: {self._prefix}{key}: {reason}")

    def has(self, key: str) -> bool:
        """Whether the file has this key (null is as good as absent); asking makes the key a known one."""
        self._asked[self._prefix + key] = None
        return self._content.get(key) is not None

    def value(self, key: str) -> Any:
        """The value as the file has it."""
        if not self.has(key):
            raise self.refuse(key, "is missing")
        return self._content[key]

    def text(self, key: str) -> str:
        """A text, with line breaks folded."""
        value = self.value(key)
        if not isinstance(value, str) or not value.strip():
            raise self.refuse(key, f"{shown(value)} is not a text")
        return " ".join(value.split())

    def texts(self) -> Mapping[str, str]:
        """All of this section as texts."""
        return {str(key): self.text(key) for key in self._content}

    def words(self, key: str) -> list[str]:
        """A list of texts, which may be empty."""
        value = self.value(key)
        if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
            raise self.refuse(key, f"{shown(value)} is not a list of texts")
        return value

    def name(self, key: str) -> str:
        """A name, which may be written as a whole number."""
        value = self.value(key)
        if isinstance(value, bool) or not isinstance(value, (str, int)) or value == "":
            raise self.refuse(key, f"{shown(value)} is not a name")
        return str(value)

    def on_shelf(self, key: str, shelf: str) -> str:
        """The name of something on a shelf, or the path of such a file as seen from this one."""
        name = self.text(key)
        try:
            data_files.find(shelf, name)
        except InputError as error:
            raise self.refuse(key, str(error)) from error
        return str(data_files.beside(self._path.parent, name)) if data_files.is_path(name) else name

    def flag(self, key: str) -> bool:
        """True or false; false where the key is absent."""
        value = self.value(key) if self.has(key) else False
        if not isinstance(value, bool):
            raise self.refuse(key, f"{shown(value)} is neither true nor false")
        return value

    def choice(self, key: str, *choices: str, required: bool = False) -> str:
        """One of some words; the first one where the key is absent and not required."""
        if not required and not self.has(key):
            return choices[0]
        value = self.value(key)
        if value not in choices:
            raise self.refuse(key, f"{shown(value)} is unknown; {nearest(str(value), choices)}")
        return str(value)

    def count(self, key: str, *, most: int, least: int = 1) -> int:
        """A whole number from `least` to `most`."""
        value = self.value(key)
        if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
            raise self.refuse(key, f"{shown(value)} is not a whole number from {least} to {most:,}")
        return value

    def names(self) -> list[str]:
        """The keys that the file has here."""
        return [str(key) for key in self._content]

    def number(self, key: str, *, low: float = 0.0) -> float:
        """A number without a unit, not below `low`."""
        value = self.value(key)
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not low <= value < math.inf:
            raise self.refuse(key, f"{shown(value)} is not a number from {low:g} up")
        return float(value)

    def share(self, key: str) -> float:
        """A share of a peak, above 0 and up to 1."""
        value = self.number(key)
        if not 0.0 < value <= 1.0:
            raise self.refuse(key, f"{shown(value)} is not a share of a peak, above 0 and up to 1")
        return value

    def ratio(self, key: str, *, most: float) -> float:
        """A number above 0 and up to `most`; 1 where the key is absent."""
        value = self.value(key) if self.has(key) else 1.0
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0.0 < value <= most:
            raise self.refuse(key, f"{shown(value)} is not a number above 0 and up to {most:g}")
        return float(value)

    def quantity(self, key: str, dimension: Dimension, *, zero: bool = False) -> float:
        """A quantity with its unit, above zero (or zero, where that is allowed), in SI."""
        value = self.value(key)
        try:
            amount = parse_quantity(value, dimension)
        except InputError as error:
            raise self.refuse(key, str(error)) from error
        if amount < 0 or (amount == 0 and not zero):
            raise self.refuse(key, f"{shown(value)} is {'below' if zero else 'not above'} zero")
        if not math.isfinite(amount):
            raise self.refuse(key, f"{shown(value)} is not finite")
        return amount

    def section(self, key: str) -> "Section":
        """A mapping inside this one."""
        value = self.value(key)
        if not isinstance(value, Mapping):
            raise self.refuse(key, f"{shown(value)} is not a mapping of keys to values")
        if not value:
            raise self.refuse(key, "is empty; it is a mapping of keys to values")
        return self._inner(key, value)

    def entries(self, key: str, *naming: str) -> "Iterator[Section]":
        """The mappings of a list; `naming` are the keys whose values tell one from another in messages.

        Keys of entries that nobody asks for are left alone.
        """
        values = self.value(key)
        if not isinstance(values, list):
            raise self.refuse(key, f"{shown(values)} is not a list")
        for position, value in enumerate(values):
            if not isinstance(value, Mapping):
                raise self.refuse(f"{key}[{position}]", f"{shown(value)} is not a mapping of keys to values")
            entry = Section(self._path, value)
            entry._prefix = f"{self._prefix}{key}[{position}] ({'-'.join(str(value.get(name)) for name in naming)})."
            yield entry

    def finish(self) -> None:
        """Refuse the first key, here or further in, that nobody asked for."""
        for key, value in self._content.items():
            name = f"{self._prefix}{key}"
            if name not in self._asked:
                raise self.refuse(str(key), f"unknown key; {nearest(name, self._asked)}")
            if isinstance(value, Mapping):
                self._inner(str(key), value).finish()


def _changed(path: Path, content: Mapping[str, Any], changes: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """A copy of the content with keys replaced or added; a change's key may be dotted, its value a mapping of more."""
    whole = dict(content)
    for dotted, value in changes.items():
        key, _, rest = str(dotted).partition(".")
        change = {rest: value} if rest else value
        if isinstance(change, Mapping):
            inner = {} if whole.get(key) is None else whole[key]
            if not isinstance(inner, Mapping):
                reason = f" and has no key {next(iter(change))}" if change else ", not a mapping of keys to values"
                raise InputError(f"{data_files.described(path)}: {prefix}{key} is {shown(inner)}{reason}")
            whole[key] = _changed(path, inner, change, f"{prefix}{key}.")
        else:
            whole[key] = change
    return whole


def flat(content: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Values by dotted keys.

    >>> flat({"node": {"nic.per_node": 8, "gpus": 8}})
    {'node.nic.per_node': 8, 'node.gpus': 8}
    """
    values: dict[str, Any] = {}
    for key, value in content.items():
        values |= flat(value, f"{prefix}{key}.") if isinstance(value, Mapping) else {f"{prefix}{key}": value}
    return values
