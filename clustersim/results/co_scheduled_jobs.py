"""Co-scheduled jobs: how do other jobs on the same machine fare?

Their steps run back to back; those count that end while the main job runs. If none does, the first one is
reported, which had the links to itself towards its end.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from clustersim.common.arrays import FloatArray
from clustersim.common.pickling import FieldPickling
from clustersim.common.units import Seconds
from clustersim.program.program import Program
from clustersim.program.task import ComputeTask
from clustersim.results.link_volumes import VolumeModel
from clustersim.results.step_times import step_times
from clustersim.results.trace_table import TraceTable
from clustersim.trace.trace import OperationSpans, Trace

if TYPE_CHECKING:
    from clustersim.results.link_loads import TrafficSource

TIME_TOLERANCE: Final = 1e-9
"""Relative difference up to which two times count as equal."""


@dataclass(frozen=True, eq=False)
class CoScheduledJobResult(FieldPickling):
    """Another job on the machine.

    start: seconds at which it began; main_job_end: when the main job was done, on the same clock; trace_table,
    operation_spans, volumes: of that job; isolated_step_times: [steps] seconds of its steps without other jobs.
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
        """Number of its GPUs."""
        return self.trace_table.program.world_size

    @cached_property
    def _all_step_times(self) -> FloatArray:
        return step_times(self.trace_table, self.start)

    @property
    def ended_steps(self) -> int:
        """Number of its steps that ended before the main job."""
        return int(
            np.count_nonzero(self.start + np.cumsum(self._all_step_times) <= self.main_job_end * (1.0 + TIME_TOLERANCE))
        )

    @property
    def step_times(self) -> FloatArray:
        """Seconds of those steps; of the first one, if none ended."""
        return self._all_step_times[: max(self.ended_steps, 1)]

    @property
    def slowdown(self) -> float:
        """Relative increase of its step times over the isolated run."""
        return float(self.step_times.sum() / self.isolated_step_times.sum()) - 1.0

    @property
    def traffic_source(self) -> "TrafficSource":
        """Its traffic on the links."""
        from clustersim.results.link_loads import TrafficSource

        return TrafficSource(self.trace_table, self.volumes, self.operation_spans)

    def to_json(self) -> dict[str, Any]:
        """The job as plain data."""
        return {
            "name": self.name,
            "ranks": self.rank_count,
            "start_s": self.start,
            "steps_ended": self.ended_steps,
            "step_times_s": self.step_times.tolist(),
            "step_times_isolated_s": self.isolated_step_times.tolist(),
        }


def last_full_load_time(trace: Trace, program: Program) -> Seconds:
    """Time at which the first rank of a job runs out of compute tasks."""
    is_compute = [
        np.array([isinstance(task, ComputeTask) for task in rank_program.tasks]) for rank_program in program.programs
    ]
    ends: list[float] = []
    for rank in trace.simulated_ranks.tolist():
        rows = trace.rank_events(rank)
        compute_events = rows[is_compute[int(program.program_index[rank])][trace.task[rows]]]
        ends.append(float(trace.end[compute_events].max()))
    return min(ends)
