"""How long does a step take at least?

A rank computes one thing at a time, and waits for collectives of tensor parallelism and for tokens on their way to
experts, where they stand between its kernels. So a pass of a microbatch through a stage takes no less than f (forward)
and b (backward): its kernels, each as long as it takes alone on the fastest of the job's accelerators, and these
collectives, alone on their links. What else is communicated, waited for or slowed comes on top. Of m microbatches

- a pipeline rank does all passes of its stages, after one microbatch has passed all stages before its first one, and
  before the last one goes back through these: with p equal stages of 1F1B (p - 1)(f + b) + m (f + b), its own time;
- a stage does its own, after one has passed all stages before it, and before the last one goes back through these: of
  few microbatches in many stages this is more.

Backward in halves goes back by its input gradients alone, and a rank may do weight gradients meanwhile. Collectives are
not counted where another microbatch's computation may run beside them, or members get unlike parts. No bound is known
where kernels vary (jitter); of several steps in a row only what a rank computes counts, as they overlap.
"""

from dataclasses import dataclass
from typing import Final

import numpy as np

from clustersim.arrays import FloatArray
from clustersim.assembly import exchanges_within, kernel_costs_of, plan_of
from clustersim.lowering.units import Unit, Units
from clustersim.parallel.mesh import EXPERT_PARTS, EXPERT_ROLE, EXPERT_TENSOR_ROLE, TENSOR_ROLE
from clustersim.parallel.plan import Plan
from clustersim.program.action import ActionKind
from clustersim.program.task import Exchange, Operation
from clustersim.scenario import Scenario
from clustersim.schedules.breadth_first import BreadthFirst
from clustersim.schedules.gpipe import GPipe
from clustersim.schedules.interleaved import Interleaved
from clustersim.schedules.one_f_one_b import OneFOneB
from clustersim.units import Seconds
from clustersim.workload.kernels import PRODUCTS

_WHOLE: Final = (OneFOneB, GPipe, Interleaved, BreadthFirst)  # backward is not in halves
_LESS: Final = 1.0 - 1e-9  # sums are not added up in the order of the simulation


@dataclass(frozen=True, slots=True)
class Least:
    """Seconds of a step at least, and in which GPUs run products and other kernels at least, the mean over them."""

    seconds: Seconds
    products: Seconds = 0.0
    streaming: Seconds = 0.0


def lower_bound(scenario: Scenario) -> Least:
    """What no simulation of the scenario's step undercuts."""
    if scenario.jitter is not None:
        return Least(0.0)
    plan = plan_of(scenario)
    passes, many = _Passes(plan, scenario), plan.microbatches
    whole, alone = isinstance(scenario.run_schedule, _WHOLE), scenario.steps == 1
    through, backward = passes.forward(), passes.backward()  # [stages, uses] seconds of a microbatch
    there, work = through.sum(axis=1), (through + backward).sum(axis=1)  # [stages]
    back = backward.sum(axis=1) if whole else passes.going_back()
    before, behind = _before(there), _before(back)  # [stages] in all stages before each
    found = []
    for rank in range(plan.layout.pp):
        own = list(plan.placement.stages_of(rank))
        around = before[min(own)] + (behind[min(own)] if whole else 0.0)
        found.append(many * work[own].sum() + (around if alone else 0.0))
    if alone:
        found += (before + many * (there + back) + behind).tolist()
    kernels = many * (through + backward).sum(axis=0) / plan.layout.pp
    return Least(*(float(each) * _LESS for each in (max(found), kernels[_PRODUCTS], kernels[_STREAMING])))


def _before(times: FloatArray) -> FloatArray:
    """Sums of what stands before each."""
    sums: FloatArray = np.cumsum(times) - times
    return sums


_OF_EXPERTS: Final = tuple(role.name for role in (EXPERT_ROLE, EXPERT_TENSOR_ROLE, EXPERT_PARTS))
_GOING_BACK: Final = (ActionKind.BACKWARD, ActionKind.INPUT_GRADIENT)
_PRODUCTS, _STREAMING, _BETWEEN = range(3)
"""What a pass takes: products, other kernels, collectives between them."""


class _Passes:
    """What passes of a microbatch take at least, by stage and use; equal units are added up once."""

    def __init__(self, plan: Plan, scenario: Scenario) -> None:
        layout, training = scenario.layout, scenario.training
        beside = layout.overlap_expert_communication or layout.overlap_shared_experts
        uneven = layout.delay_wgrad or training.expert_load is not None
        self._roles = () if uneven else (TENSOR_ROLE.name, *(() if beside else _OF_EXPERTS))
        units = Units(plan)
        self._stages = [units.of(stage) for stage in plan.stages]
        self._kernels = kernel_costs_of(scenario)
        self._exchanges = exchanges_within(scenario, self._roles)
        self._known: dict[tuple[int, ActionKind], FloatArray] = {}

    def forward(self) -> FloatArray:
        """[stages, uses] seconds."""
        return self._of(ActionKind.FORWARD)

    def backward(self) -> FloatArray:
        """[stages, uses] seconds, whole or in halves, whichever is shorter."""
        whole = self._of(ActionKind.BACKWARD)
        halves = self._of(ActionKind.INPUT_GRADIENT) + self._of(ActionKind.WEIGHT_GRADIENT)
        return np.where((whole.sum(axis=1) <= halves.sum(axis=1))[:, None], whole, halves)

    def going_back(self) -> FloatArray:
        """[stages] seconds until the stage before can go on."""
        times: FloatArray = np.minimum(*(self._of(kind).sum(axis=1) for kind in _GOING_BACK))
        return times

    def _of(self, kind: ActionKind) -> FloatArray:
        sums = [np.sum([self._unit(unit, kind) for unit in units], axis=0) for units in self._stages]
        return np.array(sums).reshape(len(self._stages), 3)

    def _unit(self, unit: Unit, kind: ActionKind) -> FloatArray:
        found = self._known.get((id(unit), kind))
        if found is None:
            found = self._known[id(unit), kind] = np.zeros(3)
            for operation in unit.operations(kind):
                self._add(found, operation)
        return found

    def _add(self, times: FloatArray, operation: Operation) -> None:
        if (kernel := operation.kernel) is not None:
            use = _PRODUCTS if kernel.kind in PRODUCTS else _STREAMING
            times[use] += min(each.kernel(kernel).seconds for each in self._kernels)
            return
        match operation.does:
            case Exchange(group=role) as exchange if role in self._roles:
                times[_BETWEEN] += self._exchanges.exchange(exchange).seconds.min()
