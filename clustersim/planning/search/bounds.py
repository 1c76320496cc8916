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

from collections.abc import Iterable
from dataclasses import dataclass
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
    through = [passes.forward(stage) for stage in plan.stages]
    back = [passes.backward(stage) if whole else passes.going_back(stage) for stage in plan.stages]
    work = [forward + passes.backward(stage) for forward, stage in zip(through, plan.stages, strict=True)]
    found = []
    for rank in range(plan.layout.pp):
        own = plan.placement.stages_of(rank)
        around = _sum(through[: min(own)]) + (_sum(back[: min(own)]) if whole else NOTHING)
        found.append(many * _sum(work[stage] for stage in own) + (around if alone else NOTHING))
    if alone:
        stages = range(len(plan.stages))
        found += [_sum(through[:s]) + many * (through[s] + back[s]) + _sum(back[:s]) for s in stages]
    seconds = max(each.seconds for each in found)
    kernels = many * _sum(work) * (1.0 / plan.layout.pp)
    return Least(seconds * _LESS, kernels.products * _LESS, kernels.streaming * _LESS)


@dataclass(frozen=True, slots=True)
class _Time:
    """Seconds of passes: of products, of other kernels, of collectives between them."""

    products: Seconds = 0.0
    streaming: Seconds = 0.0
    waiting: Seconds = 0.0

    @property
    def seconds(self) -> Seconds:
        return self.products + self.streaming + self.waiting

    def __add__(self, other: "_Time") -> "_Time":
        return _Time(self.products + other.products, self.streaming + other.streaming, self.waiting + other.waiting)

    def __mul__(self, times: float) -> "_Time":
        return _Time(self.products * times, self.streaming * times, self.waiting * times)

    __rmul__ = __mul__


NOTHING: Final = _Time()


def _sum(times: Iterable[_Time]) -> _Time:
    return sum(times, NOTHING)


class _Passes:
    """What passes of a microbatch take at least; equal units are added up once."""

    def __init__(self, plan: Plan, scenario: Scenario) -> None:
        layout, training = scenario.layout, scenario.training
        beside = layout.overlap_expert_communication or layout.delay_wgrad or training.expert_load is not None
        self._units, self._kernels = Units(plan), kernel_costs_of(scenario)
        self._exchanges = None if beside or layout.tp == 1 else tensor_exchanges_of(scenario)
        self._known: dict[tuple[int, ActionKind], _Time] = {}

    def forward(self, stage: Stage) -> _Time:
        """Of a microbatch."""
        return self._of(stage, ActionKind.FORWARD)

    def backward(self, stage: Stage) -> _Time:
        """Of a microbatch, whole or in halves, whichever is shorter."""
        halves = self._of(stage, ActionKind.INPUT_GRADIENT) + self._of(stage, ActionKind.WEIGHT_GRADIENT)
        return min(self._of(stage, ActionKind.BACKWARD), halves, key=_seconds)

    def going_back(self, stage: Stage) -> _Time:
        """Of a microbatch, until the stage before can go on."""
        return min(self._of(stage, ActionKind.BACKWARD), self._of(stage, ActionKind.INPUT_GRADIENT), key=_seconds)

    def _of(self, stage: Stage, kind: ActionKind) -> _Time:
        return _sum(self._unit(unit, kind) for unit in self._units.of(stage))

    def _unit(self, unit: Unit, kind: ActionKind) -> _Time:
        found = self._known.get((id(unit), kind))
        if found is None:
            found = self._known[id(unit), kind] = _sum(map(self._operation, unit.operations(kind)))
        return found

    def _operation(self, operation: Operation) -> _Time:
        if (kernel := operation.kernel) is not None:
            seconds = min(each.kernel(kernel).seconds for each in self._kernels)
            return _Time(products=seconds) if kernel.kind in PRODUCTS else _Time(streaming=seconds)
        match operation.does:
            case Exchange(group=TENSOR.name) as exchange if self._exchanges is not None:
                return _Time(waiting=float(self._exchanges.exchange(exchange).seconds.min()))
        return NOTHING


def _seconds(time: _Time) -> Seconds:
    return time.seconds
