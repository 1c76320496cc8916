"""How full is the memory of every pipeline rank, by the order of its passes alone or as they ran?

The peak depends on the order, so whether a plan fits needs no simulation; over time it is drawn from a trace.
"""

from collections.abc import Iterable, Iterator, Sequence

import numpy as np

from clustersim.common.arrays import FloatArray, IntArray
from clustersim.common.units import Bytes, Seconds
from clustersim.memory.activations import Activations
from clustersim.memory.footprint import Footprint
from clustersim.memory.ledger import Ledger, Pass, Turns, ledger, ordered_ledger
from clustersim.program.action import Action
from clustersim.program.program import Program
from clustersim.program.task import ComputeTask, Stream
from clustersim.trace.trace import Trace


def ordered_ledgers(footprint: Footprint, turns: Iterable[Turns]) -> Iterator[Ledger]:
    """Memory of the fullest GPU of each pipeline rank, over the number of its pass."""
    activations = Activations(footprint.plan)
    for rank, own in enumerate(turns):
        yield ordered_ledger(footprint, activations, rank, own)


def timed_ledgers(footprint: Footprint, program: Program, trace: Trace) -> Iterator[Ledger]:
    """Memory over time of every pipeline rank (the first GPU, where torch.nn.DataParallel runs)."""
    activations = Activations(footprint.plan)
    for pipeline_rank in range(footprint.plan.layout.pp):
        rank = int(trace.representative[np.flatnonzero(program.program_index == pipeline_rank)[0]])
        passes = _passes(program, trace, rank, footprint.plan.microbatches)
        yield ledger(footprint, activations, pipeline_rank, passes)


def _passes(program: Program, trace: Trace, rank: int, microbatches: int) -> list[Pass]:
    """The actions of a simulated rank in the first step, of so many microbatches, with their times.

    An action in pieces, between which others may be, lasts from the first to the last. None begins before the one
    before it has ended, not even by the rounding of times that were added up.
    """
    tasks = program.programs[int(program.program_index[rank])].tasks
    begun: dict[Action, Seconds] = {}
    ended: dict[Action, Seconds] = {}
    rows = trace.rank_events(rank, Stream.COMPUTE)
    columns = (column[rows].tolist() for column in (trace.task, trace.start, trace.end))
    free = 0.0
    for number, begin, end in zip(*columns, strict=True):
        start, free = max(begin, free), end
        task = tasks[number]
        if not isinstance(task, ComputeTask) or task.action is None or task.action.microbatch >= microbatches:
            continue
        begun.setdefault(task.action, start)
        ended[task.action] = end
    return [Pass(action, start, ended[action]) for action, start in begun.items()]


def capacities(memory: FloatArray, stage: IntArray) -> tuple[Bytes, ...]:
    """Memory of the smallest GPU of each pipeline rank. memory: [ranks] bytes; stage: [ranks] their pipeline rank."""
    return tuple(float(memory[stage == rank].min()) for rank in range(int(stage.max()) + 1))


def tightest(peaks: Sequence[Bytes], capacities: Sequence[Bytes]) -> tuple[Bytes, Bytes]:
    """Peak and capacity of the pipeline rank that fills its GPU most."""
    return max(zip(peaks, capacities, strict=True), key=lambda pair: pair[0] / pair[1])
