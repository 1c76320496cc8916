"""Does what ranks do repeat itself? Then it is written again instead of being run again.

Microbatch after microbatch and layer after layer, a steady step does the same. One rank is watched: whenever it ends a
task that comes once in a period, and all else of that instant is done, what was written since the last time is compared
with what was written before (`period_comparison`). If both are alike, and the heads of all streams have moved on by as many
tasks, then what is under way is what was under way one period before, as old as it was then. (A head that moved on
became the head within the period, so all that it saw was compared. A head that did not waits for a task, or for a rank,
that is yet to come.) What happens next depends on nothing else, so it repeats what happened in the period, as long as
the tasks do. So many periods are skipped: heads go on to the tasks that are so many periods later, what is under way
becomes what would be under way then, and the recorder notes what is to be repeated.

Where links are shared beside computation a step may never be quite steady: DeepSeek-V3's best layouts repeat every 13
microbatches, but for what drifts by a microsecond. Then nothing is skipped.

Nothing is skipped where kernels vary, others are on the network, ranks meet inside blocks, or all is run one by one.

Law (tests/laws/test_steady.py): the trace is that of all events one by one, but for rounding.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

import numpy as np
import simpy

from clustersim.common.arrays import IntArray
from clustersim.engine.fast_forward.period_comparison import Moment, Periods
from clustersim.engine.recording.recorder import RANK, ROUNDING, TASK
from clustersim.engine.scalar.rank_process import Lane, Rank
from clustersim.engine.scalar.shared_state import World
from clustersim.engine.scalar.skipped_period import Skipped
from clustersim.program.loops import WORTH
from clustersim.program.task import Stream

_MICROBATCHES: Final = 0
_LAYERS: Final = 1
"""Levels: what periods are of, and what lies within those."""


def watch(world: World, ranks: Sequence[Rank]) -> None:
    """Watch the rank with most tasks, where what it does may repeat itself."""
    others = world.sharing is not None and world.sharing.others
    watched = max(ranks, key=lambda rank: len(rank.done))
    if world.jitter is None and world.coalesce and not others and len(watched.done) > WORTH:
        watched.marks = _marks(world, watched.number)
        watched.told = Watch(world, ranks).tell


def _marks(world: World, watched: int) -> dict[int, int]:
    """Compute tasks that come once in a period, and of what that is a period."""
    program = world.program_of(watched)
    outer, inner = program.regions
    marks: dict[int, int] = {}
    alone = len(world.program.programs) == 1  # otherwise other ranks are in other layers
    for level, found in ((_LAYERS, inner if alone else ()), (_MICROBATCHES, outer)):
        for region in found:
            every = range(region.first, region.last)
            first = next((number for number in every if program.streams[number] is Stream.COMPUTE), region.last)
            marks |= dict.fromkeys(range(first, region.last, region.period), level)
    return marks


@dataclass(slots=True)
class Watch:
    """The last moments of each level."""

    world: World
    ranks: Sequence[Rank]
    _lanes: list[Lane] = field(init=False)
    _told: set[int] = field(init=False, default_factory=set)
    _moments: tuple[list[Moment], ...] = field(init=False, default_factory=lambda: ([], []))
    _breaks: dict[tuple[int, int], IntArray] = field(init=False, default_factory=dict)

    def __post_init__(self) -> None:
        self._lanes = [lane for rank in self.ranks for lane in rank.lanes.values()]

    def tell(self, level: int) -> None:
        """A task that comes once in a period has ended."""
        if not self._told:
            self.world.environment.last().callbacks.append(self._look)
        self._told.add(level)

    def _look(self, _: simpy.Event) -> None:
        """Look at what was told, if nothing else is to happen in this instant; else later."""
        told, self._told = self._told, set()
        if not self.world.environment.over:
            for level in told:
                self.tell(level)
        elif not self.world.recorder.met:  # ranks that meet inside blocks end them at times of their own
            for level in sorted(told):
                if self._look_at(self._moments[level]):
                    for moment in self._moments[level:]:  # what lies within what was skipped begins anew
                        moment.clear()

    def _look_at(self, moments: list[Moment]) -> bool:
        """Note the moment, and skip what follows if the last two periods were alike; whether anything was."""
        clock, recorder = self.world.environment, self.world.recorder
        heads, repeats = [lane.place for lane in self._lanes], len(recorder.repeats)
        moments.append(Moment(clock.now, recorder.later, recorder.sizes, recorder.written_down, repeats, heads))
        del moments[:-3]
        return len(moments) == 3 and self._skip(*moments)

    def _skip(self, before: Moment, last: Moment, now: Moment) -> bool:
        """Skip as many periods as follow like the last one; whether any were."""
        longer = abs(now.now - 2.0 * last.now + before.now) > ROUNDING * now.now
        if longer or not self._as_far(before, last, now):
            return False
        periods = Periods(self.world.recorder, (before, last, now), 1 + max(rank.number for rank in self.ranks))
        tasks = periods.tasks()
        if tasks is None:
            return False
        skipped = self._skipped(periods, tasks)
        times = min(self._times(rank, item) for rank, item in zip(self.ranks, skipped, strict=True))
        if times * periods.size.rows < WORTH:
            return False
        first = np.zeros_like(tasks)
        first[[rank.number for rank in self.ranks]] = [element.lowest for element in skipped]
        repeat = periods.repeat(times, tasks, first)
        for rank, entry in zip(self.ranks, skipped, strict=True):
            rank.skip(entry, repeat)
        self.world.recorder.repeat(repeat)
        return True

    def _as_far(self, before: Moment, last: Moment, now: Moment) -> bool:
        """Whether all streams have come as far as in the period before, and those that have not moved wait."""
        if any(n - b != b - a for a, b, n in zip(before.heads, last.heads, now.heads, strict=True)):
            return False
        heads = iter(zip(last.heads, now.heads, strict=True))
        return all(
            late != early or lane.gathers or lane.place == len(lane.queue) or rank.waits(lane)
            for rank in self.ranks
            for lane, (early, late) in zip(rank.lanes.values(), heads, strict=False)
        )

    def _skipped(self, periods: Periods, tasks: IntArray) -> list[Skipped]:
        """One period of each rank."""
        rows, earlier = periods.rows(), iter(periods.moments[1].heads)
        found = []
        for rank in self.ranks:
            streams = {stream: lane.place - next(earlier) for stream, lane in rank.lanes.items()}
            own = rows[rows[:, RANK] == rank.number, TASK].astype(np.int64)
            found.append(_skipped(rank, int(tasks[rank.number]), streams, own))
        return found

    def _times(self, rank: Rank, period: Skipped) -> int:
        """How often a rank's tasks go on like the last period's, before any for which an idle stream waits."""
        if not period.tasks:
            return len(rank.done)
        breaks = self._breaks_of(rank, period.tasks)
        place = int(np.searchsorted(breaks, period.lowest))
        idle = (lane for stream, lane in rank.lanes.items() if not period.streams[stream])
        ends = [
            len(rank.done),
            *breaks[place : place + 1].tolist(),
            *(wait for lane in idle for wait in rank.waits(lane)),
        ]
        times: int = (min(ends) - 1 - period.furthest) // period.tasks
        return max(times, 0)

    def _breaks_of(self, rank: Rank, period: int) -> IntArray:
        """Tasks of a rank that are unlike those a period before."""
        kind = int(self.world.program.kind[rank.number])
        if (kind, period) not in self._breaks:
            alike = self.world.program.programs[kind].alike
            self._breaks[kind, period] = np.flatnonzero(alike[period:] != alike[:-period]) + period
        return self._breaks[kind, period]


def _skipped(rank: Rank, tasks: int, streams: Mapping[Stream, int], own: IntArray) -> Skipped:
    """One period of a rank. own: tasks that were written in it."""
    lanes = [lane for stream, lane in rank.lanes.items() if streams[stream] and lane.place < len(lane.queue)]
    moving = [lane.queue[lane.place] for lane in lanes]
    lowest, highest = int(own.min(initial=len(rank.done))), int(own.max(initial=-1))
    first = min([lowest, *moving])
    undone = rank.done.find(0, first)
    first = undone if undone >= 0 else len(rank.done)
    return Skipped(
        tasks=tasks,
        streams=streams,
        first=first,
        last=max(highest + 1, first),
        lowest=lowest,
        furthest=max([highest, *moving]),
    )
