"""How much memory does every pipeline rank use, by the order of its passes or as they ran?

The peak depends on the order only, so whether a plan fits needs no simulation; the timeline comes from a
trace.
"""

from collections.abc import Iterable, Iterator, Sequence

import numpy as np

from clustersim.common.arrays import FloatArray, IntArray
from clustersim.common.units import Bytes, Seconds
from clustersim.memory.activations import Activations
from clustersim.memory.footprint import Footprint
from clustersim.memory.ledger import MemoryLedger, PassOrder, TimedPass, ledger_from_order, ledger_from_passes
from clustersim.program.action import Action
from clustersim.program.program import Program
from clustersim.program.task import ComputeTask, Stream
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


def _timed_passes(program: Program, trace: Trace, rank: int, microbatches: int) -> list[TimedPass]:
    """The actions of a simulated rank in the first step (this many microbatches), with their times.

    An action that is split, so that others may run in between, lasts from its first task to its last. No action
    begins before the previous one has ended, not even by floating-point rounding.
    """
    tasks = program.programs[int(program.program_index[rank])].tasks
    start_of: dict[Action, Seconds] = {}
    end_of: dict[Action, Seconds] = {}
    event_indices = trace.rank_events(rank, Stream.COMPUTE)
    columns = (column[event_indices].tolist() for column in (trace.task, trace.start, trace.end))
    stream_free = 0.0
    for task_id, begin, end in zip(*columns, strict=True):
        start, stream_free = max(begin, stream_free), end
        task = tasks[task_id]
        if not isinstance(task, ComputeTask) or task.action is None or task.action.microbatch >= microbatches:
            continue
        start_of.setdefault(task.action, start)
        end_of[task.action] = end
    return [TimedPass(action, start, end_of[action]) for action, start in start_of.items()]


def capacity_by_pipeline_rank(memory_bytes: FloatArray, stage: IntArray) -> tuple[Bytes, ...]:
    """Memory of the smallest GPU of each pipeline rank. memory_bytes: [ranks]; stage: [ranks] their pipeline rank."""
    return tuple(float(memory_bytes[stage == rank].min()) for rank in range(int(stage.max()) + 1))


def max_utilization(peaks: Sequence[Bytes], capacities: Sequence[Bytes]) -> tuple[Bytes, Bytes]:
    """Peak and capacity of the pipeline rank with the highest memory utilization."""
    return max(zip(peaks, capacities, strict=True), key=lambda pair: pair[0] / pair[1])
