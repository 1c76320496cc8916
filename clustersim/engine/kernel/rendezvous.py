"""How do the members of a group meet for a collective?

Members arrive in any order; the collective starts when the last one has come. Collectives of one group are matched in
the order in which each member issues them, as communication libraries do.
"""

from collections.abc import Callable, Hashable
from typing import Any, TypeVar

import simpy

T = TypeVar("T")


class Rendezvous:
    """One collective in the making. `cause` is the name of the row that released the last member to come."""

    __slots__ = ("_done", "_gathered", "_missing", "cause")

    def __init__(self, environment: simpy.Environment, members: int) -> None:
        self._gathered = simpy.Event(environment)
        self._missing = members
        self._done: Any = None
        self.cause = -1

    def arrive(self, cause: int) -> simpy.Event:
        """Count a member in; the event has happened once all have come."""
        self._missing -= 1
        if self._missing == 0:
            self.cause = cause
            self._gathered.succeed()
        return self._gathered

    def together(self, begin: Callable[[], T]) -> T:
        """What the members wait for once they have met: the first of them begins it, all get the same."""
        if self._done is None:
            self._done = begin()
        done: T = self._done
        return done


class MeetingPlaces:
    """All collectives that have members waiting, by group and by their number within the group."""

    def __init__(self, environment: simpy.Environment) -> None:
        self._environment = environment
        self._open: dict[tuple[Hashable, int], tuple[Rendezvous, int]] = {}
        self._issued: dict[tuple[Hashable, int], int] = {}

    def join(self, group: Hashable, rank: int, members: int) -> Rendezvous:
        """The rendezvous of the next collective that `rank` issues in `group`, which `members` simulated ranks join."""
        if members == 1:
            return Rendezvous(self._environment, members)
        number = self._issued.get((group, rank), 0)
        self._issued[group, rank] = number + 1
        rendezvous, joined = self._open.get((group, number)) or (Rendezvous(self._environment, members), 0)
        if joined + 1 == members:
            self._open.pop((group, number), None)
        else:
            self._open[group, number] = (rendezvous, joined + 1)
        return rendezvous
