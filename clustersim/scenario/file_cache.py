"""What do the names and paths of a scenario stand for? Each is looked up once.

A changed scenario asks the readings of the one that it was changed from first, and reads files only for what it names
otherwise. So variants of a scenario are of the same files, also where these change on disk meanwhile.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, TypeVar, TypeVarTuple

T = TypeVar("T")
Arguments = TypeVarTuple("Arguments")


@dataclass(frozen=True, slots=True)
class CachedRead:
    """What a function made of its arguments, which are or name what it reads."""

    function: Callable[..., Any]
    arguments: tuple[Any, ...]
    value: Any

    def matches(self, function: Callable[..., Any], arguments: tuple[Any, ...]) -> bool:
        """Whether this is what the function would give for the arguments."""
        return self.function == function and self.arguments == arguments


class ReadCache:
    """Reads what neither was read earlier nor asked for already; `kept` is all that was asked for."""

    def __init__(self, previous: Iterable[CachedRead] = ()) -> None:
        self._previous = tuple(previous)
        self._entries: list[CachedRead] = []

    @property
    def entries(self) -> tuple[CachedRead, ...]:
        """What was asked for, to be remembered."""
        return tuple(self._entries)

    def get_or_read(self, function: Callable[[*Arguments], T], *arguments: *Arguments) -> T:
        """What the function gives for the arguments; called only where no equal ones were asked for before."""
        matching = (
            cached_read for cached_read in (*self._entries, *self._previous) if cached_read.matches(function, arguments)
        )
        entry = next(matching, None) or CachedRead(function, arguments, function(*arguments))
        if not any(item is entry for item in self._entries):
            self._entries.append(entry)
        value: T = entry.value
        return value
