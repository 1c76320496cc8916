"""What does the optimizer move per parameter?

Fused, every state passes once: the gradient is read, master weights and moments are read and written, the
compute weights are written (without master weights they are read and written themselves). Unfused is
PyTorch's foreach implementation, one kernel per term of the update: for Adam decay (2 passes over the
weights), first moment (3), second moment (2 + 3), root, division and epsilon in a scratch copy (2 + 2 +
2), update (4); for SGD with momentum 2 + 3 + 3; for Lion decay (2), interpolation (3), sign (2), update (3), moment
(3). For Adafactor the square is written (2), summed twice (2), the root multiplied (1, 3), its norm read (1), clipped
and scaled (2 + 2), weights decayed and updated (2 + 3); there is no fused kernel. 8-bit Adam always is one, whose
moments are bytes (bitsandbytes). Arithmetic is not counted as FLOP. Parameter counts
may be fractional (a shard).
"""

from dataclasses import replace
from typing import Final

from clustersim.common.dtypes import DType
from clustersim.common.units import Bytes
from clustersim.model.kernels import Kernel, KernelKind, MemoryBoundOp, MemoryBoundShape
from clustersim.model.optimizers import Optimizer
from clustersim.model.precision_recipe import WeightFormats
from clustersim.model.training import FusedKernel, Training


def optimizer_step_kernels(training: Training, parameter_count: float) -> tuple[Kernel, ...]:
    """Kernels of one update, element by element, of the parameters of this rank."""
    formats, optimizer = training.recipe.weight_formats, training.scalar_optimizer
    fused, unfused = _PASSES[optimizer]
    is_fused = training.fuses(FusedKernel.OPTIMIZER) or optimizer is Optimizer.ADAM_8BIT
    weight_passes, gradient_passes, moment_passes, launches = fused if is_fused else unfused
    updated_dtype = formats.updated
    moment_bytes = (
        optimizer.moment_bytes(formats.moments) / 2 if optimizer is Optimizer.ADAM_8BIT else formats.moments.bytes
    )
    update_bytes = (
        weight_passes * updated_dtype.bytes + gradient_passes * formats.gradients.bytes + moment_passes * moment_bytes
    )
    copy_bytes = _copy_bytes(formats, fused=is_fused)
    kernel_count = launches + (1 if copy_bytes and not is_fused else 0)
    copy_format = (formats.stored,) if copy_bytes else ()
    routine = _MEASURED_OPS.get(optimizer, MemoryBoundOp.UPDATE)
    shape = _update_shape(routine, training, parameter_count)
    shape = replace(shape, fused=is_fused, formats=(formats.gradients, formats.moments, *copy_format))
    return (
        _optimizer_kernel(
            "optimizer.step", updated_dtype, parameter_count * (update_bytes + copy_bytes), shape, kernel_count
        ),
    )


def separate_pass_bytes(formats: WeightFormats) -> Bytes:
    """Bytes per parameter of an update in passes of its own (`HostUpdate.SEQUENTIAL`), beyond those of one kernel.

    Gradients are read and written in the master format, to scale them; master weights are read again to convert them.
    """
    conversion = 0.0 if formats.master_copy is None else formats.master_copy.bytes
    return 2 * formats.updated.bytes + conversion


def gradient_norm_kernels(training: Training, parameter_count: float) -> tuple[Kernel, ...]:
    """Kernels of the gradient norm on this rank (one read), and of scaling by it (a read and a write), if any."""
    dtype = training.recipe.weight_formats.gradients
    norm_shape = _update_shape(MemoryBoundOp.GRADIENT_NORM, training, parameter_count)
    norm = _optimizer_kernel("optimizer.gradient_norm", dtype, parameter_count * dtype.bytes, norm_shape)
    if not training.overheads.scale_clipped_gradients:
        return (norm,)
    clip_shape = _update_shape(MemoryBoundOp.GRADIENT_CLIP, training, parameter_count)
    return (norm, _optimizer_kernel("optimizer.gradient_clip", dtype, parameter_count * 2 * dtype.bytes, clip_shape))


_MEASURED_OPS: Final = {Optimizer.ADAM: MemoryBoundOp.ADAM, Optimizer.SGD: MemoryBoundOp.SGD}
# Passes over (weights, gradients, moments and scratch), launches: fused, unfused.
_PASSES: Final = {
    Optimizer.ADAM: ((2, 1, 4, 1), (4, 2, 14, 8)),
    Optimizer.SGD: ((2, 1, 2, 1), (2, 1, 5, 3)),
    Optimizer.LION: ((2, 1, 2, 1), (4, 2, 7, 5)),
    Optimizer.ADAFACTOR: ((4, 2, 12, 11), (4, 2, 12, 11)),
    Optimizer.ADAM_8BIT: ((2, 1, 4, 1), (2, 1, 4, 1)),
}


def elementwise_update_kernel(name: str, dtype: DType, elements: int, moved_bytes: Bytes, launches: int = 1) -> Kernel:
    """One pass or several over the elements of matrices, of an optimizer that has no fused kernel."""
    return _optimizer_kernel(name, dtype, moved_bytes, MemoryBoundShape(MemoryBoundOp.UPDATE, 1, elements), launches)


def _copy_bytes(formats: WeightFormats, *, fused: bool) -> Bytes:
    """Bytes per parameter to refresh the compute weights from the master weights."""
    if formats.master_copy is None:
        return 0.0
    return formats.stored.bytes + (0.0 if fused else formats.master_copy.bytes)


def _update_shape(op: MemoryBoundOp, training: Training, parameter_count: float) -> MemoryBoundShape:
    return MemoryBoundShape(op, 1, round(parameter_count), fused=training.fuses(FusedKernel.OPTIMIZER))


def _optimizer_kernel(
    name: str, dtype: DType, moved_bytes: Bytes, shape: MemoryBoundShape, launches: int = 1
) -> Kernel:
    return Kernel(
        name, KernelKind.OPTIMIZER, dtype, flops=0.0, bytes=float(moved_bytes), shape=shape, launches=launches
    )
