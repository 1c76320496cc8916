"""Training steps of a tiny model with fixed durations, on GPUs of which some are slow, with interference."""

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from clustersim.common.arrays import FloatArray
from clustersim.cost.device_models import DeviceModel, DeviceModels, ThrottledKernels
from clustersim.cost.interference import Interference
from clustersim.cost.jitter import Jitter
from clustersim.cost.segment import SegmentCost
from clustersim.engine.engine import simulate_program
from clustersim.lowering.repeat_steps import repeat_steps
from clustersim.program.program import Program
from clustersim.results.critical_path import find_critical_path, path_category_totals
from clustersim.results.step_times import step_times
from clustersim.results.time_breakdown import TimeBreakdown, compute_breakdown
from clustersim.results.trace_table import TraceTable, build_trace_table
from clustersim.symmetry.refinement import SymmetryClasses, singleton_classes
from clustersim.trace.trace import Trace
from tests.closed_form.fixed_durations import FixedCost, FixedDurations, Step
from tests.engine.small_programs import event_index
from tests.strategies import fold_ranks


@dataclass(frozen=True)
class StepRun:
    """A simulated step with its trace, program and cost."""

    trace: Trace
    program: Program
    cost: SegmentCost
    classes: SymmetryClasses
    steps: int

    @property
    def seconds(self) -> float:
        return self.trace.makespan

    @property
    def times(self) -> FloatArray:
        return step_times(self.trace_table)

    @property
    def trace_table(self) -> TraceTable:
        return build_trace_table(self.trace, self.program, self.steps)

    @property
    def breakdown(self) -> TimeBreakdown:
        return compute_breakdown(self.trace_table, self.cost.time_segment)

    @property
    def path(self) -> dict[str, float]:
        return drop_zeros(path_category_totals(self.trace_table, self.cost.time_segment))

    @property
    def path_ranks(self) -> set[int]:
        return set(self.trace.rank[find_critical_path(self.trace)].tolist())

    def nonzero_categories(self, rank: int) -> dict[str, float]:
        """The nonzero categories of the time breakdown of a rank."""
        return drop_zeros(self.breakdown.rank_seconds(rank))

    def task_end(self, rank: int, task: int) -> float:
        return float(self.trace.end[event_index(self.trace, rank, task)])


def drop_zeros(categories: dict[str, float]) -> dict[str, float]:
    return {name: seconds for name, seconds in categories.items() if abs(seconds) > 1e-12}


@dataclass(frozen=True)
class DegradedStep:
    """A training step under fault injection.

    speeds: relative speed of the slow ranks (1 for all others); steps: number of consecutive steps.
    """

    step: Step
    durations: FixedDurations
    speeds: Mapping[int, float] = field(default_factory=dict)
    interference: float | Interference = 0.0
    steps: int = 1
    jitter: Jitter | None = None

    @property
    def program(self) -> Program:
        return repeat_steps(self.step.program, self.steps)

    def cost(self, program: Program) -> SegmentCost:
        fixed_cost = FixedCost(self.durations, program)
        speeds = np.ones(program.world_size)
        speeds[list(self.speeds)] = list(self.speeds.values())
        distinct_speeds, device_index = np.unique(speeds, return_inverse=True)
        interference = self.interference
        table = interference if isinstance(interference, Interference) else Interference.uniform(interference)
        machines = tuple(DeviceModel(ThrottledKernels(fixed_cost, float(speed)), table) for speed in distinct_speeds)
        return SegmentCost(program, DeviceModels(machines, device_index.reshape(-1)), fixed_cost)

    def run(self, *, folded: bool = True) -> StepRun:
        program = self.program
        cost = self.cost(program)
        classes = fold_ranks(program, cost) if folded and self.jitter is None else singleton_classes(program)
        return StepRun(
            simulate_program(program, classes, cost, jitter=self.jitter)[0], program, cost, classes, self.steps
        )

    @property
    def checked_run(self) -> StepRun:
        """The folded run, after checking that the unfolded run takes as long."""
        folded, unfolded_run = self.run(), self.run(folded=False)
        assert abs(folded.seconds - unfolded_run.seconds) <= 1e-12 * unfolded_run.seconds
        return folded
