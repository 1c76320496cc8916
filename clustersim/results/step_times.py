"""Durations of consecutive steps.

A step ends when the last rank has run the last of its tasks; its time is measured from the end of the
previous one. Ranks do not synchronize between steps, so one step may begin on some ranks before another has
ended on all.
"""

import numpy as np

from clustersim.common.arrays import FloatArray
from clustersim.common.units import Seconds
from clustersim.results.trace_table import TraceTable, event_ranges


def step_times(table: TraceTable, start: Seconds = 0.0) -> FloatArray:
    """Seconds of each step: [steps], summing to the makespan. start: when the first one begins."""
    ends = np.full(table.step_count, start)
    for events in event_ranges(table.trace):
        np.maximum.at(ends, table.tasks.step[table.entries_of(events)], table.trace.end[events])
    times: FloatArray = np.diff(np.maximum.accumulate(ends), prepend=start)
    return times
