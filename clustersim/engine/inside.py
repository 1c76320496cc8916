"""When did each operation inside the blocks of a rank run?

A trace says when blocks began. From there their operations can be run again, with the ranks that meet inside them and
the collectives that were beside them, so that spans of operations need not be kept for all ranks.
"""

from collections.abc import Set
from dataclasses import dataclass

import numpy as np

from clustersim.cost.block import BlockCost
from clustersim.cost.jitter import Jitter
from clustersim.engine.block_pieces import BlockPieces, group_colours, meetings_of
from clustersim.engine.meeting import FloatArray, IntArray
from clustersim.engine.play import Busy, step_through
from clustersim.program.program import Program
from clustersim.program.symmetry import Classes
from clustersim.program.task import Compute, Stream
from clustersim.trace.store import OperationSpans, Trace


@dataclass(frozen=True, slots=True, eq=False)
class Inside:
    """Works out the operations of a run. written: those that the engine wrote itself."""

    program: Program
    classes: Classes
    cost: BlockCost
    jitter: Jitter | None
    trace: Trace
    written: OperationSpans

    def of(self, rank: int, tasks: frozenset[int] | None = None) -> OperationSpans:
        """Every operation of the blocks of a rank, or of these of its tasks only, in the order in which they ran."""
        simulated = int(self.trace.representative[rank])
        program = self.program.programs[int(self.program.kind[simulated])]
        blocks = {number for number, task in enumerate(program.tasks) if isinstance(task, Compute)}
        wanted = blocks if tasks is None else blocks & tasks
        written = self.written.of(simulated, wanted)
        ranks = self._together(simulated)
        place = int(np.flatnonzero(ranks == simulated)[0])
        parts = [written, *self._played(ranks, place, wanted - set(written.task.tolist()))]
        columns = [np.concatenate(column) for column in zip(*(part.columns for part in parts), strict=True)]
        order = np.lexsort((columns[2], columns[1]))
        return OperationSpans(*(column[order] for column in columns))

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

    def _played(self, ranks: IntArray, place: int, tasks: Set[int]) -> list[OperationSpans]:
        """Run the blocks of these tasks again."""
        program = self.program.programs[int(self.program.kind[ranks[0]])]
        pieces = BlockPieces(program, ranks, self.cost, self.jitter, meetings_of(self.program, self.classes, ranks))
        start, end = self._times(ranks)
        beside = np.flatnonzero(np.array(program.streams) == Stream.DATA)
        since, until = start[:, beside], end[:, beside]
        played: list[OperationSpans] = []
        for number, task in enumerate(program.tasks):
            if isinstance(task, Compute) and number in tasks:
                meets = ((since < end[:, number, None]) & (until > start[:, number, None])).any(axis=0)
                busy = [(start[:, each], end[:, each]) for each in beside[meets].tolist()]
                played.append(_spans(int(ranks[place]), number, place, pieces, (task, start[:, number], busy)))
        return played

    def _times(self, ranks: IntArray) -> tuple[FloatArray, FloatArray]:
        """Start and end of all tasks: [ranks, tasks] each."""
        rows = [np.flatnonzero(self.trace.rank == rank) for rank in ranks.tolist()]
        rows = [each[np.argsort(self.trace.task[each])] for each in rows]
        return np.stack([self.trace.start[each] for each in rows]), np.stack([self.trace.end[each] for each in rows])


def _spans(
    rank: int, number: int, place: int, pieces: BlockPieces, run: tuple[Compute, FloatArray, Busy]
) -> OperationSpans:
    """Spans of one task of the rank at a place among those that run it together."""
    task, start, busy = run
    _, begins, ends = step_through(start, pieces.of(number, task.block)[0], busy)
    count = len(task.block.operations)
    return OperationSpans(np.full(count, rank), np.full(count, number), np.arange(count), begins[place], ends[place])
