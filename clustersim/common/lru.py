"""Thread-safe LRU caches of results, bounded in size.

A result is a function of its key alone: keys hold all inputs, by value or as an `IdentityKey`, so no entry can
be stale. Arrays in results are made read-only, because callers share them.
"""

from collections.abc import Callable, Hashable, Iterable, Mapping
from dataclasses import fields, is_dataclass
from functools import lru_cache, wraps
from threading import Lock
from typing import Any, Generic, ParamSpec, TypeVar

import numpy as np

P = ParamSpec("P")
T = TypeVar("T")


class LruCache(Generic[T]):
    """The most recently used results by key, of a total size of at most `max_size`.

    size: of a result; by default bytes of its arrays and of the byte strings in its key.
    """

    def __init__(self, max_size: int, size: Callable[[T], int] | None = None) -> None:
        self._max_size, self._total_size, self._size = max_size, 0, size
        self._entries: dict[Hashable, tuple[T, int]] = {}
        self._lock = Lock()

    def get_or_compute(self, key: tuple[Hashable, ...], compute: Callable[[], T]) -> T:
        """The result of this key, computed if it is not cached."""
        with self._lock:
            entry = self._entries.pop(key, None)
            if entry is not None:
                self._entries[key] = entry  # most recently used
                return entry[0]
        result = compute()
        size = _entry_bytes(key, result) if self._size is None else self._size(result)
        with self._lock:
            self._insert(key, result, size)
        return result

    def _insert(self, key: Hashable, result: T, size: int) -> None:
        if size > self._max_size or key in self._entries:
            return
        self._entries[key], self._total_size = (result, size), self._total_size + size
        while self._total_size > self._max_size:
            self._total_size -= self._entries.pop(next(iter(self._entries)))[1]


def unit_size(_: object) -> int:
    """Size function that counts every result as 1, which bounds the number of entries."""
    return 1


def lru_memoize(max_entries: int) -> Callable[[Callable[P, T]], Callable[P, T]]:
    """Decorator that caches the last `max_entries` results of a function.

    Calls with unhashable arguments are not cached.
    """

    def decorator(function: Callable[P, T]) -> Callable[P, T]:
        cached = lru_cache(maxsize=max_entries)(function)

        @wraps(function)
        def wrapper(*args: P.args, **kwargs: P.kwargs) -> T:
            try:
                hash((*args, *kwargs.values()))
            except TypeError:
                return function(*args, **kwargs)
            return cached(*args, **kwargs)  # type: ignore[arg-type]

        return wrapper

    return decorator


def _entry_bytes(key: tuple[Hashable, ...], result: object) -> int:
    """Bytes of a result, whose arrays are made read-only, and of its key."""
    return sum(map(_freeze, _iterate_arrays(result))) + sum(
        len(component) for component in key if isinstance(component, bytes)
    )


def _iterate_arrays(value: Any) -> Iterable[np.ndarray[Any, Any]]:
    """All arrays in a result: itself, or in the fields of dataclasses, in tuples and in mappings."""
    if isinstance(value, np.ndarray):
        yield value
    elif isinstance(value, tuple):
        for element in value:
            yield from _iterate_arrays(element)
    elif isinstance(value, Mapping):
        yield from _iterate_arrays(tuple(value.values()))
    elif is_dataclass(value):
        for field in fields(value):
            yield from _iterate_arrays(getattr(value, field.name))


def _freeze(array: np.ndarray[Any, Any]) -> int:
    """Make an array read-only; return its bytes."""
    array.flags.writeable = False
    return array.nbytes
