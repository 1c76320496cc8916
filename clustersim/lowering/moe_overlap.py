"""How is a pass cut where its tokens travel to experts and back, if it runs beside another pass?

A pair is a forward beside a backward of another microbatch. Each is cut into legs: what it computes, then what it
sends. Those of a mixture's layer are, forward, attention with the router, the dispatch, experts, and the combine;
backward they are the same the other way round. The passes take turns, the backward first, so one computes while the
other's tokens travel:

    communication   combine'   dispatch    dispatch'   combine
    computation     attention  experts'    experts     attention'      (' backward)

This is the order of DeepSeek-V3's report (arXiv:2412.19437, figure 4; it runs a dispatch's backward behind the other's
dispatch, too) and of Megatron-LM, layer by layer (`TransformerLayerSchedulePlan.run`,
megatron/core/models/common/model_chunk_schedule_plan.py). Where a layer has no experts, its work joins the next leg's;
where one pass has more legs, its last ones run alone.

Gradients of weights may be put off (`delay_wgrad_compute`): nothing waits for those of experts but the optimizer, so
tokens leave before they are computed, and so for those of attention, behind what the next layer's backward sends first;
the last ones are beside the message to the stage before. In a pass whose gradients are reduced at once nothing is put
off, so that buckets fill as backward goes.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from clustersim.lowering.units import Unit
from clustersim.model.operators import EXPERTS
from clustersim.program.task import CommOp, Operation


@dataclass(frozen=True, slots=True)
class Leg:
    """What a pass computes, then sends, and what it computes beside that without waiting for it."""

    computes: tuple[Operation, ...]
    sends: tuple[CommOp, ...]
    late: tuple[Operation, ...]


def legs(operations: Sequence[Operation]) -> Iterator[Leg]:
    """Cut operations behind everything that travels."""
    begin = 0
    while begin < len(operations):
        sends = _while(operations, begin, lambda each: each.moe_comm is None and not each.deferred_wgrad)
        late = _while(operations, sends, lambda each: each.moe_comm is not None)
        end = _while(operations, late, lambda each: each.deferred_wgrad)
        travels = (operation.moe_comm for operation in operations[sends:late])
        sent = tuple(travel for travel in travels if travel is not None)
        yield Leg(tuple(operations[begin:sends]), sent, tuple(operations[late:end]))
        begin = end


def put_off(units: Sequence[Unit]) -> tuple[Operation, ...]:
    """A backward through units, given in model order, whose weights' gradients are behind what is sent next."""
    operations: list[Operation] = []
    waiting: list[Operation] = []
    for unit in reversed(units):
        experts, others = _weights(unit)
        inputs = unit.inputs
        last = max((place for place, item in enumerate(inputs) if item.moe_comm is not None), default=-1)
        for place, operation in enumerate(inputs):
            operations.append(operation)
            if operation.moe_comm is None or (place + 1 < len(inputs) and inputs[place + 1].moe_comm is not None):
                continue
            operations += waiting + (experts if place == last else [])
            waiting = []
        waiting += others if last >= 0 else [*experts, *others]
    return (*operations, *waiting)


def _weights(unit: Unit) -> tuple[list[Operation], list[Operation]]:
    """A unit's gradients of weights as what is put off: those of experts, and the others."""
    kinds: tuple[list[Operation], list[Operation]] = [], []
    begin = 0
    for place, operation in enumerate(unit.weights):
        if operation.gradient_count or place + 1 == len(unit.weights):
            part = (replace(weight, deferred_wgrad=True) for weight in unit.weights[begin : place + 1])
            kinds[operation.parameter_group != EXPERTS].extend(part)
            begin = place + 1
    return kinds


def _while(operations: Sequence[Operation], begin: int, goes_on: Callable[[Operation], bool]) -> int:
    """The first place from `begin` on whose operation is another."""
    return next((at for at in range(begin, len(operations)) if not goes_on(operations[at])), len(operations))
