"""How are results cached, and by what key?

Every cache is keyed by values or by objects themselves, never by their addresses:

    one result of a frozen object      `functools.cached_property`
    results of a function              `functools.cache`
    results of a method                `common.cached_method` by its arguments; a dict of the object where the key is
                                       only a part of them, or where events are waiting for each lookup
    results that outlive a simulation  `common.lru`, bounded in size
    arguments that are shared          a class compared by identity (`eq=False`), such as `Operation` and
                                       `Segment`: layers, microbatches and ranks refer to one object
    arguments with a slow hash         `Interner`: a small integer for each distinct value, such as a comm op
    arguments without a hash           `IdentityKey`, such as an accelerator with its tables

An address is no key: once its object is gone another object may have it, and unpickled objects have others.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

T = TypeVar("T")


class Interner(Generic[T]):
    """Integers for values, from 0 on in order of first occurrence; equal values have the same.

    A value is looked up by identity first, as hashing it takes longer, so it stays referenced.
    """

    def __init__(self, values: Iterable[T] = ()) -> None:
        self._index_by_value: dict[T, int] = {}
        self._entry_by_address: dict[int, tuple[T, int]] = {}
        for value in values:
            self.index_of(value)

    def __reduce__(self) -> tuple[Any, ...]:
        return Interner, (self.values,)

    @property
    def values(self) -> tuple[T, ...]:
        """The distinct values; the integer of a value is its index here."""
        return tuple(self._index_by_value)

    def index_of(self, value: T) -> int:
        """The integer of a value."""
        entry = self._entry_by_address.get(id(value))
        if entry is None:
            index = self._index_by_value.setdefault(value, len(self._index_by_value))
            entry = self._entry_by_address[id(value)] = value, index  # holds the value: its address stays its own
        return entry[1]


@dataclass(frozen=True, slots=True, eq=False)
class IdentityKey:
    """Part of a cache key that stands for an object, compared by identity; the key holds the object."""

    value: object

    def __eq__(self, other: object) -> bool:
        return isinstance(other, IdentityKey) and self.value is other.value

    def __hash__(self) -> int:
        return object.__hash__(self.value)
