"""How does another job fare on the machine, beside the one that is asked about?

Its steps follow each other; those count that end while the job that is asked about runs. Where none does, its first one
stands for them, which then had the links for itself at its end.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Final

import numpy as np

from clustersim.common.arrays import FloatArray
from clustersim.common.pickling import FieldPickling
from clustersim.common.units import Seconds
from clustersim.program.program import Program
from clustersim.program.task import ComputeTask
from clustersim.results.link_loads import TrafficSource
from clustersim.results.link_volumes import VolumeModel
from clustersim.results.step_times import step_times
from clustersim.results.trace_table import TraceTable
from clustersim.trace.trace import OperationSpans, Trace

TIME_TOLERANCE: Final = 1e-9
"""Part of a time by which two may differ that are equal but for rounding."""


@dataclass(frozen=True, eq=False)
class CoLocatedJob(FieldPickling):
    """Another job. start: when it began; until: when the job that is asked about was done, on the same clock.

    rows, operations, volumes: as of that job; alone: [steps] seconds of its steps with nobody beside it.
    """

    name: str
    start: Seconds
    main_job_end: Seconds
    trace_table: TraceTable
    operation_spans: Callable[[int], OperationSpans]
    volumes: VolumeModel
    isolated_step_times: FloatArray

    @property
    def rank_count(self) -> int:
        """How many GPUs it has."""
        return self.trace_table.program.world_size

    @cached_property
    def _all_step_times(self) -> FloatArray:
        return step_times(self.trace_table, self.start)

    @property
    def ended_steps(self) -> int:
        """How many of its steps ended in time."""
        return int(
            np.count_nonzero(self.start + np.cumsum(self._all_step_times) <= self.main_job_end * (1.0 + TIME_TOLERANCE))
        )

    @property
    def step_times(self) -> FloatArray:
        """Seconds of those steps; of the first one, where none did."""
        return self._all_step_times[: max(self.ended_steps, 1)]

    @property
    def slowdown(self) -> float:
        """By which part its steps take longer than alone."""
        return float(self.step_times.sum() / self.isolated_step_times.sum()) - 1.0

    @property
    def traffic_source(self) -> TrafficSource:
        """What it sends."""
        return TrafficSource(self.trace_table, self.volumes, self.operation_spans)

    def to_json(self) -> dict[str, Any]:
        """As plain data."""
        return {
            "name": self.name,
            "ranks": self.rank_count,
            "start_s": self.start,
            "steps_ended": self.ended_steps,
            "step_times_s": self.step_times.tolist(),
            "step_times_alone_s": self.isolated_step_times.tolist(),
        }


def last_full_load_time(trace: Trace, program: Program) -> Seconds:
    """Until when no rank of a job has wanted for a further step: until the first is done with all that it computes."""
    is_compute = [
        np.array([isinstance(task, ComputeTask) for task in rank_program.tasks]) for rank_program in program.programs
    ]
    ends: list[float] = []
    for rank in trace.simulated_ranks.tolist():
        rows = trace.rank_events(rank)
        compute_events = rows[is_compute[int(program.program_index[rank])][trace.task[rows]]]
        ends.append(float(trace.end[compute_events].max()))
    return min(ends)
