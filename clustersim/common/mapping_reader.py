"""Strict reader of the mappings of a data file that is written by hand.

Every key is read by name and type (`common.deserialize`), with units and bounds; a key that nothing reads is an
error, with the nearest readable key as a suggestion. Messages name the file, the dotted key and the value.
"""

import difflib
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from enum import Enum
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from clustersim.common import data_files
from clustersim.common.deserialize import deserialize, require_choice
from clustersim.common.errors import (
    MAX_PROBLEMS,
    InputError,
    combined_error,
    format_value,
    problems_of,
    suggest_nearest,
)
from clustersim.common.renamed_keys import find_renamed_key
from clustersim.common.units import Dimension, parse_quantity

EnumMember = TypeVar("EnumMember", bound=Enum)


class MappingReader:
    """Reads one mapping of a file.

    Readers of one file share the record of keys read, which `reject_unknown_keys` checks.
    """

    def __init__(self, path: Path, content: Mapping[str, Any], overrides: Mapping[str, Any] | None = None) -> None:
        self._path, self._prefix = path, ""
        self._content = _apply_overrides(path, content, overrides or {})
        self._keys_read: dict[str, None] = {}

    def _nested_reader(self, key: str, content: Mapping[str, Any]) -> "MappingReader":
        reader = MappingReader(self._path, content)
        reader._prefix, reader._keys_read = f"{self._prefix}{key}.", self._keys_read
        return reader

    def with_defaults(self, defaults: Mapping[str, Any]) -> "MappingReader":
        """A reader of this mapping merged over defaults, key by key in nested mappings, too."""
        reader = MappingReader(self._path, merge_mappings(defaults, self._content))
        reader._prefix, reader._keys_read = self._prefix, self._keys_read
        return reader

    @property
    def content(self) -> Mapping[str, Any]:
        """The mapping as it is in the file."""
        return self._content

    @property
    def folder(self) -> Path:
        """The folder of the file, against which relative paths are resolved."""
        return self._path.parent

    def collect(self, /, **readers: Callable[[], Any]) -> dict[str, Any]:
        """What each reader returns, by its name; raise one InputError with the problems of all that fail."""
        values, problems = dict[str, Any](), list[str]()
        for name, read in readers.items():
            try:
                values[name] = read()
            except InputError as error:
                problems += problems_of(error)
        if problems:
            file = data_files.display_name(self._path)
            raise combined_error(file, [problem.removeprefix(f"{file}: ") for problem in problems])
        return values

    def input_error(self, key: str, reason: str) -> InputError:
        """The InputError for a key of this mapping; marks the key as read, so that it has one problem only."""
        self._keys_read[f"{self._prefix}{key}"] = None
        return InputError(f"{data_files.display_name(self._path)}: {self._prefix}{key}: {reason}")

    def has_key(self, key: str) -> bool:
        """Whether the file has a value for this key (null counts as absent); marks the key as read."""
        self._keys_read[f"{self._prefix}{key}"] = None
        return self._content.get(key) is not None

    def get_value(self, key: str) -> Any:
        """The value as it is in the file; raise InputError if it is missing."""
        if not self.has_key(key):
            raise self.input_error(key, f"is missing{self._suggest_misspelling(key)}")
        return self._content[key]

    def _suggest_misspelling(self, key: str) -> str:
        """Completes the message about a missing key with the key that may be a misspelling of it."""
        unread = [name for name in self.key_names() if f"{self._prefix}{name}" not in self._keys_read]
        nearest = difflib.get_close_matches(key, unread, n=1)
        return f"; the file has {self._prefix}{nearest[0]}" if nearest else ""

    def _get_typed(self, key: str, kind: Any) -> Any:
        """The value as a type that `deserialize` knows."""
        return self._name_file(deserialize, self.get_value(key), kind, f"{self._prefix}{key}")

    def _name_file(self, parse: Callable[..., Any], *arguments: Any) -> Any:
        """What a parser returns; its errors are prefixed with the file."""
        try:
            return parse(*arguments)
        except InputError as error:
            raise InputError(f"{data_files.display_name(self._path)}: {error}") from error

    def get_text(self, key: str) -> str:
        """A nonempty string, with line breaks folded."""
        value: str = self._get_typed(key, str)
        if not value.strip():
            raise self.input_error(key, f"{format_value(value)} is not a text")
        return " ".join(value.split())

    def get_text_mapping(self) -> Mapping[str, str]:
        """All values of this mapping as strings."""
        return {str(key): self.get_text(key) for key in self._content}

    def get_text_list(self, key: str) -> tuple[str, ...]:
        """Strings, which may be none."""
        values: tuple[str, ...] = self._get_typed(key, tuple[str, ...])
        return values

    def get_name(self, key: str) -> str:
        """A name, which may also be written as an integer."""
        value = self.get_value(key)
        if isinstance(value, bool) or not isinstance(value, (str, int)) or value == "":
            raise self.input_error(key, f"{format_value(value)} is not a name")
        return str(value)

    def get_data_file(self, key: str, category: str) -> str:
        """The name of a packaged data file, or the path of a file relative to this one."""
        name = self.get_text(key)
        try:
            data_files.find_file(category, name)
        except InputError as error:
            raise self.input_error(key, str(error)) from error
        return str(data_files.resolve_relative(self._path.parent, name)) if data_files.is_path(name) else name

    def get_bool(self, key: str, *, default: bool = False, required: bool = False) -> bool:
        """True or false; the default where the key is absent and not required."""
        return bool(self._get_typed(key, bool)) if required or self.has_key(key) else default

    def get_choice(self, key: str, *choices: str, required: bool = False) -> str:
        """One of the choices; the first one where the key is absent and not required."""
        if not required and not self.has_key(key):
            return choices[0]
        return str(self._name_file(require_choice, self.get_value(key), choices, f"{self._prefix}{key}"))

    def get_member(self, key: str, kind: type[EnumMember], *, required: bool = False) -> EnumMember:
        """A member of an enumeration by its value; the first one where the key is absent and not required."""
        return kind(self.get_choice(key, *(member.value for member in kind), required=required))

    def get_choices(self, key: str, *choices: str) -> tuple[str, ...]:
        """A list of choices."""
        name = f"{self._prefix}{key}"
        return tuple(self._name_file(require_choice, value, choices, name) for value in self.get_text_list(key))

    def get_int(self, key: str, *, max_value: int, min_value: int = 1) -> int:
        """An integer from `min_value` to `max_value`."""
        value = self.get_value(key)
        if isinstance(value, bool) or not isinstance(value, int) or not min_value <= value <= max_value:
            raise self.input_error(
                key, f"{format_value(value)} is not a whole number from {min_value} to {max_value:,}"
            )
        return value

    def key_names(self) -> list[str]:
        """The keys of this mapping."""
        return [str(key) for key in self._content]

    def get_float(self, key: str, *, min_value: float = 0.0) -> float:
        """A number without a unit, not below `min_value`."""
        value = self.get_value(key)
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not min_value <= value < math.inf:
            raise self.input_error(key, f"{format_value(value)} is not a number from {min_value:g} up")
        return float(value)

    def get_fraction(self, key: str) -> float:
        """A fraction, above 0 and up to 1."""
        value = self.get_float(key)
        if not 0.0 < value <= 1.0:
            raise self.input_error(key, f"{format_value(value)} is not a share of a peak, above 0 and up to 1")
        return value

    def get_ratio(self, key: str, *, max_value: float) -> float:
        """A number above 0 and up to `max_value`; 1 where the key is absent."""
        value = self.get_value(key) if self.has_key(key) else 1.0
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0.0 < value <= max_value:
            raise self.input_error(key, f"{format_value(value)} is not a number above 0 and up to {max_value:g}")
        return float(value)

    def get_quantity(self, key: str, dimension: Dimension, *, allow_zero: bool = False) -> float:
        """A quantity with its unit, converted to SI; positive, or zero where that is allowed."""
        value = self.get_value(key)
        try:
            amount = parse_quantity(value, dimension)
        except InputError as error:
            raise self.input_error(key, str(error)) from error
        if amount < 0 or (amount == 0 and not allow_zero):
            raise self.input_error(key, f"{format_value(value)} is {'below' if allow_zero else 'not above'} zero")
        if not math.isfinite(amount):
            raise self.input_error(key, f"{format_value(value)} is not finite")
        return amount

    def get_section(self, key: str) -> "MappingReader":
        """A reader of a nested mapping."""
        value = self._get_typed(key, Mapping)
        if not value:
            raise self.input_error(key, "is empty; it is a mapping of keys to values")
        return self._nested_reader(key, value)

    def get_entries(self, key: str, *label_keys: str) -> "Iterator[MappingReader]":
        """Readers of the mappings in a list; label_keys: keys whose values identify an entry in messages.

        Every entry has its own record of keys read: its unknown keys are ignored unless it rejects them.
        """
        for index, value in enumerate(self._get_typed(key, list)):
            self._name_file(deserialize, value, Mapping, f"{self._prefix}{key}[{index}]")
            entry = MappingReader(self._path, value)
            entry._prefix = f"{self._prefix}{key}[{index}] ({'-'.join(str(value.get(name)) for name in label_keys)})."
            yield entry

    def get_items(self, key: str, *, count: int | None = None) -> "MappingReader":
        """A reader of the values of a list, by the keys [0], [1], ...; count: how many it has to have."""
        values = self._get_typed(key, list)
        if count is not None and len(values) != count:
            raise self.input_error(key, f"{format_value(values)} has not {count} values")
        items = MappingReader(self._path, {f"[{index}]": value for index, value in enumerate(values)})
        items._prefix = f"{self._prefix}{key}"
        return items

    def reject_renamed_keys(self, kind: str) -> None:
        """Raise InputError that names the first renamed key, here or nested; kind: key of `RENAMED_KEYS`."""
        if renamed := find_renamed_key(kind, self._content):
            raise self.input_error(*renamed)

    def reject_unknown_keys(self) -> None:
        """Raise InputError for all keys, here or nested, that nothing has read."""
        names, unread = tuple(self._keys_read), [*self._unread_keys()]
        problems = {name: partial(self._reject_unread, name, names) for name in unread[:MAX_PROBLEMS]}
        if left_out := len(unread) - len(problems):
            problems[""] = partial(self._reject_others, left_out)
        self.collect(**problems)

    def _unread_keys(self) -> Iterator[str]:
        """The dotted keys, here or nested, that nothing has read, without those inside of such a key."""
        for key, value in self._content.items():
            name = f"{self._prefix}{key}"
            if name not in self._keys_read:
                yield name
            elif isinstance(value, Mapping):
                yield from self._nested_reader(str(key), value)._unread_keys()

    def _reject_unread(self, name: str, readable: Iterable[str]) -> None:
        hint = suggest_nearest(name, readable)
        raise self.input_error(name.removeprefix(self._prefix), f"unknown key; {hint}")

    def _reject_others(self, count: int) -> None:
        raise InputError(f"{data_files.display_name(self._path)}: and {count:,} more unknown keys")


def _apply_overrides(
    path: Path, content: Mapping[str, Any], overrides: Mapping[str, Any], prefix: str = ""
) -> dict[str, Any]:
    """A copy of the content with keys replaced or added.

    Keys of overrides may be dotted, their values nested mappings.
    """
    merged = dict(content)
    for dotted, value in overrides.items():
        key, _, subkey = str(dotted).partition(".")
        override = {subkey: value} if subkey else value
        if isinstance(override, Mapping):
            nested = {} if merged.get(key) is None else merged[key]
            if not isinstance(nested, Mapping):
                reason = f" and has no key {next(iter(override))}" if override else ", not a mapping of keys to values"
                raise InputError(f"{data_files.display_name(path)}: {prefix}{key} is {format_value(nested)}{reason}")
            merged[key] = _apply_overrides(path, nested, override, f"{prefix}{key}.")
        else:
            merged[key] = override
    return merged


def merge_mappings(base: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """A copy of base with the values of changes; mappings in both are merged in the same way.

    >>> merge_mappings({"a": 1, "b": {"c": 2, "d": 3}}, {"b": {"c": 4}})
    {'a': 1, 'b': {'c': 4, 'd': 3}}
    """
    merged = dict(base)
    for key, value in changes.items():
        nested = merged.get(key)
        is_nested = isinstance(nested, Mapping) and isinstance(value, Mapping)
        merged[key] = merge_mappings(dict(nested or {}), value) if is_nested else value
    return merged


def flatten_keys(content: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Values by dotted keys.

    >>> flatten_keys({"node": {"nic.per_node": 8, "gpus": 8}})
    {'node.nic.per_node': 8, 'node.gpus': 8}
    """
    values: dict[str, Any] = {}
    for key, value in content.items():
        values |= flatten_keys(value, f"{prefix}{key}.") if isinstance(value, Mapping) else {f"{prefix}{key}": value}
    return values
