"""How do all ranks that run the same program work through it side by side?

Times are arrays over the ranks of a cohort: those simulated ranks that run the same tasks. Where nobody shares a link,
a span's times follow from those of the spans that it waits for, by maxima and sums. So a cohort may run a task as soon
as these are known, however far its ranks are apart in time, and needs no clock. What a collective beside a block slows
must be known before the block runs: collectives that do not wait for it, of the rank's own data stream, go first.
"""

from dataclasses import dataclass, field

import numpy as np

from clustersim.common.arrays import FloatArray, IntArray
from clustersim.engine.vectorized.overlap_timeline import Moves
from clustersim.engine.vectorized.segment_durations import BlockPieces
from clustersim.engine.vectorized.segment_eval import NEVER, Beside, Busy, beside, leaders, play
from clustersim.engine.vectorized.trace_writer import Columns, Span
from clustersim.program.program import RankProgram
from clustersim.program.task import BESIDE, Block, Stream


@dataclass(frozen=True, slots=True, eq=False)
class Ready:
    """When the ranks of a cohort turn to a task, when they can start it, and because of which rows: [ranks] each."""

    queued: FloatArray
    ready: FloatArray
    cause: IntArray


@dataclass(slots=True, eq=False)
class _Line:
    """Collectives of one stream beside blocks. tasks: theirs, in order; needed: `_computed_before` each starts.

    passed: how many have ended before any block yet to come.
    """

    tasks: list[int]
    needed: list[int]
    passed: int = 0

    def beside(self, number: int) -> list[int]:
        """Those that do not wait for a compute task, but for those that have passed."""
        end = self.passed
        while end < len(self.needed) and self.needed[end] < number:
            end += 1
        return self.tasks[self.passed : end]


@dataclass(slots=True, eq=False)
class Cohort:
    """The simulated ranks of one kind, their blocks, and the trace rows that they fill."""

    program: RankProgram
    columns: Columns
    pieces: BlockPieces
    done: list[bool] = field(init=False)
    _last: dict[Stream, int] = field(init=False, default_factory=dict)
    _needed: list[int] = field(init=False)
    _lines: list[_Line] = field(init=False, default_factory=list)

    def __post_init__(self) -> None:
        self.done = [False] * len(self.program.tasks)
        for stream in BESIDE if self.pieces.slowed else ():
            tasks = [number for number, own in enumerate(self.program.streams) if own is stream]
            self._lines.append(_Line(tasks, _computed_before(self.program, tasks)))

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
        for line in self._lines:
            while line.passed < len(line.tasks) and self._ended(line.tasks[line.passed]):
                line.passed += 1
        return all(self.done[item] for line in self._lines for item in line.beside(number))

    def _ended(self, task: int) -> bool:
        """Whether a collective ended on every rank before the compute stream goes on."""
        last = self._last.get(Stream.COMPUTE)
        if last is None or not self.done[task]:
            return False
        return bool((self.columns.end[task] <= self.columns.end[last]).all())

    def _busy(self, number: int) -> Busy:
        """When collectives beside a compute task move data, and the pace of kernels meanwhile."""
        lines = [tasks for line in self._lines if (tasks := line.beside(number))]
        if len(lines) == 1:
            return [Beside(self.columns.start[item], self.columns.end[item], self._pace(item)) for item in lines[0]]
        if not lines:
            return NEVER
        data, experts = (self._moves(tasks) for tasks in lines)
        both = data.with_others(experts, self.pieces.cost)
        return [
            Beside(*element) for element in zip(both.since.T, both.until.T, np.maximum(both.pace, 1).T, strict=True)
        ]

    def _moves(self, tasks: list[int]) -> Moves:
        start, end = self.columns.start[tasks].T, self.columns.end[tasks].T
        return Moves(start, end, np.broadcast_to([self._pace(task) for task in tasks], start.shape))

    def _pace(self, task: int) -> int:
        """Of kernels beside a collective."""
        return self.pieces.cost.pace(self.program.tasks[task].exchange)  # type: ignore[union-attr]

    def compute(self, number: int, block: Block) -> None:
        """Run a block on all ranks."""
        when = self.ready(number)
        pieces, outlined = self.pieces.of(number, block)
        run = play(when.ready, pieces) if outlined is None else outlined.run(when.ready)
        if disturbing := beside(run, when.ready, self._busy(number)):
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
        own = max((needs[item] for item in task.after), default=-1)
        if stream is Stream.COMPUTE:
            needs.append(number)
            continue
        if stream is not Stream.RECEIVE:
            own = streams[stream] = max(own, streams.get(stream, -1))
        needs.append(own)
    return [needs[number] for number in chosen]
