"""How do cohorts of ranks run together, without a clock?

Each stream of a cohort runs its tasks in order, as soon as what they wait for is known. A collective within a cohort is
a maximum over its groups; one that joins cohorts waits until all of them have come to it; a message is known at both
ends when it is sent.

This does what the ranks of `scalar.rank_process` do one by one, and gives the same spans. It is for the case in which many
ranks of a kind must be simulated and nobody shares a link; what it cannot run (`able`) is left to them.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np

from clustersim.common.arrays import IntArray
from clustersim.cost.jitter import Jitter
from clustersim.cost.segment import BlockCost
from clustersim.engine.vectorized.group_sync import Meeting
from clustersim.engine.vectorized.rank_batch import Cohort, Ready
from clustersim.engine.vectorized.segment_durations import BlockPieces, group_colours, meetings_of
from clustersim.engine.vectorized.trace_writer import Columns, Span, Table
from clustersim.program.action import Action
from clustersim.program.program import Program
from clustersim.program.task import Communicate, Compute, Receive, Send, Stream
from clustersim.symmetry.refinement import Classes
from clustersim.trace.trace import Trace


@dataclass(frozen=True, slots=True, eq=False)
class _Place:
    """Where simulated ranks are: kind: [ranks] cohort, local: [ranks] place in it, by rank number."""

    cohort: IntArray
    local: IntArray


@dataclass(frozen=True, slots=True, eq=False)
class _Come:
    """A cohort that has come to a collective: with which task, and when."""

    cohort: int
    task: int
    when: Ready


@dataclass(slots=True, eq=False)
class _Gathering:
    """A collective in the making: which cohorts have come to it."""

    come: dict[int, _Come] = field(default_factory=dict)


class Cohorts:
    """All cohorts of a program and what joins them."""

    def __init__(self, program: Program, classes: Classes, cost: BlockCost, jitter: Jitter | None) -> None:
        self._program, self._classes, self._cost = program, classes, cost
        simulated = np.unique(classes.representative)
        kinds = range(len(program.programs))
        ranks = [simulated[program.kind[simulated] == kind] for kind in kinds]
        self._table = Table.of(program, ranks)
        self._cohorts = [self._cohort(columns, jitter) for columns in self._table.cohorts]
        self._place = self._places()
        self._queues = [_queues(cohort) for cohort in self._cohorts]
        self._joined = self._components()
        self._count: dict[tuple[int, str, Stream], int] = {}
        self._gatherings: dict[tuple[int, str, Stream, int], _Gathering] = {}
        self._waiting: set[tuple[int, int]] = set()
        self._receipts = [_receipts(cohort) for cohort in self._cohorts]
        self._targets: dict[tuple[int, str], tuple[int, IntArray]] = {}

    def run(self) -> Trace | None:
        """Run everything; None where cohorts wait for each other in a circle."""
        going = True
        while going:
            going = False
            for cohort, queues in enumerate(self._queues):
                for queue in queues:
                    while queue and self._advance(cohort, queue[-1]):
                        queue.pop()
                        going = True
        if any(queue for queues in self._queues for queue in queues):
            return None
        return self._table.trace(self._program, self._classes.representative)

    def _advance(self, number: int, task: int) -> bool:
        """Run a cohort's task if all that it waits for is known; say whether it is done."""
        cohort = self._cohorts[number]
        if cohort.done[task]:
            return True
        what = cohort.program.tasks[task]
        if (number, task) in self._waiting or not all(cohort.done[needed] for needed in what.after):
            return False
        match what:
            case Compute():
                if not cohort.computes(task):
                    return False
                cohort.compute(task, what.block)
            case Communicate():
                self._come(number, task, what)
            case Send():
                self._send(number, task, what)
        return cohort.done[task]

    def _come(self, number: int, task: int, what: Communicate) -> None:
        """Come to a collective; the last cohort that does so lets it run."""
        role, stream = what.exchange.group, self._cohorts[number].program.streams[task]
        count = self._count.get((number, role, stream), 0)
        self._count[number, role, stream] = count + 1
        together = self._joined[role][number]
        gathering = self._gatherings.setdefault((together[0], role, stream, count), _Gathering())
        gathering.come[number] = _Come(number, task, self._cohorts[number].ready(task))
        self._waiting.add((number, task))
        if len(gathering.come) == len(together):
            self._meet(role, [gathering.come[item] for item in together])
            del self._gatherings[together[0], role, stream, count]

    def _meet(self, role: str, come: list[_Come]) -> None:
        """Run a collective of all groups of a role in the cohorts that have come."""
        ranks = np.concatenate([self._cohorts[item.cohort].ranks for item in come])
        ready = np.concatenate([element.when.ready for element in come])
        cause = np.concatenate([entry.when.cause for entry in come])
        meeting = Meeting.of(self._groups(role, ranks))
        start = ready if meeting.alone else meeting.latest(ready)
        cause = cause if meeting.alone else cause[meeting.last(ready, start)]
        first = 0
        for each in come:
            cohort, when, last = self._cohorts[each.cohort], each.when, first + len(each.when.ready)
            exchange = cohort.program.tasks[each.task].exchange  # type: ignore[union-attr]
            own = start[first:last]
            end = own + self._cost.exchange_seconds(cohort.ranks, exchange)
            cohort.finish(each.task, Span(when.queued, when.ready, own, end, cause[first:last]))
            first = last

    def _send(self, number: int, task: int, what: Send) -> None:
        """Send a message from every rank of a cohort, and receive it."""
        cohort, role = self._cohorts[number], what.exchange.group
        when = cohort.ready(task)
        end = when.ready + self._cost.exchange_seconds(cohort.ranks, what.exchange)
        cohort.finish(task, Span(when.queued, when.ready, when.ready, end, when.cause))
        other, source = self._target(number, role)
        start = when.ready[source]
        receipt = self._receipts[other][role, what.tag]
        self._cohorts[other].finish(receipt, Span(start, start, start, end[source], when.cause[source]))

    def _target(self, number: int, role: str) -> tuple[int, IntArray]:
        """The cohort that a cohort sends to, and for each of its ranks the place of the sender."""
        if (number, role) not in self._targets:
            ranks = self._cohorts[number].ranks
            pairs = self._program.groups[role].members[self._program.rows[role][ranks]]
            receivers = self._classes.representative[pairs[:, 1]]
            other = int(self._place.cohort[receivers[0]])
            source = np.empty(len(receivers), dtype=np.int64)
            source[self._place.local[receivers]] = np.arange(len(receivers))
            self._targets[number, role] = other, source
        return self._targets[number, role]

    def _cohort(self, columns: Columns, jitter: Jitter | None) -> Cohort:
        program = self._program.programs[int(self._program.kind[columns.ranks[0]])]
        meetings = meetings_of(self._program, self._classes, columns.ranks)
        return Cohort(program, columns, BlockPieces(program, columns.ranks, self._cost, jitter, meetings))

    def _groups(self, role: str, ranks: IntArray) -> IntArray:
        return group_colours(self._program, self._classes, role, ranks)

    def _places(self) -> _Place:
        cohort, local = np.full((2, self._program.ranks), -1, dtype=np.int64)
        for number, item in enumerate(self._cohorts):
            cohort[item.ranks], local[item.ranks] = number, np.arange(len(item.ranks))
        return _Place(cohort, local)

    def _components(self) -> dict[str, dict[int, list[int]]]:
        """For each role and cohort that communicates in it, all cohorts that its groups join it with."""
        found: dict[str, dict[int, list[int]]] = {}
        for role in {role for cohort in self._cohorts for role in _roles_outside(cohort)}:
            own = [number for number, item in enumerate(self._cohorts) if role in _roles_outside(item)]
            found[role] = _joined(own, [set(self._groups(role, self._cohorts[n].ranks).tolist()) for n in own])
        return found


def _joined(numbers: list[int], groups: list[set[int]]) -> dict[int, list[int]]:
    """Connect numbers whose sets have something in common."""
    parts: list[tuple[list[int], set[int]]] = []
    for number, own in zip(numbers, groups, strict=True):
        touching = [part for part in parts if part[1] & own]
        parts = [part for part in parts if not part[1] & own]
        members = sorted([number, *(item for part in touching for item in part[0])])
        parts.append((members, own.union(*(part[1] for part in touching))))
    return {number: members for members, _ in parts for number in members}


def _queues(cohort: Cohort) -> list[list[int]]:
    """Tasks of each stream, the next one last."""
    queues: dict[Stream, list[int]] = {}
    for number, stream in enumerate(cohort.program.streams):
        if stream is not Stream.RECEIVE:
            queues.setdefault(stream, []).append(number)
    return [queues[stream][::-1] for stream in sorted(queues)]


def _roles_outside(cohort: Cohort) -> set[str]:
    return {task.exchange.group for task in cohort.program.tasks if isinstance(task, Communicate)}


def _receipts(cohort: Cohort) -> dict[tuple[str, Action], int]:
    return {
        (task.exchange.group, task.tag): number
        for number, task in enumerate(cohort.program.tasks)
        if isinstance(task, Receive)
    }


def able(program: Program) -> bool:
    """Whether cohorts can run a program.

    Collectives inside blocks stay among ranks of one kind, and all ranks of a kind send their messages to all ranks of
    one kind.
    """
    inside = {exchange.group for exchange in program.exchanges_inside}
    return all(map(program.of_one_kind, inside)) and all(_paired(program))


def _paired(program: Program) -> Iterator[bool]:
    """For each role of messages whether whole kinds send to whole kinds."""
    sizes = np.bincount(program.kind, minlength=len(program.programs))
    for groups in program.groups.values():
        if groups.ordered:
            kinds = program.kind[groups.members]
            for kind in np.unique(kinds[:, 0]).tolist():
                targets = kinds[kinds[:, 0] == kind, 1]
                yield len(targets) == sizes[kind] == sizes[targets[0]] and bool((targets == targets[0]).all())
