"""Overlap of MoE communication of one pass with computation of another: splits passes at dispatch and combine.

An `OverlappedPair` is a forward and a backward of different microbatches. Each is split into phases:
computation, then communication. Those of an MoE layer are, forward, attention with the router, the
dispatch, experts, and the combine; backward is the reverse. The passes alternate, the backward first, so
that one computes while the other's tokens are communicated:

    communication   combine'   dispatch    dispatch'   combine
    computation     attention  experts'    experts     attention'      (' backward)

This is the order of DeepSeek-V3's report (arXiv:2412.19437, figure 4; it also runs a dispatch's backward
after the other pass's dispatch) and of Megatron-LM, layer by layer (`TransformerLayerSchedulePlan.run`,
megatron/core/models/common/model_chunk_schedule_plan.py). The work of a dense layer joins the next phase;
if one pass has more phases, its last ones run without overlap.

Weight gradients may be deferred (`delay_wgrad_compute`): only the optimizer waits for those of experts, so
tokens are sent before they are computed; those of attention are computed after the next layer's backward
has sent its first tokens; the last ones overlap the message to the previous stage. In a pass whose
gradients are reduced at once nothing is deferred, so that buckets fill as backward proceeds.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from clustersim.lowering.units import Unit
from clustersim.model.operators import EXPERTS
from clustersim.program.task import CommOp, Operation


@dataclass(frozen=True, slots=True)
class OverlapPhase:
    """One phase of a pass: computation, then MoE communication, and deferred weight gradients computed during it."""

    compute: tuple[Operation, ...]
    comm_ops: tuple[CommOp, ...]
    deferred_wgrad: tuple[Operation, ...]


def split_overlap_phases(operations: Sequence[Operation]) -> Iterator[OverlapPhase]:
    """Split operations after every run of MoE communication."""
    begin = 0
    while begin < len(operations):
        comm_begin = _first_not(
            operations, begin, lambda operation: operation.moe_comm is None and not operation.deferred_wgrad
        )
        deferred_begin = _first_not(operations, comm_begin, lambda operation: operation.moe_comm is not None)
        end = _first_not(operations, deferred_begin, lambda operation: operation.deferred_wgrad)
        moe_comms = (operation.moe_comm for operation in operations[comm_begin:deferred_begin])
        comm_ops = tuple(moe_comm for moe_comm in moe_comms if moe_comm is not None)
        yield OverlapPhase(tuple(operations[begin:comm_begin]), comm_ops, tuple(operations[deferred_begin:end]))
        begin = end


def defer_weight_gradients(units: Sequence[Unit]) -> tuple[Operation, ...]:
    """Backward operations of units (in model order), weight gradients deferred to after the next communication."""
    operations: list[Operation] = []
    pending: list[Operation] = []
    for unit in reversed(units):
        experts, dense = _deferred_weight_gradients(unit)
        inputs = unit.input_gradients
        last_comm = max((index for index, operation in enumerate(inputs) if operation.moe_comm is not None), default=-1)
        for index, operation in enumerate(inputs):
            operations.append(operation)
            if operation.moe_comm is None or (index + 1 < len(inputs) and inputs[index + 1].moe_comm is not None):
                continue
            operations += pending + (experts if index == last_comm else [])
            pending = []
        pending += dense if last_comm >= 0 else [*experts, *dense]
    return (*operations, *pending)


def _deferred_weight_gradients(unit: Unit) -> tuple[list[Operation], list[Operation]]:
    """A unit's weight-gradient operations, marked as deferred: those of experts, and all others."""
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
    """First index from `begin` on whose operation does not satisfy the predicate."""
    return next((index for index in range(begin, len(operations)) if not predicate(operations[index])), len(operations))
