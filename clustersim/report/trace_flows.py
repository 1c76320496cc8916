"""Which slices of a trace belong together? Those of one message, and those of one collective.

A message is named by its pair's role, its sender and its tag; a collective by its group and its place among the
collectives of the role that each member runs, which is the same for all of them. Only what has two ends among the ranks
that are written has a number: a trace viewer draws an arrow from each slice of a number to the next one.
"""

from dataclasses import dataclass, field
from typing import Final, Self

import numpy as np

from clustersim.arrays import BoolArray, IntArray
from clustersim.program.action import Action
from clustersim.program.program import Groups, Program
from clustersim.program.task import Block, Communicate, Exchange, Receive, Send, Task

NONE: Final = 0
"""The number of what belongs to nothing."""
_PLACES: Final = 1 << 14  # operations of a block
_EVENTS: Final = 1 << 22  # messages, or tasks of a program


@dataclass(frozen=True, slots=True)
class _Role:
    """For each rank the group of a role that it is in (sends in, receives in), or -1 where a member is not written."""

    number: int
    first: IntArray
    second: IntArray

    @classmethod
    def of(cls, number: int, groups: Groups, written: BoolArray) -> Self:
        members = written[groups.members].sum(axis=1)
        ends = (0, 1) if groups.ordered else (None, None)
        first, second = (groups.row_of(len(written), place=place) for place in ends)
        return cls(number, *(np.where((row >= 0) & (members[row] > 1), row, -1) for row in (first, second)))


@dataclass(frozen=True, slots=True)
class Flows:
    """Numbers of messages and collectives.

    tags: of messages; ordinals: by program, of its tasks; inner: exchanges of blocks with their places from 1.
    """

    program: Program
    roles: dict[str, _Role]
    tags: dict[Action, int] = field(default_factory=dict)
    ordinals: dict[int, IntArray] = field(default_factory=dict)
    inner: dict[Block, tuple[tuple[int, Exchange], ...]] = field(default_factory=dict)

    @classmethod
    def among(cls, program: Program, ranks: list[int]) -> Self:
        """Those among some ranks."""
        written = np.zeros(program.ranks, dtype=np.bool_)
        written[ranks] = True
        roles = {role: _Role.of(number, each, written) for number, (role, each) in enumerate(program.groups.items())}
        return cls(program, roles)

    def of_task(self, rank: int, number: int, task: Task) -> int:
        """The number of a message or a collective; NONE for a pass."""
        match task:
            case Send(exchange=exchange, tag=tag):
                return self._number(exchange, self.roles[exchange.group].first[rank], self._tag(tag))
            case Receive(exchange=exchange, tag=tag):
                return self._number(exchange, self.roles[exchange.group].second[rank], self._tag(tag))
            case Communicate(exchange=exchange):
                return self._number(exchange, self.roles[exchange.group].first[rank], self._ordinal(rank, number))
        return NONE

    def inside(self, rank: int, number: int, block: Block) -> tuple[int, ...]:
        """Numbers of a pass's operations, whose groups all run the same program; empty where none has any."""
        if block not in self.inner:
            self.inner[block] = tuple((place, each.exchange) for place, each in enumerate(block.operations, start=1)
                                      if each.exchange is not None)  # fmt: skip
        groups = {exchange.group: self.roles[exchange.group].first[rank] for _, exchange in self.inner[block]}
        if all(group < 0 for group in groups.values()):
            return ()
        found = [NONE] * len(block.operations)
        for place, exchange in self.inner[block]:
            found[place - 1] = self._number(exchange, groups[exchange.group], number, place)
        return tuple(found)

    def _number(self, exchange: Exchange, group: int, event: int, place: int = 0) -> int:
        if group < 0:
            return NONE
        role = self.roles[exchange.group].number
        return 1 + ((int(group) * len(self.roles) + role) * _EVENTS + int(event)) * _PLACES + place

    def _tag(self, tag: Action) -> int:
        return self.tags.setdefault(tag, len(self.tags))

    def _ordinal(self, rank: int, number: int) -> int:
        """How many collectives of its role the rank runs before this one."""
        kind = int(self.program.kind[rank])
        if kind not in self.ordinals:
            self.ordinals[kind] = _ordinals(self.program.programs[kind].tasks)
        return int(self.ordinals[kind][number])


def _ordinals(tasks: tuple[Task, ...]) -> IntArray:
    counts: dict[str, int] = {}
    found = np.zeros(len(tasks), dtype=np.int64)
    for number, task in enumerate(tasks):
        if isinstance(task, Communicate):
            found[number] = counts.get(task.exchange.group, 0)
            counts[task.exchange.group] = int(found[number]) + 1
    return found
