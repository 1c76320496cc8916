"""What does a simulation produce? The simulated training steps: what was run, when, and at what cost.

Fields hold only what the simulation itself produces. Everything else is derived from them on demand
(`step_metrics`), since a search over many scenarios reads only a few metrics of each.
"""

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from clustersim.build import resolved_library
from clustersim.common.arrays import FloatArray
from clustersim.common.pickling import FieldPickling
from clustersim.common.units import Seconds
from clustersim.cost.segment import SegmentCost
from clustersim.engine.recording.operation_trace import OperationTraceReader
from clustersim.memory.ledger import MemoryLedger
from clustersim.program.program import Program
from clustersim.program.task import ComputeTask
from clustersim.results.co_scheduled_jobs import CoScheduledJobResult
from clustersim.results.link_volumes import MeteredCollectiveCost
from clustersim.results.step_times import step_times
from clustersim.results.trace_table import TraceTable, build_trace_table
from clustersim.scenario import Scenario
from clustersim.trace.trace import OperationSpans, Trace


@dataclass(frozen=True, repr=False)
class SimulatedStep(FieldPickling):
    """Simulated training steps.

    operation_trace: reconstructs the spans of single operations inside compute segments; ledgers: memory timeline
    of each pipeline rank; wall_seconds: run time of the simulation itself; co_scheduled_jobs: the other jobs on the
    machine; isolated_step_time: seconds of a step without them, None if there are none; perturbed_step_times: seconds
    of a step in runs whose kernels are slower by a hair (`timing_sensitivity`), empty where that cannot matter;
    drawn_step_times: [draws] seconds of steps with other documents, this one first, empty if none were drawn.
    """

    scenario: Scenario
    program: Program
    trace: Trace
    cost: SegmentCost
    operation_trace: OperationTraceReader
    ledgers: tuple[MemoryLedger, ...]
    wall_seconds: Seconds
    co_scheduled_jobs: tuple[CoScheduledJobResult, ...] = ()
    isolated_step_time: Seconds | None = None
    perturbed_step_times: tuple[Seconds, ...] = ()
    drawn_step_times: tuple[Seconds, ...] = ()

    @property
    def step_time(self) -> Seconds:
        """Seconds from the start of a step until every rank is done; the mean if several steps are simulated."""
        return self.trace.makespan / self.scenario.steps

    @cached_property
    def step_times(self) -> FloatArray:
        """[steps] seconds of each step."""
        return step_times(self.trace_table)

    @cached_property
    def trace_table(self) -> TraceTable:
        """The trace joined with the program, for analysis."""
        return build_trace_table(self.trace, self.program, self.scenario.steps)

    @property
    def rank_count(self) -> int:
        """World size."""
        return self.program.world_size

    @property
    def simulated_rank_count(self) -> int:
        """Number of ranks simulated; each represents all ranks provably equivalent to it."""
        return len(self.trace.simulated_ranks)

    @property
    def operation_count(self) -> int:
        """Number of operations (kernels and collectives) on the simulated ranks, also inside compute segments."""
        operation_counts = [
            sum(len(task.segment.operations) if isinstance(task, ComputeTask) else 1 for task in program.tasks)
            for program in self.program.programs
        ]
        return int(np.array(operation_counts)[self.program.program_index[self.trace.simulated_ranks]].sum())

    @property
    def network_volumes(self) -> MeteredCollectiveCost:
        """Calculator of the bytes that each collective and p2p message puts on each link."""
        return MeteredCollectiveCost(self.scenario.cluster.fabric, resolved_library(self.scenario), self.program.groups)

    def operation_spans(self, rank: int, task_ids: frozenset[int] | None = None) -> OperationSpans:
        """Spans of the kernels and collectives inside the compute segments of a rank (or of some of its tasks).

        Reconstructed on demand.
        """
        return self.operation_trace.rank_spans(rank, task_ids)
