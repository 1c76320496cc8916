"""How long does a step take at least?

A rank computes one thing at a time, so a step takes no less than all kernels of its busiest pipeline rank, each as
long as it takes alone on the fastest of the job's accelerators; whatever is communicated, waited for or slowed comes on
top. Before a rank begins, one microbatch has passed all stages before its first one; where backward is whole, its last
one goes back through these behind it. With p equal stages of 1F1B that take f and b for a microbatch, of which there
are m: (p - 1)(f + b) + m (f + b), which is 1F1B's own time.

No bound is known where kernels vary (jitter); of several steps in a row only what a rank computes counts, as they
overlap.
"""

from clustersim.assembly import kernel_costs_of, plan_of
from clustersim.lowering.units import Unit, Units
from clustersim.parallel.pipeline import Stage
from clustersim.program.action import ActionKind
from clustersim.scenario import Scenario
from clustersim.schedules.breadth_first import BreadthFirst
from clustersim.schedules.gpipe import GPipe
from clustersim.schedules.interleaved import Interleaved
from clustersim.schedules.one_f_one_b import OneFOneB
from clustersim.units import Seconds

_WHOLE = (OneFOneB, GPipe, Interleaved, BreadthFirst)


def lower_bound(scenario: Scenario) -> Seconds:
    """Seconds that no simulation of the scenario's step undercuts."""
    if scenario.jitter is not None:
        return 0.0
    plan = plan_of(scenario)
    passes = _Passes(Units(plan), scenario)
    stages = [(passes.forward(stage), passes.backward(stage)) for stage in plan.stages]
    drains = isinstance(scenario.run_schedule, _WHOLE)
    found = []
    for rank in range(plan.layout.pp):
        own = plan.placement.stages_of(rank)
        computes = plan.microbatches * sum(sum(stages[stage]) for stage in own)
        before = stages[: min(own)] if scenario.steps == 1 else []
        there = sum(forward for forward, _ in before)
        back = sum(backward for _, backward in before) if drains else 0.0
        found.append(there + computes + back)
    return max(found) * (1.0 - _ROUNDING)


_ROUNDING = 1e-9  # sums are not added up in the order of the simulation


class _Passes:
    """What the kernels of a pass take; equal units are added up once."""

    def __init__(self, units: Units, scenario: Scenario) -> None:
        self._units, self._kernels = units, kernel_costs_of(scenario)
        self._known: dict[tuple[int, ActionKind], Seconds] = {}

    def forward(self, stage: Stage) -> Seconds:
        """Of a microbatch."""
        return self._of(stage, ActionKind.FORWARD)

    def backward(self, stage: Stage) -> Seconds:
        """Of a microbatch, whole or in halves, whichever is shorter."""
        halves = self._of(stage, ActionKind.INPUT_GRADIENT) + self._of(stage, ActionKind.WEIGHT_GRADIENT)
        return min(self._of(stage, ActionKind.BACKWARD), halves)

    def _of(self, stage: Stage, kind: ActionKind) -> Seconds:
        return sum(self._unit(unit, kind) for unit in self._units.of(stage))

    def _unit(self, unit: Unit, kind: ActionKind) -> Seconds:
        found = self._known.get((id(unit), kind))
        if found is None:
            kernels = (each.kernel for each in unit.operations(kind) if each.kernel is not None)
            found = sum(min(each.kernel(kernel).seconds for each in self._kernels) for kernel in kernels)
            self._known[id(unit), kind] = found
        return found
