"""When does a rank do what its framework does beside the model (`model.overheads`)?

Gradients are zeroed and weights are cast before the first pass, and gradients are prepared on the compute stream where
each of their reductions is issued.
A microbatch's tokens come before its forward, once what the stage receives is there, so nothing is launched ahead of
them: a block of its own, in which the host's launches show. A loss that is averaged after each microbatch is waited for
by the next pass: Megatron-LM's `average_losses_across_data_parallel_group` is not asynchronous. Once a step it follows
the optimizer. Gradients of norms that are parts of sums under sequence parallelism are summed when all are reduced:
flattened into one buffer, reduced, and copied back, one kernel for each tensor (`_allreduce_layernorm_grads`,
megatron/core/distributed/finalize_model_grads.py).
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Final

from clustersim.lowering.program_builder import Lowering, Pass
from clustersim.model import batch_transfer, gradient_kernels, memory_bound, quantization
from clustersim.model.kernels import Kernel, KernelKind
from clustersim.model.operators import LayerOperators, Operator, ParallelRegion
from clustersim.model.overheads import BatchTransfer, LossReport
from clustersim.parallel.layer_partition import PipelineStage
from clustersim.parallel.mesh import DP_GROUP, TP_GROUP
from clustersim.program.action import FORWARD
from clustersim.program.task import CollectiveType, CommOp, Operation, WorkType

LOSS_BYTES: Final = 4.0  # one fp32 number
_TENSORS: Final = 2  # of a LayerNorm: weight and bias


def zero_gradients(low: Lowering, stages: Sequence[PipelineStage]) -> None:
    """Set the buffers of gradients to zero."""
    plan = low.plan
    parts = plan.layout.data.zero_stage > 1 and not plan.accumulates_full_gradients
    kernels: list[Kernel] = []
    for group in plan.trained_groups:
        held = sum(plan.parameter_count(stage, group.name) for stage in stages)
        kernels += gradient_kernels.zero_gradient_kernels(
            plan.with_weight_formats(group.formats), held / (group.shard_count if parts else 1)
        )
    if kernels:
        low.beside("zero gradients", _optimizing(kernels), ())


def cast_weights(low: Lowering, stages: Sequence[PipelineStage]) -> None:
    """Make the copies of weights that products read in this step."""
    matrices = (
        operator.cached_cast_elements
        for stage in stages
        for unit in low.plan.stage_units(stage)
        for operator in unit.operators
    )
    kernels = quantization.weight_cast_kernels(low.plan.training.recipe, matrices)
    if kernels:
        low.beside("cast weights", _optimizing(kernels), ())


def take_batch(low: Lowering, run: Pass) -> Pass:
    """The pass, behind what brings a microbatch's tokens, if something is to be done for that."""
    training, ends = low.plan.training, run.stage.has_embedding or run.stage.has_head
    if run.action.kind is not FORWARD or not (ends or training.overheads.batches is BatchTransfer.PACKED):
        return run
    kernels = batch_transfer.batch_kernels(training)
    if not kernels:
        return run
    sent = batch_transfer.broadcast_sizes(training) if low.plan.layout.tp > 1 else ()
    broadcasts = [CommOp("broadcast batch", CollectiveType.BROADCAST, TP_GROUP.name, size) for size in sent]
    does: list[CommOp | Kernel] = [*broadcasts, *kernels]
    operations = [Operation(doe, WorkType.FORWARD) for doe in does]
    task = low.beside("batch", operations, run.after)
    return Pass(run.stage, run.action, (*run.after, task), run.arriving)


def report_loss(low: Lowering, run: Pass, done: int) -> tuple[int, ...]:
    """Average the loss of a microbatch, if that is done; return what the next pass waits for because of it."""
    if not run.stage.has_head or run.action.kind is not FORWARD:
        return ()
    return _average_loss(low, done) if low.plan.training.overheads.loss is LossReport.MICROBATCH else ()


def report_step(low: Lowering, stages: Sequence[PipelineStage], done: int) -> None:
    """Average the loss of a step behind its last task, if that is done."""
    if low.plan.training.overheads.loss is LossReport.STEP and any(stage.has_head for stage in stages):
        _average_loss(low, done)


def _average_loss(low: Lowering, done: int) -> tuple[int, ...]:
    if low.plan.layout.group_size(DP_GROUP) == 1:
        return ()
    return (low.communicate(CommOp("average loss", CollectiveType.ALL_REDUCE, DP_GROUP.name, LOSS_BYTES), (done,)),)


def sum_norms(low: Lowering, stages: Sequence[PipelineStage]) -> None:
    """Sum gradients of norms, and of biases behind row-parallel products, over the ranks that split the sequence."""
    plan = low.plan
    if not (plan.training.overheads.norm_sums and plan.layout.sequence_parallel and plan.layout.tp > 1):
        return
    found = [count for stage in stages for unit in plan.stage_units(stage) for count in _split(unit)]
    if found:
        low.reducing.append(low.beside("sum norms", _flat_sum(low, found), tuple(low.reducing)))


def _flat_sum(low: Lowering, counts: Sequence[tuple[int, int]]) -> list[Operation]:
    """An all-reduce of tensors in one buffer. counts: elements and tensors of each operator."""
    dtype = low.plan.training.recipe.weight_formats.gradients
    elements, tensors = (sum(item) for item in zip(*counts, strict=True))
    flat, apart = (
        memory_bound.copy_kernel("norms.flatten", dtype, elements),
        memory_bound.copy_kernel("norms.unflatten", dtype, elements),
    )
    size = float(elements * dtype.bytes)
    exchange = CommOp("sum norm gradients", CollectiveType.ALL_REDUCE, TP_GROUP.name, size, reduce_dtype=dtype)
    each = replace(apart, launches=tensors)
    return [Operation(does, WorkType.OPTIMIZER) for does in (flat, exchange, each)]


def _split(unit: LayerOperators) -> Iterator[tuple[int, int]]:
    """Elements and tensors whose gradients are sums of tokens that tensor-parallel ranks have split."""
    for operator in unit.operators:
        if operator.trainable and _is_norm(operator):
            yield operator.parameter_count, _TENSORS
        linear = operator.linear
        if operator.trainable and linear is not None and linear.row_parallel and linear.bias_tokens:
            yield linear.outputs, 1


def _is_norm(operator: Operator) -> bool:
    """Whether it is a norm of whole tokens."""
    norms = any(kernel.kind is KernelKind.NORM for kernel in operator.forward)
    return norms and operator.region is ParallelRegion.REPLICATED


def _optimizing(kernels: Sequence[Kernel]) -> list[Operation]:
    return [Operation(kernel, WorkType.OPTIMIZER) for kernel in kernels]
