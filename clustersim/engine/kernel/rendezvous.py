"""Rendezvous of group members: a collective starts when its last member has arrived.

Members arrive in any order. Collectives of one group are matched in the order in which each member issues
them (sequence numbers), as communication libraries do.
"""

from collections.abc import Callable, Hashable
from typing import Any, TypeVar

import simpy

T = TypeVar("T")


class Rendezvous:
    """One pending collective. critical_predecessor: event key of what released the last member to arrive."""

    __slots__ = ("_all_arrived", "_missing", "_result", "critical_predecessor")

    def __init__(self, environment: simpy.Environment, member_count: int) -> None:
        self._all_arrived = simpy.Event(environment)
        self._missing = member_count
        self._result: Any = None
        self.critical_predecessor = -1

    def arrive(self, predecessor: int) -> simpy.Event:
        """Count a member in; the returned event is triggered when all have arrived."""
        self._missing -= 1
        if self._missing == 0:
            self.critical_predecessor = predecessor
            self._all_arrived.succeed()
        return self._all_arrived

    def begin_once(self, begin: Callable[[], T]) -> T:
        """Begin the collective at the first call, by the first member to go on; all members get the same result."""
        if self._result is None:
            self._result = begin()
        result: T = self._result
        return result


class RendezvousRegistry:
    """All collectives that have members waiting, by group and sequence number within the group."""

    def __init__(self, environment: simpy.Environment) -> None:
        self._environment = environment
        self._pending: dict[tuple[Hashable, int], tuple[Rendezvous, int]] = {}
        self._issue_counts: dict[tuple[Hashable, int], int] = {}

    def join(self, group: Hashable, rank: int, member_count: int) -> Rendezvous:
        """Rendezvous of the next collective that `rank` issues in `group`, for member_count simulated ranks."""
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
