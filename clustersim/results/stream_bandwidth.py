"""How fast does a rank move data on its streams?

What links carry is not kept by a simulation; known is what a rank's own messages and the collectives beside its passes
ask of them: the payload of each over the time that it takes, as if it moved evenly. A collective's payload is the whole
buffer, as nccl-tests count it, so this is its algorithm bandwidth; what is exchanged inside passes is not in it.
"""

from collections.abc import Sequence

import numpy as np

from clustersim.common.arrays import FloatArray, IntArray
from clustersim.program.program import Program
from clustersim.program.task import ComputeTask, Stream
from clustersim.trace.trace import Trace


def algorithm_bandwidth(
    trace: Trace, program: Program, rank: int, streams: Sequence[Stream]
) -> tuple[IntArray, FloatArray]:
    """The rows of a simulated rank on some streams that take time, and bytes per second of each."""
    tasks = program.programs[int(program.program_index[rank])].tasks
    payload_by_task = np.array([0.0 if isinstance(task, ComputeTask) else task.comm_op.payload for task in tasks])
    events = np.flatnonzero((trace.rank == rank) & np.isin(trace.stream, streams) & (trace.end > trace.start))
    return events, payload_by_task[trace.task[events]] / (trace.end[events] - trace.start[events])
