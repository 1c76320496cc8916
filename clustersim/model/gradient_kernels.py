"""What passes over all gradients of a rank once a step, beside the optimizer's own?

Buffers of gradients are set to zero (one write) and, before they are reduced, multiplied by 1 / ranks (a read and a
write) and looked through for what is not finite (a read). The optimizer may want them in the format of its master
weights (a read, and a write in that format), and FP16's are divided by the scale of the loss and looked through (a read
and a write). Each is a kernel over a buffer; what is launched for each tensor of it is not counted.
References: Megatron-LM, megatron/core/distributed/param_and_grad_buffer.py (`reset`, `start_grad_sync`) and
megatron/core/optimizer/optimizer.py (`_copy_model_grads_to_main_grads`, `_unscale_main_grads_and_check_for_nan`).
"""

from dataclasses import replace

from clustersim.common.dtypes import DType
from clustersim.model.kernels import Kernel, KernelKind, MemoryBoundOp, MemoryBoundShape
from clustersim.model.training import Training


def zero_gradient_kernels(training: Training, parameter_count: float) -> tuple[Kernel, ...]:
    """The start of a step, if buffers are zeroed then."""
    dtype = training.recipe.weight_formats.gradients
    return (
        (_buffer_kernel("gradients.zero", MemoryBoundOp.ZERO, dtype, parameter_count, 1),)
        if training.overheads.zeroing
        else ()
    )


def pre_reduction_kernels(training: Training, parameter_count: float) -> tuple[Kernel, ...]:
    """What is done to gradients of so many parameters before they are reduced."""
    dtype = training.recipe.weight_formats.gradients
    check_kernels = (_buffer_kernel("gradients.check", MemoryBoundOp.GRADIENT_NORM, dtype, parameter_count, 1),)
    average_kernels = (_buffer_kernel("gradients.average", MemoryBoundOp.SCALE, dtype, parameter_count, 2),)
    overheads = training.overheads
    return (check_kernels if overheads.checking else ()) + (average_kernels if overheads.averaging else ())


def upcast_kernels(training: Training, parameter_count: float) -> tuple[Kernel, ...]:
    """The copy that the optimizer reads, if it reads one."""
    if not upcasts_gradients(training):
        return ()
    gradient_dtype, master_dtype = training.recipe.weight_formats.gradients, training.recipe.weight_formats.updated
    shape = MemoryBoundShape(MemoryBoundOp.COPY, 1, round(parameter_count), fused=True, formats=(master_dtype,))
    moved_bytes = float(parameter_count * (gradient_dtype.bytes + master_dtype.bytes))
    return (Kernel("optimizer.widen", KernelKind.OPTIMIZER, gradient_dtype, flops=0.0, bytes=moved_bytes, shape=shape),)


def unscale_kernels(training: Training, parameter_count: float) -> tuple[Kernel, ...]:
    """FP16's division by the scale of the loss, with the look for what is not finite."""
    if not unscales_gradients(training):
        return ()
    return (
        _buffer_kernel(
            "optimizer.unscale", MemoryBoundOp.UNSCALE, training.recipe.weight_formats.gradients, parameter_count, 2
        ),
    )


def upcasts_gradients(training: Training) -> bool:
    """Whether gradients are narrower than the weights that the optimizer updates, and it reads a copy that is not."""
    weights = training.recipe.weight_formats
    return training.overheads.widening and weights.gradients.bytes < weights.updated.bytes


def unscales_gradients(training: Training) -> bool:
    """Whether the loss is scaled: FP16's range is so small that gradients would vanish."""
    return training.overheads.unscaling and training.recipe.compute is DType.FP16


def with_upcast_gradients(training: Training) -> Training:
    """The training with gradients in the format in which its optimizer reads them."""
    if not upcasts_gradients(training):
        return training
    weights = training.recipe.weight_formats
    return replace(
        training, recipe=replace(training.recipe, weight_formats=replace(weights, gradients=weights.updated))
    )


def _buffer_kernel(name: str, op: MemoryBoundOp, dtype: DType, parameter_count: float, pass_count: int) -> Kernel:
    """A kernel over a buffer of so many gradients; passes: reads and writes."""
    shape = MemoryBoundShape(op, 1, round(parameter_count), fused=True)
    return Kernel(
        name,
        KernelKind.OPTIMIZER,
        dtype,
        flops=0.0,
        bytes=float(parameter_count * pass_count * dtype.bytes),
        shape=shape,
    )
