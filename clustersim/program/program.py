"""What does every rank do, and with whom?

Ranks that run the same tasks share one `RankProgram`; `kind[r]` says which. Groups are arrays of ranks by role: for
the role "tp" an array [groups, members]; each rank is in at most one group of a role. Pairs of pipeline neighbours
are ordered groups (sender, receiver): roles "pp_next" and "pp_previous" have one row (r, neighbour of r) for each
sender r, so a rank sends in at most one pair of a role and receives in at most one.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import Final

import numpy as np

from clustersim.common.arrays import FloatArray, IntArray
from clustersim.program.loops import Region, regions
from clustersim.program.task import Block, Compute, Exchange, Stream, Task


@dataclass(frozen=True)
class RankProgram:
    """The tasks of one rank. A task's number is its place in `tasks`; `streams[i]` is the stream of tasks[i].

    Within a stream tasks run in ascending number; `after` may name only smaller numbers.
    """

    tasks: tuple[Task, ...]
    streams: tuple[Stream, ...]

    @cached_property
    def exchanges(self) -> tuple[Exchange, ...]:
        """Every collective that the rank takes part in, and every message; each once, in the order of the tasks."""
        return _distinct((*self.exchanges_inside, *self.exchanges_outside))

    @cached_property
    def exchanges_inside(self) -> tuple[Exchange, ...]:
        """Those of blocks, which the compute stream waits for."""
        blocks = dict.fromkeys(task.block for task in self.tasks if isinstance(task, Compute))
        return _distinct(exchange for block in blocks for exchange in block.different)

    @cached_property
    def exchanges_outside(self) -> tuple[Exchange, ...]:
        """Those that are tasks of their own, on the other streams."""
        return _distinct(exchange for _, exchange in self.issued)

    @cached_property
    def issued(self) -> tuple[tuple[Stream, Exchange], ...]:
        """On which streams exchanges are tasks of their own, each once on a stream, as far as tasks share them."""
        every = zip(self.streams, self.tasks, strict=True)
        found = {(s, id(task.exchange)): (s, task.exchange) for s, task in every if not isinstance(task, Compute)}
        return tuple(found.values())

    @cached_property
    def operations_before(self) -> tuple[int, ...]:
        """How many operations of its blocks the rank runs before each task, and at the end: in all."""
        counts = (len(task.block.operations) if isinstance(task, Compute) else 0 for task in self.tasks)
        return tuple(accumulate(counts, initial=0))

    @cached_property
    def alike(self) -> IntArray:
        """Numbers of tasks, equal where they do the same and wait for tasks that are equally far before them: [tasks].

        Messages are alike whatever their tags are.
        """
        seen: dict[int, int] = {}
        values: dict[Block | Exchange, int] = {}
        known: dict[tuple[Stream, int, int | tuple[int, ...]], int] = {}
        found: list[int] = []
        for number, (stream, task) in enumerate(zip(self.streams, self.tasks, strict=True)):
            does = task.block if isinstance(task, Compute) else task.exchange
            what = seen.get(id(does))  # by identity first, as to hash each of them takes longer
            if what is None:
                what = seen[id(does)] = values.setdefault(does, len(values))
            after = task.after
            before = number - after[0] if len(after) == 1 else tuple([number - needed for needed in after])
            found.append(known.setdefault((stream, what, before), len(known)))
        return np.array(found, dtype=np.int64)

    @cached_property
    def regions(self) -> tuple[tuple[Region, ...], tuple[Region, ...]]:
        """Where the rank does the same again and again: microbatches and the like, and layers within them."""
        return regions(self.alike)

    def step_of(self, steps: int) -> IntArray:
        """The step that each task belongs to where the program is `steps` equal steps in a row: [tasks], from 0."""
        return np.arange(len(self.tasks), dtype=np.int64) // (len(self.tasks) // steps)


def _distinct(exchanges: Iterable[Exchange]) -> tuple[Exchange, ...]:
    """By identity first: tasks share exchanges, and hashing each of them by value takes longer.

    Not sets: their order, in which exchanges would be costed, changes from process to process.
    """
    return tuple(dict.fromkeys({id(exchange): exchange for exchange in exchanges}.values()))


@dataclass(frozen=True, slots=True)
class Groups:
    """All process groups of one role. members: [groups, size]; ordered: the first member is the sender or root."""

    role: str
    members: IntArray
    ordered: bool = False

    def row_of(self, ranks: int, *, place: int | None = None) -> IntArray:
        """For each of `ranks` ranks the group it is in, or -1: [ranks]. place: only as this member (ordered pairs)."""
        rows = np.full(ranks, -1, dtype=np.int64)
        numbers = np.arange(len(self.members))
        if place is None:
            rows[self.members] = numbers[:, None]
        else:
            rows[self.members[:, place]] = numbers
        return rows


@dataclass(frozen=True, slots=True, eq=False)
class Loads:
    """How many times as many rows as the mean come to each rank's experts: [numbers, ranks], by layer.

    each: numbers that every step has of its own; 0: all steps share them.
    """

    factors: FloatArray
    each: int = 0


EVEN: Final = Loads(np.zeros((0, 0)))
"""No rank has more than another."""


@dataclass(frozen=True)
class Program:
    """kind: [ranks] index into `programs`; groups by role; loads: of ranks' experts, where these differ."""

    programs: tuple[RankProgram, ...]
    kind: IntArray
    groups: Mapping[str, Groups]
    loads: Loads = EVEN

    @property
    def ranks(self) -> int:
        """World size."""
        return len(self.kind)

    @cached_property
    def exchanges(self) -> tuple[Exchange, ...]:
        """Every collective and message of any rank, sorted: what costs remember may depend on what is asked first."""
        every = dict.fromkeys(exchange for program in self.programs for exchange in program.exchanges)
        return tuple(
            sorted(every, key=lambda each: (each.group, each.name, each.collective.value, each.payload, each.load or 0))
        )

    @cached_property
    def exchanges_inside(self) -> frozenset[Exchange]:
        """Those that are in some rank's blocks."""
        return frozenset(exchange for program in self.programs for exchange in program.exchanges_inside)

    @cached_property
    def exchanges_outside(self) -> frozenset[Exchange]:
        """Those that are tasks of some rank."""
        return frozenset(exchange for program in self.programs for exchange in program.exchanges_outside)

    def stays_inside(self, role: str) -> bool:
        """Whether each group of a role is of ranks that run the same program, which has the role in blocks only."""
        outside = any(exchange.group == role for exchange in self.exchanges_outside)
        return not outside and self.of_one_kind(role)

    def of_one_kind(self, role: str) -> bool:
        """Whether each group of a role is of ranks that run the same program."""
        kinds = self.kind[self.groups[role].members]
        return bool((kinds == kinds[:, :1]).all())

    @cached_property
    def rows(self) -> Mapping[str, IntArray]:
        """For each role the group that each rank is in (sends in, for pairs), or -1: [ranks]."""
        return {
            role: group.row_of(self.ranks, place=0 if group.ordered else None) for role, group in self.groups.items()
        }
