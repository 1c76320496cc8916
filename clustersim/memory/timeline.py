"""How much memory does every pipeline rank use, by the order of its passes or as they ran?

The peak depends on the order only, so whether a plan fits needs no simulation; the timeline comes from a
trace.
"""

from collections.abc import Iterable, Iterator, Sequence

import numpy as np

from clustersim.common.arrays import FloatArray, IntArray
from clustersim.common.units import Bytes
from clustersim.memory.activations import Activations
from clustersim.memory.footprint import Footprint
from clustersim.memory.ledger import MemoryLedger, PassOrder, TimedPasses, ledger_from_order, ledger_from_passes
from clustersim.program.program import Program
from clustersim.program.task import Stream
from clustersim.trace.trace import Trace


def ledgers_from_order(footprint: Footprint, orders: Iterable[PassOrder]) -> Iterator[MemoryLedger]:
    """Memory of the GPU with the highest peak of each pipeline rank, over the index of its pass."""
    activations = Activations(footprint.plan)
    for rank, order in enumerate(orders):
        yield ledger_from_order(footprint, activations, rank, order)


def ledgers_from_trace(footprint: Footprint, program: Program, trace: Trace) -> Iterator[MemoryLedger]:
    """Memory over time of every pipeline rank (the first GPU, where torch.nn.DataParallel runs)."""
    activations = Activations(footprint.plan)
    for pipeline_rank in range(footprint.plan.layout.pp):
        rank = int(trace.representative[np.flatnonzero(program.program_index == pipeline_rank)[0]])
        passes = _timed_passes(program, trace, rank, footprint.plan.microbatches)
        yield ledger_from_passes(footprint, activations, pipeline_rank, passes)


def _timed_passes(program: Program, trace: Trace, rank: int, microbatches: int) -> TimedPasses:
    """The passes of a simulated rank in the first step (this many microbatches), with their times.

    A pass that is split, so that others may run in between, lasts from its first task to its last. No pass
    begins before the previous one has ended, not even by floating-point rounding.
    """
    rank_program = program.programs[int(program.program_index[rank])]
    event_indices = trace.rank_events(rank, Stream.COMPUTE)
    passes, end = rank_program.action_index[trace.task[event_indices]], trace.end[event_indices]
    start = np.maximum(trace.start[event_indices], np.append(0.0, end)[:-1])
    in_first_step = np.array([action.microbatch < microbatches for action in rank_program.actions] + [False])
    is_counted = in_first_step[passes]
    passes, start, end = passes[is_counted], start[is_counted], end[is_counted]
    ran, first = np.unique(passes, return_index=True)
    last_end = np.empty(len(rank_program.actions))
    last_end[passes] = end  # of equal indices numpy keeps the last
    actions = tuple(rank_program.actions[index] for index in ran.tolist())
    return TimedPasses(actions, np.stack([start[first], last_end[ran]], axis=1))


def capacity_by_pipeline_rank(memory_bytes: FloatArray, stage: IntArray) -> tuple[Bytes, ...]:
    """Memory of the smallest GPU of each pipeline rank. memory_bytes: [ranks]; stage: [ranks] their pipeline rank."""
    return tuple(float(memory_bytes[stage == rank].min()) for rank in range(int(stage.max()) + 1))


def max_utilization(peaks: Sequence[Bytes], capacities: Sequence[Bytes]) -> tuple[Bytes, Bytes]:
    """Peak and capacity of the pipeline rank with the highest memory utilization."""
    return max(zip(peaks, capacities, strict=True), key=lambda pair: pair[0] / pair[1])
