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
class Reading:
    """What a function made of its arguments, which are or name what it reads."""

    function: Callable[..., Any]
    arguments: tuple[Any, ...]
    value: Any

    def answers(self, function: Callable[..., Any], arguments: tuple[Any, ...]) -> bool:
        """Whether this is what the function would give for the arguments."""
        return self.function == function and self.arguments == arguments


class Readings:
    """Reads what neither was read earlier nor asked for already; `kept` is all that was asked for."""

    def __init__(self, earlier: Iterable[Reading] = ()) -> None:
        self._earlier = tuple(earlier)
        self._kept: list[Reading] = []

    @property
    def kept(self) -> tuple[Reading, ...]:
        """What was asked for, to be remembered."""
        return tuple(self._kept)

    def of(self, function: Callable[[*Arguments], T], *arguments: *Arguments) -> T:
        """What the function gives for the arguments; called only where no equal ones were asked for before."""
        known = (item for item in (*self._kept, *self._earlier) if item.answers(function, arguments))
        reading = next(known, None) or Reading(function, arguments, function(*arguments))
        if not any(element is reading for element in self._kept):
            self._kept.append(reading)
        value: T = reading.value
        return value
