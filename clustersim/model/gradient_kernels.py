"""Kernels over all gradients of a rank once per step, in addition to the optimizer's own.

Gradient buffers are zeroed (one write) and, before they are reduced, multiplied by 1 / ranks (a read and
a write) and checked for non-finite values (a read). The optimizer may need them in the format of its
master weights (a read, and a write in that format), and FP16 gradients are divided by the loss scale and
checked (a read and a write). Each is one kernel over a buffer; per-tensor launches are not counted.
References: Megatron-LM, megatron/core/distributed/param_and_grad_buffer.py (`reset`, `start_grad_sync`)
and megatron/core/optimizer/optimizer.py (`_copy_model_grads_to_main_grads`,
`_unscale_main_grads_and_check_for_nan`).
"""

from dataclasses import replace

from clustersim.common.dtypes import DType
from clustersim.model.kernels import Kernel, KernelKind, MemoryBoundOp, MemoryBoundShape
from clustersim.model.training import Training


def zero_gradient_kernels(training: Training, parameter_count: float) -> tuple[Kernel, ...]:
    """Zeroing of the gradient buffer at the start of a step, if the framework does it."""
    dtype = training.recipe.weight_formats.gradients
    return (
        (_buffer_kernel("gradients.zero", MemoryBoundOp.ZERO, dtype, parameter_count, 1),)
        if training.overheads.zero_grad
        else ()
    )


def pre_reduction_kernels(training: Training, parameter_count: float) -> tuple[Kernel, ...]:
    """Check and averaging of gradients before they are reduced."""
    dtype = training.recipe.weight_formats.gradients
    check_kernels = (_buffer_kernel("gradients.check", MemoryBoundOp.GRADIENT_NORM, dtype, parameter_count, 1),)
    average_kernels = (_buffer_kernel("gradients.average", MemoryBoundOp.SCALE, dtype, parameter_count, 2),)
    overheads = training.overheads
    return (check_kernels if overheads.check_for_nan_in_grad else ()) + (
        average_kernels if overheads.prescale_gradients else ()
    )


def upcast_kernels(training: Training, parameter_count: float) -> tuple[Kernel, ...]:
    """The copy of gradients in the master weights' format, if the optimizer reads one."""
    if not upcasts_gradients(training):
        return ()
    gradient_dtype, master_dtype = training.recipe.weight_formats.gradients, training.recipe.weight_formats.updated
    shape = MemoryBoundShape(MemoryBoundOp.COPY, 1, round(parameter_count), fused=True, formats=(master_dtype,))
    moved_bytes = float(parameter_count * (gradient_dtype.bytes + master_dtype.bytes))
    return (Kernel("optimizer.widen", KernelKind.OPTIMIZER, gradient_dtype, flops=0.0, bytes=moved_bytes, shape=shape),)


def unscale_kernels(training: Training, parameter_count: float) -> tuple[Kernel, ...]:
    """Division of FP16 gradients by the loss scale, including the check for non-finite values."""
    if not unscales_gradients(training):
        return ()
    return (
        _buffer_kernel(
            "optimizer.unscale", MemoryBoundOp.UNSCALE, training.recipe.weight_formats.gradients, parameter_count, 2
        ),
    )


def upcasts_gradients(training: Training) -> bool:
    """Whether the optimizer reads a copy of gradients in the higher precision of the weights it updates."""
    weights = training.recipe.weight_formats
    return training.overheads.upcast_gradients and weights.gradients.bytes < weights.updated.bytes


def unscales_gradients(training: Training) -> bool:
    """Whether gradients are unscaled: FP16 training scales the loss so that gradients do not underflow."""
    return training.overheads.unscale_gradients and training.recipe.compute is DType.FP16


def with_upcast_gradients(training: Training) -> Training:
    """The training with gradients in the format in which its optimizer reads them."""
    if not upcasts_gradients(training):
        return training
    weights = training.recipe.weight_formats
    return replace(
        training, recipe=replace(training.recipe, weight_formats=replace(weights, gradients=weights.updated))
    )


def _buffer_kernel(name: str, op: MemoryBoundOp, dtype: DType, parameter_count: float, pass_count: int) -> Kernel:
    """A kernel over a buffer of gradients; pass_count: reads and writes per element."""
    shape = MemoryBoundShape(op, 1, round(parameter_count), fused=True)
    return Kernel(
        name,
        KernelKind.OPTIMIZER,
        dtype,
        flops=0.0,
        bytes=float(parameter_count * pass_count * dtype.bytes),
        shape=shape,
    )
