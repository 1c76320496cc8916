"""Cache of the files and names that a scenario refers to; each is read once.

A variant of a scenario consults the cache of the scenario that it was derived from, and reads files only for
what it names differently. So all variants use the same file contents, even if files change on disk meanwhile.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, TypeVar, TypeVarTuple

T = TypeVar("T")
Arguments = TypeVarTuple("Arguments")


@dataclass(frozen=True, slots=True)
class CachedRead:
    """A cached call of a reader function: its arguments and its result."""

    function: Callable[..., Any]
    arguments: tuple[Any, ...]
    value: Any

    def matches(self, function: Callable[..., Any], arguments: tuple[Any, ...]) -> bool:
        """Whether this entry is of the same function and arguments."""
        return self.function == function and self.arguments == arguments


class ReadCache:
    """Reads what is neither cached from before nor read already; `entries` is all that was requested."""

    def __init__(self, previous: Iterable[CachedRead] = ()) -> None:
        self._previous = tuple(previous)
        self._entries: list[CachedRead] = []

    @property
    def entries(self) -> tuple[CachedRead, ...]:
        """The entries that were requested, for reuse by variants."""
        return tuple(self._entries)

    def get_or_read(self, function: Callable[[*Arguments], T], *arguments: *Arguments) -> T:
        """The function's result for the arguments; called only if no equal call is cached."""
        matching = (
            cached_read for cached_read in (*self._entries, *self._previous) if cached_read.matches(function, arguments)
        )
        entry = next(matching, None) or CachedRead(function, arguments, function(*arguments))
        if not any(cached is entry for cached in self._entries):
            self._entries.append(entry)
        value: T = entry.value
        return value
