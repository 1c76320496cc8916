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


class Recent(Generic[T]):
    """Results by key, those that were asked for last, together no larger than `most`.

    size: of a result; without it, bytes of its arrays, and of those in its key.
    """

    def __init__(self, most: int, size: Callable[[T], int] | None = None) -> None:
        self._most, self._held, self._size = most, 0, size
        self._known: dict[Hashable, tuple[T, int]] = {}
        self._lock = Lock()

    def of(self, key: tuple[Hashable, ...], make: Callable[[], T]) -> T:
        """The result of this key; made where it is not known."""
        with self._lock:
            known = self._known.pop(key, None)
            if known is not None:
                self._known[key] = known  # asked for last
                return known[0]
        made = make()
        size = _bytes(key, made) if self._size is None else self._size(made)
        with self._lock:
            self._keep(key, made, size)
        return made

    def _keep(self, key: Hashable, made: T, size: int) -> None:
        if size > self._most or key in self._known:
            return
        self._known[key], self._held = (made, size), self._held + size
        while self._held > self._most:
            self._held -= self._known.pop(next(iter(self._known)))[1]


def each_one(_: object) -> int:
    """The size of a result of which only the number is bounded."""
    return 1


def lately(most: int) -> Callable[[Callable[P, T]], Callable[P, T]]:
    """Remember the last `most` results of a function; what cannot be hashed is worked out each time."""

    def remembering(function: Callable[P, T]) -> Callable[P, T]:
        known = lru_cache(maxsize=most)(function)

        @wraps(function)
        def remembered(*args: P.args, **kwargs: P.kwargs) -> T:
            try:
                hash((*args, *kwargs.values()))
            except TypeError:
                return function(*args, **kwargs)
            return known(*args, **kwargs)  # type: ignore[arg-type]

        return remembered

    return remembering


def _bytes(key: tuple[Hashable, ...], made: object) -> int:
    """Bytes of a result, whose arrays are frozen, and of its key."""
    return sum(map(_frozen, _arrays(made))) + sum(len(part) for part in key if isinstance(part, bytes))


def _arrays(found: Any) -> Iterable[np.ndarray[Any, Any]]:
    """All arrays in a result: itself, or in the fields of dataclasses, in tuples and in mappings."""
    if isinstance(found, np.ndarray):
        yield found
    elif isinstance(found, tuple):
        for item in found:
            yield from _arrays(item)
    elif isinstance(found, Mapping):
        yield from _arrays(tuple(found.values()))
    elif is_dataclass(found):
        for field in fields(found):
            yield from _arrays(getattr(found, field.name))


def _frozen(array: np.ndarray[Any, Any]) -> int:
    """Let nobody write into an array; return its bytes."""
    array.flags.writeable = False
    return array.nbytes
