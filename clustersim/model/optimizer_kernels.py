"""What does the optimizer move per parameter?

Fused, every state passes once: the gradient is read, master weights and moments are read and written, the weights
for compute are written (without master weights they are read and written themselves). Unfused is PyTorch's foreach
form, one kernel per term of the update: for Adam decay (2 passes over the weights), first moment (3), second moment
(2 + 3), root, division and epsilon in a scratch copy (2 + 2 + 2), update (4); for SGD with momentum 2 + 3 + 3.
Its arithmetic is not counted as FLOP. Parameters may be a fraction of a whole (a shard).
"""

from dataclasses import replace

from clustersim.common.dtypes import DType
from clustersim.common.units import Bytes
from clustersim.model.kernels import Kernel, KernelKind, Routine, StreamShape
from clustersim.model.precision_recipe import WeightFormats
from clustersim.model.training import Optimizer, Training


def optimizer_step(training: Training, parameters: float) -> tuple[Kernel, ...]:
    """One update of so many parameters on this rank."""
    formats, adam = training.recipe.weights, training.optimizer is Optimizer.ADAM
    fused, unfused = _ADAM if adam else _SGD
    weights, gradients, moments, launches = fused if training.fused else unfused
    held = formats.held
    width = weights * held.bytes + gradients * formats.gradients.bytes + moments * formats.moments.bytes
    copied = _copy_bytes(formats, fused=training.fused)
    kernels = launches + (1 if copied and not training.fused else 0)
    copy = (formats.stored,) if copied else ()
    shape = _shape(Routine.ADAM if adam else Routine.SGD, training, parameters)
    shape = replace(shape, formats=(formats.gradients, formats.moments, *copy))
    return (_kernel("optimizer.step", held, parameters * (width + copied), shape, kernels),)


def gradient_norm(training: Training, parameters: float) -> tuple[Kernel, ...]:
    """The norm of the gradients on this rank: one read.

    Unfused, PyTorch's clip_grad_norm_ scales them whatever the norm; fused optimizers scale only when it is exceeded,
    which in a steady run is rare.
    """
    dtype = training.recipe.weights.gradients
    over = _shape(Routine.GRADIENT_NORM, training, parameters)
    norm = _kernel("optimizer.gradient_norm", dtype, parameters * dtype.bytes, over)
    if training.fused:
        return (norm,)
    scaled = _shape(Routine.GRADIENT_CLIP, training, parameters)
    return (norm, _kernel("optimizer.gradient_clip", dtype, parameters * 2 * dtype.bytes, scaled))


# Passes over (weights, gradients, moments and scratch), launches: fused, unfused.
_ADAM = ((2, 1, 4, 1), (4, 2, 14, 8))
_SGD = ((2, 1, 2, 1), (2, 1, 5, 3))


def _copy_bytes(formats: WeightFormats, *, fused: bool) -> Bytes:
    """Bytes per parameter to refresh the weights that are computed with from the master weights."""
    if formats.copy is None:
        return 0.0
    return formats.stored.bytes + (0.0 if fused else formats.copy.bytes)


def _shape(routine: Routine, training: Training, parameters: float) -> StreamShape:
    return StreamShape(routine, 1, round(parameters), fused=training.fused)


def _kernel(name: str, dtype: DType, moved: Bytes, shape: StreamShape, launches: int = 1) -> Kernel:
    return Kernel(name, KernelKind.OPTIMIZER, dtype, flops=0.0, bytes=float(moved), shape=shape, launches=launches)
