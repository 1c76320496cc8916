"""How does a block run in which simulated ranks meet?

All of a block's meetings are of one group, whose members run the same program. So once the last member has begun the
block, all its meetings follow from when each began: the block is one event for each member, as for a rank that meets
nobody. Where a collective begins or ends beside a member, the run so far is worked out again (`play`), and what is left
of it ends when that says. No member ends before the last one has come, because they meet inside.

Blocks in which ranks meet in groups of several roles, or whose exchanges share links, are left to the ranks.
"""

from dataclasses import dataclass, field
from math import inf

import numpy as np
import simpy

from clustersim.common.units import Seconds
from clustersim.cost.jitter import Jitter
from clustersim.cost.segment import BlockCost
from clustersim.engine.kernel.environment import Clock
from clustersim.engine.recording.recorder import Lost
from clustersim.engine.vectorized.segment_durations import BlockPieces, group_colours, meetings_of
from clustersim.engine.vectorized.segment_eval import Beside, Busy, Outline, Pieces, play
from clustersim.program.program import Program
from clustersim.program.task import Block
from clustersim.symmetry.refinement import Classes


@dataclass(slots=True, eq=False)
class Seat:
    """One member of a run. done: it has ended the block; lost: what it lost there, once it has."""

    number: int
    run: "JointRun"
    done: simpy.Event
    lost: Lost = field(default_factory=Lost)
    busy: list[tuple[Seconds, Seconds, int]] = field(default_factory=list)
    due: Seconds = inf
    timer: int = 0

    def change(self, beside: int) -> None:
        """Note that a collective begins (its pace) or ends (0) beside the member, and go on accordingly."""
        now = self.run.environment.now
        if self.busy and self.busy[-1][1] == inf:
            self.busy[-1] = self.busy[-1][0], now, self.busy[-1][2]
        if beside:
            self.busy.append((now, inf, beside))
        self.run.go_on()


class JointRun:
    """One run of a block by the members of a group, who come to it one after the other."""

    __slots__ = ("_missing", "_outline", "_pieces", "_seats", "_start", "environment")

    def __init__(self, environment: Clock, pieces: Pieces, outlined: Outline | None) -> None:
        self.environment, self._pieces, self._outline = environment, pieces, outlined
        self._start = np.full(pieces.ranks, inf)
        self._seats: list[Seat] = []
        self._missing = pieces.ranks

    def come(self, place: int, *, beside: int) -> Seat:
        """Begin the block as the member at this place; beside: its pace now."""
        seat = Seat(place, self, simpy.Event(self.environment))
        self._seats.append(seat)
        self._start[place] = self.environment.now
        self._missing -= 1
        if beside:
            seat.change(beside)
        else:
            self.go_on()
        return seat

    @property
    def full(self) -> bool:
        """Whether all members have come."""
        return not self._missing

    def go_on(self) -> None:
        """Let every member end when it will if nothing changes."""
        if self._missing or not self._seats:
            return
        if self._outline is None or any(seat.busy for seat in self._seats):
            run = play(self._start, self._pieces, self._busy())
        else:
            run = self._outline.run(self._start)
        end, waited, slowed = run.end.tolist(), run.waited.tolist(), run.slowed.tolist()
        for seat in self._seats:
            place = seat.number
            if not seat.done.triggered:
                seat.lost = Lost(waited[place], slowed[place])
                if end[place] != seat.due:
                    self._wait(seat, end[place])

    def _wait(self, seat: Seat, due: Seconds) -> None:
        seat.due = due
        seat.timer += 1
        number = seat.timer
        end = self.environment.wait(max(due - self.environment.now, 0.0))
        end.callbacks.append(lambda _: self._end(seat, number))

    def _end(self, seat: Seat, timer: int) -> None:
        """End the block for a member, unless it is due at another time since this timer was set."""
        if timer == seat.timer:
            seat.done.succeed()
            if all(item.done.triggered for item in self._seats):
                self._seats.clear()  # they know the run: only a collector would find what it holds

    def _busy(self) -> Busy:
        """Collectives beside the members: [members] of the first of each one, then the second, ..."""
        most = max(len(seat.busy) for seat in self._seats)
        since, until = np.full((2, most, len(self._seats)), inf)
        until *= -1.0  # where there is none, it ends before it begins
        pace = np.ones((most, len(self._seats)), dtype=np.int64)
        for seat in self._seats:
            for place, (begin, end, beside) in enumerate(seat.busy):
                since[place, seat.number], until[place, seat.number], pace[place, seat.number] = begin, end, beside
        return [Beside(*array) for array in zip(since, until, pace, strict=True)]


class JointBlocks:
    """All runs of blocks in which ranks meet, and the groups that run them."""

    def __init__(
        self, environment: Clock, program: Program, classes: Classes, cost: BlockCost, jitter: Jitter | None
    ) -> None:
        self._environment, self._program, self._classes, self._cost = environment, program, classes, cost
        self._jitter = jitter
        self._simulated = np.unique(classes.representative)
        self._groups: dict[tuple[str, int], _Group] = {}  # by colour
        self._of: dict[tuple[str, int], _Group] = {}  # by rank

    def come(self, rank: int, number: int, block: Block, role: str, *, beside: int) -> Seat:
        """Begin the block of task `number` as a rank, together with the others of its group of a role."""
        group = self._of.get((role, rank))
        if group is None:
            group = self._of[role, rank] = self._known(role, rank)
        run = group.runs.get(number)
        if run is None:
            run = group.runs[number] = JointRun(self._environment, *group.pieces.of(number, block))
        seat = run.come(group.place[rank], beside=beside)
        if run.full:
            del group.runs[number]
        return seat

    def _known(self, role: str, rank: int) -> "_Group":
        """The group of a role that a rank is in."""
        colour = int(self._classes.groups[role][self._program.rows[role][rank]])
        if (role, colour) not in self._groups:
            self._groups[role, colour] = self._group(role, colour)
        return self._groups[role, colour]

    def _group(self, role: str, colour: int) -> "_Group":
        """The simulated ranks that stand for the members of a group."""
        in_role = self._simulated[self._program.rows[role][self._simulated] >= 0]
        ranks = in_role[group_colours(self._program, self._classes, role, in_role) == colour]
        program = self._program.programs[int(self._program.kind[ranks[0]])]
        meetings = meetings_of(self._program, self._classes, ranks)
        pieces = BlockPieces(program, ranks, self._cost, self._jitter, meetings)
        return _Group(pieces, {rank: place for place, rank in enumerate(ranks.tolist())})


@dataclass(frozen=True, slots=True, eq=False)
class _Group:
    """Ranks that run blocks together. place: of each of them; runs: by task, those that not all have come to."""

    pieces: BlockPieces
    place: dict[int, int]
    runs: dict[int, JointRun] = field(default_factory=dict)
