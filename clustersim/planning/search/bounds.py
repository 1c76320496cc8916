"""How long does a step take at least?

A rank computes one thing at a time, and waits for tensor-parallel collectives that stand between its kernels. So a pass
of a microbatch through a stage takes no less than f (forward) and b (backward): its kernels, each as long as it takes
alone on the fastest of the job's accelerators, and these collectives, alone on their links. What else is communicated,
waited for or slowed comes on top. Of m microbatches

- a pipeline rank does all passes of its stages, after one microbatch has passed all stages before its first one, and
  before the last one goes back through these: with p equal stages of 1F1B (p - 1)(f + b) + m (f + b), its own time;
- a stage does its own, after one has passed all stages before it, and before the last one goes back through these: of
  few microbatches in many stages this is more.

Backward in halves goes back by its input gradients alone, and a rank may do weight gradients meanwhile. Collectives are
not counted where another microbatch's computation may run beside them, or members get unlike parts. No bound is known
where kernels vary (jitter); of several steps in a row only what a rank computes counts, as they overlap.
"""

from typing import Final

from clustersim.assembly import kernel_costs_of, plan_of, tensor_exchanges_of
from clustersim.lowering.units import Unit, Units
from clustersim.parallel.mesh import TENSOR
from clustersim.parallel.pipeline import Stage
from clustersim.parallel.plan import Plan
from clustersim.program.action import ActionKind
from clustersim.program.task import Exchange, Operation
from clustersim.scenario import Scenario
from clustersim.schedules.breadth_first import BreadthFirst
from clustersim.schedules.gpipe import GPipe
from clustersim.schedules.interleaved import Interleaved
from clustersim.schedules.one_f_one_b import OneFOneB
from clustersim.units import Seconds

_WHOLE: Final = (OneFOneB, GPipe, Interleaved, BreadthFirst)  # backward is not in halves
_ROUNDING: Final = 1e-9  # sums are not added up in the order of the simulation


def lower_bound(scenario: Scenario) -> Seconds:
    """Seconds that no simulation of the scenario's step undercuts."""
    if scenario.jitter is not None:
        return 0.0
    plan = plan_of(scenario)
    passes, many = _Passes(plan, scenario), plan.microbatches
    whole, alone = isinstance(scenario.run_schedule, _WHOLE), scenario.steps == 1
    through = [passes.forward(stage) for stage in plan.stages]
    back = [passes.backward(stage) if whole else passes.going_back(stage) for stage in plan.stages]
    work = [through[place] + passes.backward(stage) for place, stage in enumerate(plan.stages)]
    found = []
    for rank in range(plan.layout.pp):
        own = plan.placement.stages_of(rank)
        around = sum(through[: min(own)]) + (sum(back[: min(own)]) if whole else 0.0)
        found.append(many * sum(work[stage] for stage in own) + (around if alone else 0.0))
    if alone:
        stages = range(len(plan.stages))
        found += [sum(through[:s]) + many * (through[s] + back[s]) + sum(back[:s]) for s in stages]
    return max(found) * (1.0 - _ROUNDING)


class _Passes:
    """What passes of a microbatch take at least; equal units are added up once."""

    def __init__(self, plan: Plan, scenario: Scenario) -> None:
        layout, training = scenario.layout, scenario.training
        beside = layout.overlap_expert_communication or layout.delay_wgrad or training.expert_load is not None
        self._units, self._kernels = Units(plan), kernel_costs_of(scenario)
        self._exchanges = None if beside or layout.tp == 1 else tensor_exchanges_of(scenario)
        self._known: dict[tuple[int, ActionKind], Seconds] = {}

    def forward(self, stage: Stage) -> Seconds:
        """Of a microbatch."""
        return self._of(stage, ActionKind.FORWARD)

    def backward(self, stage: Stage) -> Seconds:
        """Of a microbatch, whole or in halves, whichever is shorter."""
        halves = self._of(stage, ActionKind.INPUT_GRADIENT) + self._of(stage, ActionKind.WEIGHT_GRADIENT)
        return min(self._of(stage, ActionKind.BACKWARD), halves)

    def going_back(self, stage: Stage) -> Seconds:
        """Of a microbatch, until the stage before can go on."""
        return min(self._of(stage, ActionKind.BACKWARD), self._of(stage, ActionKind.INPUT_GRADIENT))

    def _of(self, stage: Stage, kind: ActionKind) -> Seconds:
        return sum(self._unit(unit, kind) for unit in self._units.of(stage))

    def _unit(self, unit: Unit, kind: ActionKind) -> Seconds:
        found = self._known.get((id(unit), kind))
        if found is None:
            found = sum(map(self._operation, unit.operations(kind)))
            self._known[id(unit), kind] = found
        return found

    def _operation(self, operation: Operation) -> Seconds:
        if operation.kernel is not None:
            return min(each.kernel(operation.kernel).seconds for each in self._kernels)
        match operation.does:
            case Exchange(group=TENSOR.name) as exchange if self._exchanges is not None:
                return float(self._exchanges.exchange(exchange).seconds.min())
        return 0.0
