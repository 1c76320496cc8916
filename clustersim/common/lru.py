"""What was worked out lately, so that it need not be again? A table of results that is bounded in size.

Results follow from their keys alone: keys hold all that they depend on, by value, so no entry can be out of date.
Arrays are frozen, because whoever asks for them shares them.
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
    """Results by key, those that were asked for last, together no larger than `most`.

    size: of a result; without it, bytes of its arrays, and of those in its key.
    """

    def __init__(self, max_size: int, size: Callable[[T], int] | None = None) -> None:
        self._max_size, self._total_size, self._size = max_size, 0, size
        self._entries: dict[Hashable, tuple[T, int]] = {}
        self._lock = Lock()

    def get_or_compute(self, key: tuple[Hashable, ...], compute: Callable[[], T]) -> T:
        """The result of this key; made where it is not known."""
        with self._lock:
            entry = self._entries.pop(key, None)
            if entry is not None:
                self._entries[key] = entry  # asked for last
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
    """The size of a result of which only the number is bounded."""
    return 1


def lru_memoize(max_entries: int) -> Callable[[Callable[P, T]], Callable[P, T]]:
    """Remember the last `most` results of a function; what cannot be hashed is worked out each time."""

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
    """Bytes of a result, whose arrays are frozen, and of its key."""
    return sum(map(_freeze, _iterate_arrays(result))) + sum(
        len(component) for component in key if isinstance(component, bytes)
    )


def _iterate_arrays(value: Any) -> Iterable[np.ndarray[Any, Any]]:
    """All arrays in a result: itself, or in the fields of dataclasses, in tuples and in mappings."""
    if isinstance(value, np.ndarray):
        yield value
    elif isinstance(value, tuple):
        for item in value:
            yield from _iterate_arrays(item)
    elif isinstance(value, Mapping):
        yield from _iterate_arrays(tuple(value.values()))
    elif is_dataclass(value):
        for field in fields(value):
            yield from _iterate_arrays(getattr(value, field.name))


def _freeze(array: np.ndarray[Any, Any]) -> int:
    """Let nobody write into an array; return its bytes."""
    array.flags.writeable = False
    return array.nbytes
