"""Framework overheads: gradient zeroing, weight casts, batch loading, loss averaging (`model.overheads`).

Gradients are zeroed and weights are cast before the first pass, and gradients are prepared on the compute
stream where each of their reductions is issued. A microbatch's tokens are fetched before its forward, once
the stage's input has been received, so that nothing is launched ahead of them: a separate segment, in which
the host's launch delays show. A loss that is averaged after each microbatch blocks the next pass:
Megatron-LM's `average_losses_across_data_parallel_group` is not asynchronous. A loss averaged once a step
follows the optimizer. Norm gradients, which are partial sums under sequence parallelism, are all-reduced
after all other reductions: flattened into one buffer, reduced, and copied back, one kernel for each tensor
(`_allreduce_layernorm_grads`, megatron/core/distributed/finalize_model_grads.py).
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Final

from clustersim.lowering.program_builder import RankProgramBuilder, StagePass
from clustersim.model import batch_transfer, gradient_kernels, memory_bound, quantization
from clustersim.model.kernels import Kernel, KernelKind
from clustersim.model.operators import LayerOperators, Operator, ParallelRegion
from clustersim.model.overheads import BatchTransfer, LossReport
from clustersim.model.unattributed import PASS_OVERHEAD, STEP_OVERHEAD
from clustersim.parallel.layer_partition import PipelineStage
from clustersim.parallel.mesh import DP_GROUP, TP_GROUP
from clustersim.program.action import FORWARD
from clustersim.program.task import CollectiveType, CommOp, Operation, WorkType

LOSS_BYTES: Final = 4.0  # one fp32 number
_TENSORS_PER_NORM: Final = 2  # a LayerNorm has a weight and a bias


def add_gradient_zeroing(builder: RankProgramBuilder, stages: Sequence[PipelineStage]) -> None:
    """Set the gradient buffers to zero."""
    plan = builder.plan
    is_sharded = plan.layout.data.zero_stage > 1 and not plan.accumulates_full_gradients
    kernels: list[Kernel] = []
    for group in plan.trained_groups:
        parameter_count = sum(plan.parameter_count(stage, group.name) for stage in stages)
        kernels += gradient_kernels.zero_gradient_kernels(
            plan.with_weight_formats(group.formats), parameter_count / (group.shard_count if is_sharded else 1)
        )
    if kernels:
        builder.add_standalone("zero gradients", optimizer_operations(kernels), ())


def add_weight_casts(builder: RankProgramBuilder, stages: Sequence[PipelineStage]) -> None:
    """Make the low-precision weight copies that this step's matmuls read."""
    element_counts = (
        operator.cached_cast_elements
        for stage in stages
        for unit in builder.plan.stage_units(stage)
        for operator in unit.operators
    )
    kernels = quantization.weight_cast_kernels(builder.plan.training.recipe, element_counts)
    if kernels:
        builder.add_standalone("cast weights", optimizer_operations(kernels), ())


def add_batch_fetch(builder: RankProgramBuilder, stage_pass: StagePass) -> StagePass:
    """The pass, after the tasks that fetch a microbatch's tokens, if there are any."""
    training, stage = builder.plan.training, stage_pass.stage
    needs_tokens = stage.has_embedding or stage.has_head or stage.has_encoder
    if stage_pass.action.kind is not FORWARD or not (
        needs_tokens or training.overheads.batch_transfer is BatchTransfer.PACKED
    ):
        return stage_pass
    kernels = batch_transfer.batch_kernels(training)
    if not kernels:
        return stage_pass
    group = builder.plan.tensor_group(stage.index)
    broadcasts = (
        []
        if group is None
        else [
            CommOp("broadcast batch", CollectiveType.BROADCAST, group.name, size)
            for size in batch_transfer.broadcast_sizes(training)
        ]
    )
    bodies: list[CommOp | Kernel] = [*broadcasts, *kernels]
    operations = [Operation(body, WorkType.FORWARD) for body in bodies]
    task = builder.add_standalone("batch", operations, stage_pass.depends_on)
    return StagePass(stage_pass.stage, stage_pass.action, (*stage_pass.depends_on, task), stage_pass.input_operations)


def add_pass_overhead(builder: RankProgramBuilder, stage_pass: StagePass) -> StagePass:
    """The pass, behind what a profiled step does for each forward besides the model, if a record has it."""
    if stage_pass.action.kind is not FORWARD or not builder.unattributed.in_passes:
        return stage_pass
    task = builder.add_standalone("unattributed", [Operation(PASS_OVERHEAD, WorkType.FORWARD)], stage_pass.depends_on)
    return StagePass(stage_pass.stage, stage_pass.action, (*stage_pass.depends_on, task), stage_pass.input_operations)


def add_step_overhead(builder: RankProgramBuilder, last_task: int) -> None:
    """What a profiled step does besides the model, if a record has it."""
    if builder.unattributed.in_steps:
        builder.add_standalone("unattributed", optimizer_operations([STEP_OVERHEAD]), (last_task,))


def add_microbatch_loss(builder: RankProgramBuilder, stage_pass: StagePass, last_task: int) -> tuple[int, ...]:
    """Average the loss of a microbatch, if configured; return the tasks that the next pass waits for."""
    if not stage_pass.stage.has_head or stage_pass.action.kind is not FORWARD:
        return ()
    return (
        _add_loss_average(builder, last_task)
        if builder.plan.training.overheads.loss_averaging is LossReport.MICROBATCH
        else ()
    )


def add_step_loss(builder: RankProgramBuilder, stages: Sequence[PipelineStage], last_task: int) -> None:
    """Average the loss of a step after its last task, if configured."""
    if builder.plan.training.overheads.loss_averaging is LossReport.STEP and any(stage.has_head for stage in stages):
        _add_loss_average(builder, last_task)


def _add_loss_average(builder: RankProgramBuilder, last_task: int) -> tuple[int, ...]:
    if builder.plan.layout.group_size(DP_GROUP) == 1:
        return ()
    return (
        builder.add_dp_collective(
            CommOp("average loss", CollectiveType.ALL_REDUCE, DP_GROUP.name, LOSS_BYTES), (last_task,)
        ),
    )


def add_norm_gradient_sync(builder: RankProgramBuilder, stages: Sequence[PipelineStage]) -> None:
    """All-reduce gradients of norms, and of biases after row-parallel matmuls, over the sequence-parallel ranks."""
    plan = builder.plan
    if not (plan.training.overheads.allreduce_layernorm_grads and plan.layout.sequence_parallel and plan.layout.tp > 1):
        return
    with_model = [stage for stage in stages if plan.tensor_group(stage.index) is TP_GROUP]
    counts = [count for stage in with_model for unit in plan.stage_units(stage) for count in _partial_gradients(unit)]
    if counts:
        builder.reduction_tasks.append(
            builder.add_standalone("sum norms", _flattened_all_reduce(builder, counts), tuple(builder.reduction_tasks))
        )


def _flattened_all_reduce(builder: RankProgramBuilder, counts: Sequence[tuple[int, int]]) -> list[Operation]:
    """An all-reduce of tensors flattened into one buffer. counts: (elements, tensors) of each operator."""
    dtype = builder.plan.training.recipe.weight_formats.gradients
    elements, tensors = (sum(copy_back) for copy_back in zip(*counts, strict=True))
    flatten, unflatten = (
        memory_bound.copy_kernel("norms.flatten", dtype, elements),
        memory_bound.copy_kernel("norms.unflatten", dtype, elements),
    )
    payload = float(elements * dtype.bytes)
    comm_op = CommOp("sum norm gradients", CollectiveType.ALL_REDUCE, TP_GROUP.name, payload, reduce_dtype=dtype)
    copy_back = replace(unflatten, launches=tensors)
    return [Operation(body, WorkType.OPTIMIZER) for body in (flatten, comm_op, copy_back)]


def _partial_gradients(unit: LayerOperators) -> Iterator[tuple[int, int]]:
    """(elements, tensors) whose gradients are partial sums, because tensor-parallel ranks split the tokens."""
    for operator in unit.operators:
        if operator.trainable and _is_replicated_norm(operator):
            yield operator.parameter_count, _TENSORS_PER_NORM
        linear = operator.linear
        if operator.trainable and linear is not None and linear.row_parallel and linear.bias_tokens:
            yield linear.outputs, 1


def _is_replicated_norm(operator: Operator) -> bool:
    """Whether the operator is a norm in the replicated region, whose ranks all hold its weights."""
    norms = any(kernel.kind is KernelKind.NORM for kernel in operator.forward)
    return norms and operator.region is ParallelRegion.REPLICATED


def optimizer_operations(kernels: Sequence[Kernel]) -> list[Operation]:
    """Kernels that run with the optimizer."""
    return [Operation(kernel, WorkType.OPTIMIZER) for kernel in kernels]


def matrix_operations(kernels: Iterable[Kernel]) -> list[Operation]:
    """Kernels of an optimizer's loop over matrices, which calls tensor operations without modules and autograd."""
    return optimizer_operations([replace(kernel, host_calls=kernel.launches) for kernel in kernels])
