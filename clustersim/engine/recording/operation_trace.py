"""When did each operation inside the blocks of a rank run?

A trace says when blocks began. From there their operations can be run again, with the ranks that meet inside them and
the collectives that were beside them, so that spans of operations need not be kept for all ranks.

Once their starts are known, runs do not depend on each other: all runs of a block go through its operations together,
as arrays. A run in which the rank waited for nobody needs no other rank.
"""

from collections.abc import Iterator, Set
from dataclasses import dataclass
from typing import Final, Self

import numpy as np

from clustersim.common.arrays import BoolArray, FloatArray, IntArray
from clustersim.cost.jitter import Jitter
from clustersim.cost.segment import BlockCost
from clustersim.engine.recording.operation_log import Written
from clustersim.engine.vectorized.overlap_timeline import Moves
from clustersim.engine.vectorized.segment_durations import BlockPieces, group_colours, meetings_of
from clustersim.engine.vectorized.segment_eval import Beside, Busy, step_through
from clustersim.program.program import Program, RankProgram
from clustersim.program.task import BESIDE, Block, Communicate, Compute, Stream
from clustersim.symmetry.refinement import Classes
from clustersim.trace.trace import OperationSpans, Trace

AT_ONCE: Final = 1_000_000
"""Operations of all ranks that are run again at once, so that each of some arrays takes 8 MB."""


@dataclass(frozen=True, slots=True, eq=False)
class Inside:
    """Works out the operations of a run. written: those that the engine wrote itself."""

    program: Program
    classes: Classes
    cost: BlockCost
    jitter: Jitter | None
    trace: Trace
    written: Written

    def of(self, rank: int, tasks: Set[int] | None = None) -> OperationSpans:
        """Every operation of the blocks of a rank, or of these of its tasks only, in the order in which they ran."""
        simulated = int(self.trace.representative[rank])
        program = self.program.programs[int(self.program.kind[simulated])]
        wanted = np.array([isinstance(task, Compute) for task in program.tasks], dtype=bool)
        if tasks is not None:
            wanted &= np.isin(np.arange(len(wanted)), list(tasks))
        table, asked = _Table.of(program, wanted), np.flatnonzero(wanted)
        written = self.written.of(simulated, set(asked.tolist()))
        table.write(written.task, written.operation, written.start, written.end)
        wanted[written.task] = False
        own = np.array([simulated])
        rows = _rows(self.trace, own)[0]
        contention = self.trace.contention
        which, entry = contention.of(rows[asked])
        table.share(asked[which], contention.operation[entry], contention.exposed[entry], contention.moved[entry])
        waited = self.trace.waited[rows] != 0.0
        self._play(table, simulated, own, np.flatnonzero(wanted & ~waited))
        if (wanted & waited).any():
            self._play(table, simulated, self._together(simulated), np.flatnonzero(wanted & waited))
        return table.spans(simulated)

    def _together(self, rank: int) -> IntArray:
        """The simulated ranks that this one meets inside blocks, through others too; itself among them."""
        simulated = self.trace.simulated_ranks
        same = simulated[self.program.kind[simulated] == self.program.kind[rank]]
        roles = {exchange.group for exchange in self.program.programs[int(self.program.kind[rank])].exchanges_inside}
        reached = same == rank
        while True:
            before = int(reached.sum())
            for role in roles:
                colour = group_colours(self.program, self.classes, role, same)
                reached |= np.isin(colour, colour[reached])
            if int(reached.sum()) == before:
                together: IntArray = same[reached]
                return together

    def _play(self, table: "_Table", rank: int, ranks: IntArray, tasks: IntArray) -> None:
        """Run the blocks of these tasks again, on this rank and those that it meets."""
        if not len(tasks):
            return
        program, place = table.program, int(np.flatnonzero(ranks == rank)[0])
        pieces = BlockPieces(program, ranks, self.cost, self.jitter, meetings_of(self.program, self.classes, ranks))
        times = _Times.of(self.trace, program, ranks, self.cost if pieces.slowed else None)
        before = np.array(program.operations_before)
        portion = before[tasks] // max(AT_ONCE // len(ranks), 1)
        for some in np.split(tasks, np.flatnonzero(np.diff(portion)) + 1):
            first = int(before[some[0]])
            drawn = pieces.factors(first, int(before[some[-1] + 1]) - first)
            for block, runs in times.alike(program, some):
                operations = np.arange(len(block.operations))
                factors = None if drawn is None else drawn[:, before[runs, None] - first + operations]
                several = pieces.several(block, factors)
                _, begins, ends = step_through(times.start[:, runs], several, times.beside(runs))
                table.write(runs[:, None], operations, begins[place], ends[place])


@dataclass(frozen=True, slots=True, eq=False)
class _Table:
    """Operations of some tasks of a program. first: [tasks + 1] the row of each one's first.

    times: begin, end, and what shared links add to each (`OperationSpans`).
    """

    program: RankProgram
    first: IntArray
    times: FloatArray

    @classmethod
    def of(cls, program: RankProgram, wanted: BoolArray) -> Self:
        """Room for the operations of the tasks that are wanted: [tasks]."""
        sizes = np.where(wanted, np.diff(program.operations_before), 0)
        first = np.concatenate(([0], np.cumsum(sizes)))
        return cls(program, first, np.zeros((4, int(first[-1]))))

    def write(self, task: IntArray, operation: IntArray, begin: FloatArray, end: FloatArray) -> None:
        """Write when operations of tasks began and ended: arrays of one shape, or such as become one."""
        rows = self.first[task] + operation
        self.times[0, rows], self.times[1, rows] = begin, end

    def share(self, task: IntArray, operation: IntArray, exposed: FloatArray, moved: FloatArray) -> None:
        """Write what sharing links added to operations of tasks: [n] each."""
        rows = self.first[task] + operation
        self.times[2, rows], self.times[3, rows] = exposed, moved

    def spans(self, rank: int) -> OperationSpans:
        """All rows, as those of a rank."""
        sizes = np.diff(self.first)
        task = np.repeat(np.arange(len(sizes)), sizes)
        return OperationSpans(np.full(len(task), rank), task, np.arange(len(task)) - self.first[task], *self.times)


@dataclass(frozen=True, slots=True, eq=False)
class _Times:
    """When some ranks ran their tasks, and which collectives of their data streams were beside them.

    start: [ranks, tasks]; since, until: [ranks, collectives + 1], one after the other, the last one never; pace:
    [ranks, collectives + 1] of kernels beside each; first, last: [tasks] those beside a task on any rank are from first
    to before last.
    """

    start: FloatArray
    since: FloatArray
    until: FloatArray
    pace: IntArray
    first: IntArray
    last: IntArray

    @classmethod
    def of(cls, trace: Trace, program: RankProgram, ranks: IntArray, cost: BlockCost | None) -> Self:
        """Times of ranks that run the program; cost: None where collectives beside make no difference."""
        rows = _rows(trace, ranks)
        start, end = trace.start[rows], trace.end[rows]
        since, until, pace = _beside(program, start, end, cost)
        first = [np.searchsorted(own, when, side="right") for own, when in zip(until, start, strict=True)]
        last = [np.searchsorted(own, when, side="left") for own, when in zip(since, end, strict=True)]
        never = np.full((len(ranks), 1), np.inf)
        since, until = np.hstack([since, never]), np.hstack([until, -never])
        pace = np.hstack([pace, np.ones((len(ranks), 1), dtype=np.int64)])
        return cls(start, since, until, pace, np.min(first, axis=0), np.max(last, axis=0))

    def alike(self, program: RankProgram, tasks: IntArray) -> Iterator[tuple[Block, IntArray]]:
        """Runs of one block, apart those with collectives beside them and those without."""
        found: dict[tuple[Block, bool], list[int]] = {}
        for number, disturbed in zip(tasks.tolist(), (self.last > self.first)[tasks].tolist(), strict=True):
            task = program.tasks[number]
            if isinstance(task, Compute):
                found.setdefault((task.block, disturbed), []).append(number)
        for (block, _), numbers in found.items():
            yield block, np.array(numbers)

    def beside(self, tasks: IntArray) -> Busy:
        """The collectives beside runs, which may be few beside one and many beside another: [ranks, runs] each."""
        most = int((self.last - self.first)[tasks].max())
        which = [np.minimum(self.first[tasks] + number, self.since.shape[1] - 1) for number in range(most)]
        return [Beside(self.since[:, item], self.until[:, item], self.pace[:, item]) for item in which]


def _beside(
    program: RankProgram, start: FloatArray, end: FloatArray, cost: BlockCost | None
) -> tuple[FloatArray, FloatArray, IntArray]:
    """When collectives were beside blocks, one after the other, and the pace of kernels meanwhile: [ranks, n] each."""
    data, experts = (_moves(program, stream, start, end, cost) for stream in BESIDE)
    if cost is None or not experts.pace.size:
        return data.since, data.until, data.pace
    moves = data.with_others(experts, cost)
    return moves.since, moves.until, np.maximum(moves.pace, 1)


def _moves(program: RankProgram, stream: Stream, start: FloatArray, end: FloatArray, cost: BlockCost | None) -> Moves:
    """The collectives of a stream; start, end: [ranks, tasks]; cost: None where they make no difference."""
    found = {} if cost is None else dict(_moving(program, stream, cost))
    tasks, pace = np.array([*found], dtype=np.int64), np.array([*found.values()], dtype=np.int64)
    return Moves(start[:, tasks], end[:, tasks], np.broadcast_to(pace, (len(start), len(pace))))


def _moving(program: RankProgram, stream: Stream, cost: BlockCost) -> Iterator[tuple[int, int]]:
    """The collectives of a stream, and at which pace kernels go beside each."""
    for number, (task, own) in enumerate(zip(program.tasks, program.streams, strict=True)):
        if own is stream and isinstance(task, Communicate):
            yield number, cost.pace(task.exchange)


def _rows(trace: Trace, ranks: IntArray) -> IntArray:
    """Trace rows of all tasks of some simulated ranks of one kind: [ranks, tasks]."""
    rows = np.flatnonzero(np.isin(trace.rank, ranks))
    order = np.lexsort((trace.task[rows], trace.rank[rows]))
    return rows[order].reshape(len(ranks), -1)
