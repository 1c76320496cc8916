"""How much communication hides behind computation? For every class of ranks and mesh axis.

An axis *moves data* while one of the rank's collectives or messages of it is under way, from its start (the last member
has come, the message can move) to its end; two at once count once. Waiting for a late member is not moving. Every
second in which it moves is one of

    hidden    beside a running block of the rank, or, inside one, beside the kernel of the same operation
    exposed   the compute stream waits for it: the breakdown's exposed part of the axis, to the second
    beside    the compute stream stands still for another reason (a bubble, another axis, the other direction of a
              pipeline), so it costs nothing, and nothing hides it

Where ranks stand still for nothing else, exposed is simply what does not hide. *Alone* is the time in blocks in which
nothing of the axis moves; other axes may, and members may be waited for.
What hides inside blocks is what their costs say (jitter makes kernels differ, not what moves) and what sharing links
adds.
"""

from dataclasses import dataclass
from typing import Final

import numpy as np

from clustersim.common.arrays import FloatArray, IntArray
from clustersim.common.units import Seconds
from clustersim.cost.segment import SegmentTiming
from clustersim.parallel.mesh import COMM_AXES
from clustersim.results.intervals import Intervals, common
from clustersim.results.time_breakdown import Breakdown, run_parts
from clustersim.results.time_categories import EXPOSED, PART_OF_ROLE
from clustersim.results.trace_table import BlockRuns, Rows, TimingOf, block_runs, timings

_PLACES: Final = [part.place for part in EXPOSED.values()]
_FIRST: Final = _PLACES[0]


@dataclass(frozen=True, slots=True, eq=False)
class Overlap:
    """Seconds of one step (of several: the mean), by row, a class or a stage, and axis of `COMM_AXES`: [rows, axes] each.

    step: seconds of the step.
    """

    alone: FloatArray
    hidden: FloatArray
    exposed: FloatArray
    beside: FloatArray
    step: Seconds

    @property
    def moving(self) -> FloatArray:
        """How long each axis moves data."""
        return self.hidden + self.exposed + self.beside

    def mean(self, row: IntArray, weights: IntArray) -> "Overlap":
        """Means of rows put together. row: [rows] to which each goes; weights: [rows] how many ranks each is."""
        whole = np.bincount(row, weights)[:, None]

        def together(seconds: FloatArray) -> FloatArray:
            mean: FloatArray = np.zeros((len(whole), len(COMM_AXES)))
            np.add.at(mean, row, seconds * weights[:, None])
            return mean / whole

        return Overlap(
            alone=together(self.alone), hidden=together(self.hidden), exposed=together(self.exposed),
            beside=together(self.beside), step=self.step,
        )  # fmt: skip


def overlap(rows: Rows, timing_of: TimingOf, parts: Breakdown) -> Overlap:
    """How communication meets computation on every class. parts: the same step's breakdown."""
    trace, shape = rows.trace, (len(rows.ranks), len(COMM_AXES))
    moves = _moves(rows).joined()
    blocks = np.flatnonzero(rows.block >= 0)
    busy = Intervals(rows.owner[blocks], trace.start[blocks], trace.end[blocks])
    runs = block_runs(rows, blocks, busy.seconds)
    inside_exposed, inside_hidden = _inside(rows, runs, timing_of)
    covered = _meeting(moves, busy, len(rows.ranks))
    exposed = parts.seconds[:, _PLACES] * rows.steps
    hidden = covered + inside_hidden
    outside = moves.total(shape[0] * shape[1]).reshape(shape)
    return Overlap(
        alone=(busy.total(shape[0])[:, None] - hidden - inside_exposed) / rows.steps,
        hidden=hidden / rows.steps,
        exposed=exposed / rows.steps,
        beside=(outside - covered - (exposed - inside_exposed)) / rows.steps,
        step=trace.makespan / rows.steps,
    )


def _moves(rows: Rows) -> Intervals:
    """What moves outside blocks; keys are class and axis."""
    row = np.flatnonzero(rows.exchange >= 0)
    axis = rows.tasks.part[rows.entry[row]] - _FIRST
    return Intervals(rows.owner[row] * len(COMM_AXES) + axis, rows.trace.start[row], rows.trace.end[row])


def _meeting(moves: Intervals, busy: Intervals, classes: int) -> FloatArray:
    """How long moves are beside running blocks: [classes, axes]. moves: by class and axis; busy: by class."""
    of_class = Intervals(moves.key // len(COMM_AXES), moves.start, moves.end)
    which, _, both = common(of_class, busy.sorted())
    met = Intervals(moves.key[which], both.start, both.end)
    return met.total(classes * len(COMM_AXES)).reshape(classes, len(COMM_AXES))


def _inside(rows: Rows, runs: BlockRuns, timing_of: TimingOf) -> tuple[FloatArray, FloatArray]:
    """Exposed and hidden seconds of the exchanges inside blocks: [classes, axes] each."""
    exposed, hidden = np.zeros((2, len(rows.ranks), len(COMM_AXES)))
    np.add.at(exposed, runs.owner, run_parts(rows, runs, timing_of)[:, _PLACES])
    different, which = timings(rows, runs, timing_of)
    hides = np.array([_hides(timing) for _, timing in different]).reshape(-1, len(COMM_AXES))[which]
    np.add.at(hidden, runs.owner, hides * runs.runs[:, None] + runs.hidden[:, _PLACES])
    return exposed, hidden


def _hides(timing: SegmentTiming) -> FloatArray:
    """Seconds in which a block's exchanges move behind the kernels beside them: [axes]."""
    seconds, kernels = np.zeros(len(COMM_AXES)), timing.kernel_seconds
    for place, both in timing.overlaps.items():
        role = both.overlap.comm_op.comm_group
        moves = both.comm_duration(float(kernels[place]), both.comm_seconds)
        seconds[PART_OF_ROLE[role].place - _FIRST] += moves - timing.exposed_comm[place]
    return seconds
