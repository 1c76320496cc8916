"""What one rank of a trace did, whoever was simulated for it."""

import numpy as np

from clustersim.common.arrays import FloatArray
from clustersim.trace.trace import Trace


def timeline(trace: Trace, rank: int) -> FloatArray:
    """[tasks, 8]: stream, queued, ready, start, end, waited, slowed and contended of every task of a rank, by task."""
    rows = np.flatnonzero(trace.rank == trace.representative[rank])
    rows = rows[np.argsort(trace.task[rows])]
    assert trace.task[rows].tolist() == list(range(len(rows))), "every task once"
    times = trace.queued, trace.ready, trace.start, trace.end, trace.waited, trace.slowed, trace.contended
    return np.stack([trace.stream[rows], *(column[rows] for column in times)], axis=1)


def same(left: Trace, right: Trace, *, relative: float = 0.0) -> None:
    """Assert that every rank did the same at the same times, up to so much of the makespan."""
    for rank in range(len(left.representative)):
        mine, other = timeline(left, rank), timeline(right, rank)
        assert mine.shape == other.shape
        assert mine[:, 0].tolist() == other[:, 0].tolist()
        assert np.abs(mine - other).max(initial=0.0) <= relative * right.makespan
