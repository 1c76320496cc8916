"""What one rank of a trace did, whichever representative was simulated for it."""

import numpy as np

from clustersim.common.arrays import FloatArray
from clustersim.trace.trace import Trace


def timeline(trace: Trace, rank: int) -> FloatArray:
    """[tasks, 7]: stream, ready, start, end, waited, slowed and contended of every task of a rank, by task."""
    event_indices = np.flatnonzero(trace.rank == trace.representative[rank])
    event_indices = event_indices[np.argsort(trace.task[event_indices])]
    assert trace.task[event_indices].tolist() == list(range(len(event_indices))), "every task once"
    times = trace.ready, trace.start, trace.end, trace.waited, trace.slowed, trace.contended
    return np.stack([trace.stream[event_indices], *(column[event_indices] for column in times)], axis=1)


def assert_same_trace(left: Trace, right: Trace, *, relative: float = 0.0) -> None:
    """Assert that every rank did the same at the same times, up to this fraction of the makespan."""
    for rank in range(len(left.representative)):
        times, other_times = timeline(left, rank), timeline(right, rank)
        assert times.shape == other_times.shape
        assert times[:, 0].tolist() == other_times[:, 0].tolist()
        assert np.abs(times - other_times).max(initial=0.0) <= relative * right.makespan
