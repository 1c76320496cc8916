"""How long does each of several successive steps take?

A step ends when the last rank has run the last of its tasks; it takes as long as from the end of the one before. Ranks
do not wait for each other between steps, so one step may begin on some ranks before another has ended on all.
"""

import numpy as np

from clustersim.analysis.rows import Rows
from clustersim.arrays import FloatArray


def step_times(rows: Rows) -> FloatArray:
    """Seconds of each step: [steps], summing to the makespan."""
    ends = np.zeros(rows.steps)
    np.maximum.at(ends, rows.tasks.step[rows.entry], rows.trace.end)
    times: FloatArray = np.diff(np.maximum.accumulate(ends), prepend=0.0)
    return times
