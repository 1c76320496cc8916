"""Algorithm bandwidth of a rank's communication streams.

Link loads are not recorded by a simulation; what is reported here is the payload of a rank's own messages
and of the collectives on its communication streams over their duration, as if data moved uniformly. A
collective's payload is the full buffer, as nccl-tests count it, so this is algorithm bandwidth;
communication inside segments is not included.
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
    """Events of nonzero duration of a simulated rank on some streams, and bytes per second of each."""
    tasks = program.programs[int(program.program_index[rank])].tasks
    payload_by_task = np.array([0.0 if isinstance(task, ComputeTask) else task.comm_op.payload for task in tasks])
    events = np.flatnonzero((trace.rank == rank) & np.isin(trace.stream, streams) & (trace.end > trace.start))
    return events, payload_by_task[trace.task[events]] / (trace.end[events] - trace.start[events])
