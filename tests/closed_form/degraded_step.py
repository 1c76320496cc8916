"""Training steps of a tiny model at durations set by hand, on GPUs of which some are slow, with interference."""

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
from tests.closed_form.fixed_durations import Fixed, Step, _Cost
from tests.engine.small_programs import row_of
from tests.strategies import fold


@dataclass(frozen=True)
class Ran:
    """What was run, and its answers."""

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
        return step_times(self.rows)

    @property
    def rows(self) -> TraceTable:
        return build_trace_table(self.trace, self.program, self.steps)

    @property
    def breakdown(self) -> TimeBreakdown:
        return compute_breakdown(self.rows, self.cost.time_segment)

    @property
    def path(self) -> dict[str, float]:
        return nonzero(path_category_totals(self.rows, self.cost.time_segment))

    @property
    def path_ranks(self) -> set[int]:
        return set(self.trace.rank[find_critical_path(self.trace)].tolist())

    def of(self, rank: int) -> dict[str, float]:
        """The breakdown's parts of a rank that are not zero."""
        return nonzero(self.breakdown.rank_seconds(rank))

    def ended(self, rank: int, task: int) -> float:
        return float(self.trace.end[row_of(self.trace, rank, task)])


def nonzero(parts: dict[str, float]) -> dict[str, float]:
    return {name: seconds for name, seconds in parts.items() if abs(seconds) > 1e-12}


@dataclass(frozen=True)
class Disturbed:
    """speeds: of slow ranks, 1 for all others; steps: how many in a row."""

    step: Step
    fixed: Fixed
    speeds: Mapping[int, float] = field(default_factory=dict)
    interference: float | Interference = 0.0
    steps: int = 1
    jitter: Jitter | None = None

    @property
    def program(self) -> Program:
        return repeat_steps(self.step.program, self.steps)

    def cost(self, program: Program) -> SegmentCost:
        pieces = _Cost(self.fixed, program)
        speeds = np.ones(program.world_size)
        speeds[list(self.speeds)] = list(self.speeds.values())
        different, of = np.unique(speeds, return_inverse=True)
        slowing = self.interference
        table = slowing if isinstance(slowing, Interference) else Interference.uniform(slowing)
        machines = tuple(DeviceModel(ThrottledKernels(pieces, float(speed)), table) for speed in different)
        return SegmentCost(program, DeviceModels(machines, of.reshape(-1)), pieces)

    def run(self, *, folded: bool = True) -> Ran:
        program = self.program
        cost = self.cost(program)
        classes = fold(program, cost) if folded and self.jitter is None else singleton_classes(program)
        return Ran(simulate_program(program, classes, cost, jitter=self.jitter)[0], program, cost, classes, self.steps)

    @property
    def ran(self) -> Ran:
        """One rank of each class, having checked that the step takes as long if every rank is run."""
        folded, every = self.run(), self.run(folded=False)
        assert abs(folded.seconds - every.seconds) <= 1e-12 * every.seconds
        return folded
