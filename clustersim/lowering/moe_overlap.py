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
class OverlapPhase:
    """What a pass computes, then sends, and what it computes beside that without waiting for it."""

    compute: tuple[Operation, ...]
    comm_ops: tuple[CommOp, ...]
    deferred_wgrad: tuple[Operation, ...]


def split_overlap_phases(operations: Sequence[Operation]) -> Iterator[OverlapPhase]:
    """Cut operations behind everything that travels."""
    begin = 0
    while begin < len(operations):
        comm_begin = _first_not(operations, begin, lambda each: each.moe_comm is None and not each.deferred_wgrad)
        deferred_begin = _first_not(operations, comm_begin, lambda each: each.moe_comm is not None)
        end = _first_not(operations, deferred_begin, lambda each: each.deferred_wgrad)
        moe_comms = (operation.moe_comm for operation in operations[comm_begin:deferred_begin])
        comm_ops = tuple(moe_comm for moe_comm in moe_comms if moe_comm is not None)
        yield OverlapPhase(tuple(operations[begin:comm_begin]), comm_ops, tuple(operations[deferred_begin:end]))
        begin = end


def defer_weight_gradients(units: Sequence[Unit]) -> tuple[Operation, ...]:
    """A backward through units, given in model order, whose weights' gradients are behind what is sent next."""
    operations: list[Operation] = []
    pending: list[Operation] = []
    for unit in reversed(units):
        experts, dense = _deferred_weight_gradients(unit)
        inputs = unit.input_gradients
        last_comm = max((index for index, item in enumerate(inputs) if item.moe_comm is not None), default=-1)
        for index, operation in enumerate(inputs):
            operations.append(operation)
            if operation.moe_comm is None or (index + 1 < len(inputs) and inputs[index + 1].moe_comm is not None):
                continue
            operations += pending + (experts if index == last_comm else [])
            pending = []
        pending += dense if last_comm >= 0 else [*experts, *dense]
    return (*operations, *pending)


def _deferred_weight_gradients(unit: Unit) -> tuple[list[Operation], list[Operation]]:
    """A unit's gradients of weights as what is put off: those of experts, and the others."""
    by_kind: tuple[list[Operation], list[Operation]] = [], []
    begin = 0
    for index, operation in enumerate(unit.weight_gradients):
        if operation.gradient_count or index + 1 == len(unit.weight_gradients):
            deferred = (
                replace(weight_gradient, deferred_wgrad=True)
                for weight_gradient in unit.weight_gradients[begin : index + 1]
            )
            by_kind[operation.parameter_group != EXPERTS].extend(deferred)
            begin = index + 1
    return by_kind


def _first_not(operations: Sequence[Operation], begin: int, predicate: Callable[[Operation], bool]) -> int:
    """The first place from `begin` on whose operation is another."""
    return next((index for index in range(begin, len(operations)) if not predicate(operations[index])), len(operations))
