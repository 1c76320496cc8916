"""How do the ranks of a tensor- and context-parallel group run one layer?

Tensor parallelism (Megatron-LM, Shoeybi et al. 2019): a sharded region starts with a column-parallel matmul
and ends with a row-parallel one. Forward all-reduces at the end, backward at the start. With sequence
parallelism (Korthikanti et al. 2022, section 4.2.2) the replicated regions hold a shard of the sequence:
forward all-gathers at the start and reduce-scatters at the end, backward the reverse, and gathers the saved
input once more for the weight gradient. Backward's collective of the input gradient overlaps the weight
gradient's matmul, which does not need it (Megatron-LM, `LinearWithGradAccumulationAndAsyncCommunication`),
unless `async_tensor_model_parallel_allreduce` is off. With `tp_comm_overlap` the other collectives are split
into tp chunks and pipelined with their matmul (Transformer Engine's user buffers, which work within one
NVLink domain). Where backward is split in two (zero-bubble schedules), the input gradient's collective has no
weight gradient to overlap, and the input is gathered again in the weight-gradient half
(sail-sg/zero-bubble-pipeline-parallelism, `WeightGradStore`).

With `moe_shared_expert_overlap` shared experts run while tokens travel: the matmul before their activation
overlaps the dispatch, the one behind it the combine, in backward vice versa (Megatron-LM, `SharedExpertMLP`
in megatron/core/transformer/moe/shared_experts.py). The longer hides the shorter; other kernels of shared
experts hide nothing.

Context parallelism: keys and values travel a ring while attention works on the block that has already arrived
(Ring Attention, Liu et al. 2023; Transformer Engine's `p2p`), forward once, backward together with their
gradients.
"""

import math
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Final

from clustersim.model.kernels import ATTENTION_KINDS, Kernel, KernelKind
from clustersim.model.layers import LayerOperators, Operator, ParallelRegion
from clustersim.model.operators import RegionInput, ShardAxis, TpCollective, TpCombine, early_stop_count
from clustersim.model.recompute_modules import RecomputeModule
from clustersim.parallel.context_parallel import ContextExchange
from clustersim.parallel.layer_sharding import LayerSharding
from clustersim.parallel.layout import Layout
from clustersim.parallel.mesh import CP_GROUP
from clustersim.program.task import CollectiveType, CommOp, CommOverlap, Operation, WorkType

_JOIN_COLLECTIVES: Final[Mapping[TpCombine, tuple[str, CollectiveType]]] = MappingProxyType(
    {
        TpCombine.GATHER: ("gather", CollectiveType.ALL_GATHER),
        TpCombine.SUM: ("sum", CollectiveType.ALL_REDUCE),
        TpCombine.SUM_SCATTER: ("scatter the sum of", CollectiveType.REDUCE_SCATTER),
        TpCombine.EXCHANGE: ("exchange", CollectiveType.ALL_TO_ALL),
    }
)


def _join_operations(joints: Iterable[TpCollective], layout: Layout, work_type: WorkType) -> list[Operation]:
    """The collectives that join sharded tensors."""
    return [Operation(_join_comm_op(collective, layout), work_type) for collective in joints]


def _join_comm_op(tp_collective: TpCollective, layout: Layout) -> CommOp:
    verb, collective = _JOIN_COLLECTIVES[tp_collective.combine]
    group = layout.tp_group if tp_collective.axis is ShardAxis.TENSOR else CP_GROUP
    return CommOp(f"{verb} {tp_collective.tensor_name}", collective, group.name, tp_collective.full_bytes)


def forward_operations(layer: LayerOperators, sharding: LayerSharding) -> list[Operation]:
    """Operations of a layer's forward, with its collectives."""
    return _build_forward(_placed_operators(layer.operators, sharding), sharding, WorkType.FORWARD)


def recomputed_forward(layer: LayerOperators, sharding: LayerSharding, *, early_stop: bool) -> list[Operation]:
    """Operations that full recomputation runs before a layer's backward."""
    return _build_forward(
        _until_early_stop(_placed_operators(layer.operators, sharding), early_stop=early_stop),
        sharding,
        WorkType.RECOMPUTE,
    )


def _build_forward(
    operators: Sequence["_PlacedOperator"], sharding: LayerSharding, work_type: WorkType
) -> list[Operation]:
    chunks = _overlap_chunk_count(sharding.layout)
    operator_work: list[_OperatorWork] = []
    for placed in operators:
        kernels = _with_context(placed, placed.operator.forward, sharding.context_exchange(backward=False), work_type)
        if placed.starts_region:
            gather = sharding.gather_input(placed.operator.region_input_bytes)
            amax = sharding.amax_operations(gather, work_type) + _further(gather, placed, sharding, work_type)
            kernels = amax + _attach_comm_op(gather, kernels, 0, chunks, sharding.copy_of(gather))
        if placed.ends_region:
            reduction = sharding.reduce_output()
            kernels = _attach_comm_op(reduction, kernels, len(kernels), chunks, sharding.copy_of(reduction))
        dispatch, combine = _moe_operations(
            sharding, work_type, dispatches=placed.starts_experts, combines=placed.ends_experts
        )
        operator_work.append(
            (
                placed,
                dispatch
                + kernels
                + _join_operations(placed.operator.tp_collectives.after_forward, sharding.layout, work_type)
                + combine,
            )
        )
    return _overlap_shared_experts(operator_work, sharding)


def backward_operations(layer: LayerOperators, sharding: LayerSharding) -> list[Operation]:
    """Operations of a layer's backward, with its collectives, in reverse order of the operators."""
    overlap_chunks = (
        math.inf if sharding.layout.async_tensor_model_parallel_allreduce else _overlap_chunk_count(sharding.layout)
    )
    operator_work: list[_OperatorWork] = []
    for placed in _backward_order(layer, sharding):
        inputs, weights = _input_gradient(placed, sharding), _weight_gradient(placed)
        if placed.regathers_input:
            inputs = _attach_comm_op(_regather_input(placed, sharding), inputs, 0, overlap_chunks)
        if placed.starts_region:
            reduction = sharding.reduce_input_gradient(placed.operator.region_input_bytes)
            weights = _attach_comm_op(reduction, weights, 0, overlap_chunks, sharding.copy_of(reduction))
            weights = _further(reduction, placed, sharding, WorkType.BACKWARD) + weights
        operator_work.append(
            (placed, _mark_complete(inputs + weights, placed.operator.gradient_count, placed.operator.parameter_group))
        )
    return _overlap_shared_experts(operator_work, sharding, is_backward=True)


def input_gradient_operations(layer: LayerOperators, sharding: LayerSharding) -> list[Operation]:
    """Operations of the input-gradient half of a backward; its reductions overlap no weight gradient."""
    operator_work: list[_OperatorWork] = []
    for placed in _backward_order(layer, sharding):
        inputs = _input_gradient(placed, sharding)
        if placed.starts_region:
            reduction = sharding.reduce_input_gradient(placed.operator.region_input_bytes)
            chunks, copy = _overlap_chunk_count(sharding.layout), sharding.copy_of(reduction)
            inputs = _attach_comm_op(reduction, inputs, len(inputs), chunks, copy)
            inputs += _further(reduction, placed, sharding, WorkType.BACKWARD)
        operator_work.append((placed, inputs))
    return _overlap_shared_experts(operator_work, sharding, is_backward=True)


def weight_gradient_operations(layer: LayerOperators, sharding: LayerSharding) -> list[Operation]:
    """Operations of the weight-gradient half of a backward; nothing overlaps the repeated input gathers.

    Gradients of norms are computed in the other half; they count with the next weight's, or with the last one's.
    """
    operations: list[Operation] = []
    pending: dict[str, int] = {}
    last_index: dict[str, int] = {}
    for placed in _backward_order(layer, sharding):
        weights, group = _weight_gradient(placed), placed.operator.parameter_group
        if placed.regathers_input:
            weights = _attach_comm_op(_regather_input(placed, sharding), weights, 0, 1)
        completed = pending.pop(group, 0) + placed.operator.gradient_count
        operations += _mark_complete(weights, completed, group)
        if weights:
            last_index[group] = len(operations) - 1
        else:
            pending[group] = completed
    for group, completed in pending.items():
        if completed and group not in last_index:
            raise ValueError(
                f"a layer has {completed} parameters of {group} and no weight gradient that completes them"
            )
        if completed:
            index = last_index[group]
            operations[index : index + 1] = _mark_complete(
                [operations[index]], completed + operations[index].gradient_count, group
            )
    return operations


def _backward_order(layer: LayerOperators, sharding: LayerSharding) -> list["_PlacedOperator"]:
    """The operators that gradients pass, last one first."""
    placed_operators = reversed(_placed_operators(layer.operators, sharding))
    return [placed for placed in placed_operators if not placed.operator.forward_only]


def _input_gradient(placed: "_PlacedOperator", sharding: LayerSharding) -> list[Operation]:
    """An operator's input gradient; the ring carries keys, values and the gradients of both."""
    exchange = sharding.context_exchange(backward=True)
    inputs = _with_context(placed, placed.operator.input_gradient, exchange, WorkType.BACKWARD)
    if placed.ends_region:
        gather = sharding.gather_output_gradient()
        inputs = sharding.amax_operations(gather, WorkType.BACKWARD) + _attach_comm_op(
            gather, inputs, 0, _overlap_chunk_count(sharding.layout), sharding.copy_of(gather)
        )
    dispatch, combine = _moe_operations(
        sharding, WorkType.BACKWARD, dispatches=placed.ends_experts, combines=placed.starts_experts
    )
    inputs = dispatch + inputs + combine
    joints = placed.operator.tp_collectives
    return [
        *_join_operations(joints.before_backward, sharding.layout, WorkType.BACKWARD),
        *inputs,
        *_join_operations(joints.after_input_gradient, sharding.layout, WorkType.BACKWARD),
    ]


def _moe_operations(
    sharding: LayerSharding, work_type: WorkType, *, dispatches: bool, combines: bool
) -> tuple[list[Operation], list[Operation]]:
    """Dispatch operations before an operator on the experts' ranks, and combine operations after it."""
    if sharding.dispatch is None:
        return [], []
    is_backward = work_type is WorkType.BACKWARD
    dispatch_ops = sharding.dispatch.dispatch_ops(is_backward=is_backward) if dispatches else ()
    combine_ops = sharding.dispatch.combine_ops(is_backward=is_backward) if combines else ()
    return [Operation(comm_op, work_type) for comm_op in dispatch_ops], [
        Operation(comm_op, work_type) for comm_op in combine_ops
    ]


def _regather_input(placed: "_PlacedOperator", sharding: LayerSharding) -> CommOp | None:
    """The collective that gathers a column-parallel matmul's input for its weight gradient, if it is still needed."""
    needs_input = placed.operator.weight_gradient and not placed.operator.saves_full_input
    return sharding.regather_input(placed.operator.region_input_bytes) if needs_input else None


def _weight_gradient(placed: "_PlacedOperator") -> list[Operation]:
    kernels, on_expert_rank = placed.operator.weight_gradient, placed.operator.region is ParallelRegion.EXPERT
    return [
        Operation(kernel, WorkType.BACKWARD, load_index=placed.load_index, on_expert_rank=on_expert_rank)
        for kernel in kernels
    ]


def recomputed_modules(
    layer: LayerOperators, sharding: LayerSharding, modules: Set[RecomputeModule], *, early_stop: bool
) -> list[Operation]:
    """Operations that selective recomputation of modules runs before a layer's backward, module by module.

    A module whose output is dropped as well runs to its end.
    """
    operators, recomputed = _placed_operators(layer.operators, sharding), list[Operation]()
    for module in (candidate for candidate in RecomputeModule if candidate in modules):
        module_operators = [placed for placed in operators if placed.operator.is_in_modules({module})]
        module_operators = [*_until_early_stop(module_operators, early_stop=early_stop and not module.discards_output)]
        recomputed += _build_forward(module_operators, sharding, WorkType.RECOMPUTE)
    return recomputed


def recomputed_operations(
    layer: LayerOperators, sharding: LayerSharding, *, early_stop: bool, saves_products: bool = False
) -> list[Operation]:
    """Operations that selective recomputation of operations runs: gathers too; reductions are among what is saved.

    saves_products: results of all products with weights are saved, not of every second one and of flash attention.
    """
    recomputed: list[Operation] = []
    for placed in _until_early_stop(_placed_operators(layer.operators, sharding), early_stop=early_stop):
        exchange = sharding.context_exchange(backward=False)
        operator = placed.operator
        rerun = operator.kernels_but_weight_products if saves_products else operator.recompute_kernels
        kernels = _with_context(placed, rerun, exchange, WorkType.RECOMPUTE)
        gather = sharding.gather_input(placed.operator.region_input_bytes) if placed.starts_region else None
        chunks, copy = _overlap_chunk_count(sharding.layout), sharding.copy_of(gather)
        recomputed += _further(gather, placed, sharding, WorkType.RECOMPUTE) if kernels else []
        recomputed += _attach_comm_op(gather, kernels, 0, chunks, copy) if kernels else []
        recomputed += _join_operations(
            placed.operator.tp_collectives.after_forward if kernels else (), sharding.layout, WorkType.RECOMPUTE
        )
    return recomputed


def _until_early_stop(operators: Sequence["_PlacedOperator"], *, early_stop: bool) -> Sequence["_PlacedOperator"]:
    """The operators that recomputation runs: with early_stop only up to the last saved tensor."""
    return operators[: early_stop_count([placed.operator for placed in operators])] if early_stop else operators


@dataclass(frozen=True, slots=True)
class _PlacedOperator:
    """An operator and its position in the layer.

    starts_region, ends_region: first or last of a sharded region; starts_attention, ends_attention: first or last
    of the attention core; regathers_input: first in backward that reads the region's input; starts_experts,
    ends_experts: first or last
    on the experts' ranks; load_index: index of the load factors of these.
    """

    operator: Operator
    starts_region: bool
    ends_region: bool
    starts_attention: bool
    ends_attention: bool
    regathers_input: bool
    starts_experts: bool = False
    ends_experts: bool = False
    load_index: int | None = None


def _placed_operators(operators: Sequence[Operator], sharding: LayerSharding) -> list[_PlacedOperator]:
    load_index = None if sharding.dispatch is None else sharding.dispatch.load_index
    sharded = [False, *(operator.region is ParallelRegion.SHARDED for operator in operators), False]
    on_expert_rank = [False, *(operator.region is ParallelRegion.EXPERT for operator in operators), False]
    cores = [False, *(operator.is_in_modules({RecomputeModule.CORE_ATTENTION}) for operator in operators), False]
    has_parallel_block = any(
        operator.region_input is RegionInput.SAME for operator in operators
    )  # a parallel (attention and MLP) block is one region
    return [
        _PlacedOperator(
            operator,
            starts_region=(
                starts_region := (sharded[index] and not sharded[index - 1])
                or operator.region_input is RegionInput.OTHER
            ),
            ends_region=sharded[index] and not sharded[index + 1],
            starts_attention=cores[index] and not cores[index - 1],
            ends_attention=cores[index] and not cores[index + 1],
            regathers_input=operator.region_input is not None if has_parallel_block else starts_region,
            starts_experts=on_expert_rank[index] and not on_expert_rank[index - 1],
            ends_experts=on_expert_rank[index] and not on_expert_rank[index + 1],
            load_index=load_index if on_expert_rank[index] else None,
        )
        for index, operator in enumerate(operators, start=1)
    ]


_OperatorWork = tuple[_PlacedOperator, list[Operation]]
"""An operator, and the operations that are run for it."""


def _overlap_shared_experts(
    operator_work: Sequence[_OperatorWork], sharding: LayerSharding, *, is_backward: bool = False
) -> list[Operation]:
    """Operations of all operators in sequence; shared experts overlapped with token dispatch and combine if enabled."""
    shared = [
        (placed, operations)
        for placed, operations in operator_work
        if placed.operator.is_in_modules({RecomputeModule.SHARED_EXPERTS})
    ]
    other_operations = [
        operation
        for placed, operations in operator_work
        if not placed.operator.is_in_modules({RecomputeModule.SHARED_EXPERTS})
        for operation in operations
    ]
    moe_indices = [index for index, operation in enumerate(other_operations) if operation.moe_comm is not None]
    if not (sharding.layout.moe_shared_expert_overlap and shared and moe_indices):
        return [operation for _, operations in operator_work for operation in operations]
    second_matmuls = (index for index, (placed, _) in enumerate(shared) if placed.ends_region)
    split_index = next(second_matmuls, len(shared)) + is_backward  # early-stopping recomputation omits it
    halves = [
        [operation for _, operations in half for operation in operations]
        for half in (shared[:split_index], shared[split_index:])
    ]
    dispatch_end = next(
        index for index in range(moe_indices[0], len(other_operations)) if other_operations[index].moe_comm is None
    )
    combine_start = next(index for index in moe_indices if index > dispatch_end)
    combine_end = moe_indices[-1] + 1
    dispatch_overlapped, combine_overlapped = (
        _overlap_longest(halves[0], other_operations[moe_indices[0] : dispatch_end]),
        _overlap_longest(halves[1], other_operations[combine_start:combine_end]),
    )
    return [
        *other_operations[: moe_indices[0]],
        *dispatch_overlapped,
        *other_operations[dispatch_end:combine_start],
        *combine_overlapped,
        *other_operations[combine_end:],
    ]


def _overlap_longest(operations: list[Operation], moe_operations: list[Operation]) -> list[Operation]:
    """Overlap the longest communication with the largest kernel; the others run before and after."""
    kernels = {
        index: operation.body for index, operation in enumerate(operations) if isinstance(operation.body, Kernel)
    }
    comm_ops = [operation.moe_comm for operation in moe_operations if operation.moe_comm is not None]
    if not kernels:
        return [*operations, *moe_operations]
    largest = max(kernels, key=lambda index: kernels[index].flops)
    longest = max(range(len(comm_ops)), key=lambda index: comm_ops[index].payload)
    overlapped = replace(operations[largest], body=CommOverlap(comm_ops[longest], kernels[largest], math.inf))
    return [
        *operations[:largest],
        *moe_operations[:longest],
        overlapped,
        *moe_operations[longest + 1 :],
        *operations[largest + 1 :],
    ]


def _with_context(
    placed: _PlacedOperator, kernels: Sequence[Kernel], exchange: ContextExchange, work_type: WorkType
) -> list[Operation]:
    """Kernels of an operator; those of the attention core with what context-parallel ranks exchange for it.

    Its first kernel overlaps rings, one block of keys at a time, one ring after the other; or the kernel of each block
    what the next one needs.
    """
    on_expert_rank = placed.operator.region is ParallelRegion.EXPERT
    operations = [
        Operation(kernel, work_type, load_index=placed.load_index, on_expert_rank=on_expert_rank) for kernel in kernels
    ]
    if not operations:
        return operations
    is_backward = work_type is WorkType.BACKWARD
    runs_first, runs_last = placed.starts_attention, placed.ends_attention
    if is_backward:
        runs_first, runs_last = runs_last, runs_first
    if placed.starts_attention and exchange.rings and isinstance(kernel := operations[0].body, Kernel):
        split = kernel if len(exchange.rings) == 1 else kernel.split_into(len(exchange.rings))
        overlaps = (CommOverlap(ring.comm_op, split, ring.block_count, is_ring=True) for ring in exchange.rings)
        operations = [*(Operation(overlap, work_type) for overlap in overlaps), *operations[1:]]
    if placed.starts_attention and exchange.with_blocks:
        operations = _overlap_blocks(operations, exchange.with_blocks)
    before = exchange.before if runs_first else ()
    after = exchange.after if runs_last else ()
    return [
        *(Operation(comm_op, work_type) for comm_op in before),
        *operations,
        *(Operation(comm_op, work_type) for comm_op in after),
    ]


def _overlap_blocks(operations: list[Operation], comm_ops: Iterable[CommOp | None]) -> list[Operation]:
    """The operations of attention's core, its kernels each overlapped with a collective, if there is one for it."""
    remaining = iter(comm_ops)
    overlapped: list[Operation] = []
    for operation in operations:
        kernel = operation.kernel
        is_block = kernel is not None and kernel.kind in ATTENTION_KINDS
        comm_op = next(remaining, None) if is_block else None
        if kernel is not None and comm_op is not None:
            operation = replace(operation, body=CommOverlap(comm_op, kernel, math.inf))
        overlapped.append(operation)
    return overlapped


def _attach_comm_op(
    comm_op: CommOp | None, operations: list[Operation], index: int, chunks: float, copy: Kernel | None = None
) -> list[Operation]:
    """Insert a collective before (index 0) or after the operations, pipelined with the nearest kernel if chunks > 1.

    Kernels that quantize an operand come before its gather. copy: of what is gathered, behind it, or of what is
    scattered, before it.
    """
    if comm_op is None:
        return operations
    work_type, is_gather = operations[0].work_type if operations else WorkType.BACKWARD, index == 0
    index = (
        next((first_index for first_index, operation in enumerate(operations) if not _is_cast(operation)), index)
        if is_gather
        else index
    )
    copies = [] if copy is None else [Operation(copy, work_type)]
    before, after = (copies, []) if comm_op.collective.is_reduction else ([], copies)
    nearest = min(index, len(operations) - 1)
    if chunks > 1 and operations and isinstance(kernel := operations[nearest].body, Kernel):
        is_first_chunk_local = is_gather and not math.isinf(chunks)  # the first chunk is local to this rank
        overlap = Operation(CommOverlap(comm_op, kernel, chunks, is_first_chunk_local), work_type)
        return [*operations[:nearest], *before, overlap, *after, *operations[nearest + 1 :]]
    return [*operations[:index], *before, Operation(comm_op, work_type), *after, *operations[index:]]


def _further(
    comm_op: CommOp | None, placed: _PlacedOperator, sharding: LayerSharding, work_type: WorkType
) -> list[Operation]:
    """A region's collective and its copy once more, for every further linear layer that has one of its own."""
    linear = placed.operator.linear
    if comm_op is None or linear is None:
        return []
    is_gather = comm_op.collective is CollectiveType.ALL_GATHER
    if not (sharding.gathers_per_linear if is_gather else sharding.reduces_per_linear):
        return []
    copy = sharding.copy_of(comm_op)
    operations = [Operation(comm_op, work_type), *([] if copy is None else [Operation(copy, work_type)])]
    ordered = operations if is_gather else operations[::-1]
    return max(0, len(linear.projections) - 1) * ordered


def _is_cast(operation: Operation) -> bool:
    return operation.kernel is not None and operation.kernel.kind is KernelKind.CAST


def _mark_complete(operations: list[Operation], parameter_count: int, group: str) -> list[Operation]:
    """Mark the last operation as the one after which the operator's gradients are complete."""
    if not operations or parameter_count == 0:
        return operations
    last = operations[-1]
    return [*operations[:-1], replace(last, gradient_count=parameter_count, parameter_group=group)]


def _overlap_chunk_count(layout: Layout) -> float:
    return layout.tp if layout.tp_comm_overlap else 1
