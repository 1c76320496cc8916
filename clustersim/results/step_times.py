"""Durations of consecutive steps.

A step ends when the last rank has run the last of its tasks; its time is measured from the end of the
previous one. Ranks do not synchronize between steps, so one step may begin on some ranks before another has
ended on all.
"""

import numpy as np

from clustersim.common.arrays import FloatArray
from clustersim.common.units import Seconds
from clustersim.results.trace_table import TraceTable


def step_times(table: TraceTable, start: Seconds = 0.0) -> FloatArray:
    """Seconds of each step: [steps], summing to the makespan. start: when the first one begins."""
    ends = np.full(table.step_count, start)
    np.maximum.at(ends, table.tasks.step[table.entry], table.trace.end)
    times: FloatArray = np.diff(np.maximum.accumulate(ends), prepend=start)
    return times
