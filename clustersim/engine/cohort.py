"""How do all ranks that run the same program work through it side by side?

Times are arrays over the ranks of a cohort: those simulated ranks that run the same tasks. Where nobody shares a link,
a span's times follow from those of the spans that it waits for, by maxima and sums. So a cohort may run a task as soon
as these are known, however far its ranks are apart in time, and needs no clock. What a collective beside a block slows
must be known before the block runs: collectives that do not wait for it, of the rank's own data stream, go first.
"""

from dataclasses import dataclass, field

import numpy as np

from clustersim.arrays import FloatArray, IntArray
from clustersim.engine.block_pieces import BlockPieces
from clustersim.engine.columns import Columns, Span
from clustersim.engine.play import Beside, beside, leaders, play
from clustersim.program.program import RankProgram
from clustersim.program.task import Block, Communicate, Stream


@dataclass(frozen=True, slots=True, eq=False)
class Ready:
    """When the ranks of a cohort turn to a task, when they can start it, and because of which rows: [ranks] each."""

    queued: FloatArray
    ready: FloatArray
    cause: IntArray


@dataclass(slots=True, eq=False)
class Cohort:
    """The simulated ranks of one kind, their blocks, and the trace rows that they fill."""

    program: RankProgram
    columns: Columns
    pieces: BlockPieces
    done: list[bool] = field(init=False)
    _last: dict[Stream, int] = field(init=False, default_factory=dict)
    _needed: list[int] = field(init=False)
    _paces: dict[int, int] = field(init=False)
    _reductions: list[int] = field(init=False)
    _passed: int = field(init=False, default=0)

    def __post_init__(self) -> None:
        self.done = [False] * len(self.program.tasks)
        tasks = zip(self.program.tasks, self.program.streams, strict=True)
        self._paces = {
            number: self.pieces.cost.pace(task.exchange)
            for number, (task, stream) in enumerate(tasks)
            if stream is Stream.DATA and isinstance(task, Communicate)
        }
        self._reductions = list(self._paces)
        self._needed = _computed_before(self.program, self._reductions) if self.pieces.slowed else []

    @property
    def ranks(self) -> IntArray:
        """The simulated ranks of the cohort."""
        return self.columns.ranks

    def ready(self, number: int) -> Ready:
        """When a task can start, as far as its own rank is concerned."""
        columns, stream = self.columns, self.program.streams[number]
        before = self._last.get(stream)
        queued = np.zeros(len(self.ranks)) if before is None else columns.end[before]
        cause = np.full(len(self.ranks), -1) if before is None else columns.rows(before)
        ready = queued
        for needed in self.program.tasks[number].after:
            end = columns.end[needed]
            later = end > ready
            cause = np.where(later | (cause < 0), columns.rows(needed), cause)
            ready = np.where(later, end, ready)
        return Ready(queued, ready, cause)

    def finish(self, number: int, span: Span) -> None:
        """Write what the ranks did in a task."""
        self.columns.write(number, span)
        self.done[number] = True
        self._last[self.program.streams[number]] = number

    def computes(self, number: int) -> bool:
        """Whether all collectives are known that may run beside the block of a compute task."""
        return all(self.done[each] for each in self._beside(number))

    def _beside(self, number: int) -> list[int]:
        """Data tasks that do not wait for a compute task, but for those that ended before any block yet to come."""
        while self._passed < len(self._needed) and self._ended(self._reductions[self._passed]):
            self._passed += 1
        end = self._passed
        while end < len(self._needed) and self._needed[end] < number:
            end += 1
        return self._reductions[self._passed : end]

    def _moving(self, task: int) -> Beside:
        """When the collective of a data task moves data, and the pace of kernels beside it."""
        return Beside(self.columns.start[task], self.columns.end[task], self._paces[task])

    def _ended(self, task: int) -> bool:
        """Whether a data task ended on every rank before the compute stream goes on."""
        last = self._last.get(Stream.COMPUTE)
        if last is None or not self.done[task]:
            return False
        return bool((self.columns.end[task] <= self.columns.end[last]).all())

    def compute(self, number: int, block: Block) -> None:
        """Run a block on all ranks."""
        when = self.ready(number)
        pieces, outlined = self.pieces.of(number, block)
        busy = [self._moving(task) for task in self._beside(number)]
        run = play(when.ready, pieces) if outlined is None else outlined.run(when.ready)
        if disturbing := beside(run, when.ready, busy):
            run = play(when.ready, pieces, disturbing)
        self.columns.waited[number], self.columns.slowed[number] = run.waited, run.slowed
        if pieces.meets:
            self.columns.leader[number] = self.columns.rows(number)[leaders(pieces, run.waited)]
        self.finish(number, Span(when.queued, when.ready, when.ready, run.end, when.cause))


def _computed_before(program: RankProgram, chosen: list[int]) -> list[int]:
    """For each of some tasks of one stream the last compute task that must have ended before it starts, or -1."""
    needs: list[int] = []
    streams: dict[Stream, int] = {}
    for number, (task, stream) in enumerate(zip(program.tasks, program.streams, strict=True)):
        own = max((needs[each] for each in task.after), default=-1)
        if stream is Stream.COMPUTE:
            needs.append(number)
            continue
        if stream is not Stream.RECEIVE:
            own = streams[stream] = max(own, streams.get(stream, -1))
        needs.append(own)
    return [needs[number] for number in chosen]
