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
from clustersim.model.kernels import Kernel, KernelKind, Routine, StreamShape
from clustersim.model.training import Training


def zeroed(training: Training, parameters: float) -> tuple[Kernel, ...]:
    """The start of a step, if buffers are zeroed then."""
    dtype = training.recipe.weights.gradients
    return (_over("gradients.zero", Routine.ZERO, dtype, parameters, 1),) if training.overheads.zeroing else ()


def before_reduction(training: Training, parameters: float) -> tuple[Kernel, ...]:
    """What is done to gradients of so many parameters before they are reduced."""
    dtype = training.recipe.weights.gradients
    checked = (_over("gradients.check", Routine.GRADIENT_NORM, dtype, parameters, 1),)
    averaged = (_over("gradients.average", Routine.SCALE, dtype, parameters, 2),)
    overheads = training.overheads
    return (checked if overheads.checking else ()) + (averaged if overheads.averaging else ())


def widened(training: Training, parameters: float) -> tuple[Kernel, ...]:
    """The copy that the optimizer reads, if it reads one."""
    if not widens(training):
        return ()
    made, wanted = training.recipe.weights.gradients, training.recipe.weights.held
    shape = StreamShape(Routine.COPY, 1, round(parameters), fused=True, formats=(wanted,))
    moved = float(parameters * (made.bytes + wanted.bytes))
    return (Kernel("optimizer.widen", KernelKind.OPTIMIZER, made, flops=0.0, bytes=moved, shape=shape),)


def unscaled(training: Training, parameters: float) -> tuple[Kernel, ...]:
    """FP16's division by the scale of the loss, with the look for what is not finite."""
    if not unscales(training):
        return ()
    return (_over("optimizer.unscale", Routine.UNSCALE, training.recipe.weights.gradients, parameters, 2),)


def widens(training: Training) -> bool:
    """Whether gradients are narrower than the weights that the optimizer updates, and it reads a copy that is not."""
    weights = training.recipe.weights
    return training.overheads.widening and weights.gradients.bytes < weights.held.bytes


def unscales(training: Training) -> bool:
    """Whether the loss is scaled: FP16's range is so small that gradients would vanish."""
    return training.overheads.unscaling and training.recipe.compute is DType.FP16


def as_read(training: Training) -> Training:
    """The training with gradients in the format in which its optimizer reads them."""
    if not widens(training):
        return training
    weights = training.recipe.weights
    return replace(training, recipe=replace(training.recipe, weights=replace(weights, gradients=weights.held)))


def _over(name: str, routine: Routine, dtype: DType, parameters: float, passes: int) -> Kernel:
    """A kernel over a buffer of so many gradients; passes: reads and writes."""
    shape = StreamShape(routine, 1, round(parameters), fused=True)
    return Kernel(
        name, KernelKind.OPTIMIZER, dtype, flops=0.0, bytes=float(parameters * passes * dtype.bytes), shape=shape
    )
