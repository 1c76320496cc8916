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

    __slots__ = ("_result", "_all_arrived", "_missing", "critical_predecessor")

    def __init__(self, environment: simpy.Environment, member_count: int) -> None:
        self._all_arrived = simpy.Event(environment)
        self._missing = member_count
        self._result: Any = None
        self.critical_predecessor = -1

    def arrive(self, predecessor: int) -> simpy.Event:
        """Count a member in; the event has happened once all have come."""
        self._missing -= 1
        if self._missing == 0:
            self.critical_predecessor = predecessor
            self._all_arrived.succeed()
        return self._all_arrived

    def begin_once(self, begin: Callable[[], T]) -> T:
        """What the members wait for once they have met: the first of them begins it, all get the same."""
        if self._result is None:
            self._result = begin()
        result: T = self._result
        return result


class RendezvousRegistry:
    """All collectives that have members waiting, by group and by their number within the group."""

    def __init__(self, environment: simpy.Environment) -> None:
        self._environment = environment
        self._pending: dict[tuple[Hashable, int], tuple[Rendezvous, int]] = {}
        self._issue_counts: dict[tuple[Hashable, int], int] = {}

    def join(self, group: Hashable, rank: int, member_count: int) -> Rendezvous:
        """The rendezvous of the next collective that `rank` issues in `group`, which `members` simulated ranks join."""
        if member_count == 1:
            return Rendezvous(self._environment, member_count)
        sequence = self._issue_counts.get((group, rank), 0)
        self._issue_counts[group, rank] = sequence + 1
        rendezvous, joined_count = self._pending.get((group, sequence)) or (
            Rendezvous(self._environment, member_count),
            0,
        )
        if joined_count + 1 == member_count:
            self._pending.pop((group, sequence), None)
        else:
            self._pending[group, sequence] = (rendezvous, joined_count + 1)
        return rendezvous
