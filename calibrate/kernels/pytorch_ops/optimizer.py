"""How does PyTorch update weights, and clip gradients?

`torch.optim` in its fused or its foreach form, over a list of tensors as a model has them. Gradients in another format
than the weights that are updated are converted first, and a copy of the weights in the compute format is refreshed
after. Moments have the weights' format: PyTorch has no other.
"""

from collections.abc import Callable, Sequence
from typing import Final

import torch
from torch import Tensor

from calibrate.devices.stopwatch import Action
from calibrate.kernels.formulas import Unsupported
from calibrate.kernels.pytorch_ops.actions import Kept
from calibrate.kernels.pytorch_ops.random_tensors import TORCH, normal
from clustersim.common.dtypes import DType
from clustersim.model.kernels import MemoryBoundOp, MemoryBoundShape

Step = Callable[[], object]

LARGEST: Final = 2**22  # elements of a tensor; models of some GB have few larger ones


def tensors(device: torch.device, dtype: DType, elements: int) -> list[Tensor]:
    """Random tensors that have so many elements together."""
    whole, rest = divmod(elements, LARGEST)
    return [normal(device, dtype, size) for size in [LARGEST] * whole + [rest] * (rest > 0)]


def prepare(shape: MemoryBoundShape, dtype: DType, device: torch.device) -> Action:
    """An update, or the norm or the clipping of gradients; raise Unsupported where PyTorch has no such formats."""
    match shape.routine:
        case MemoryBoundOp.GRADIENT_NORM:
            gradients = tensors(device, dtype, shape.elements)
            return Kept(lambda: torch.linalg.vector_norm(torch.stack(torch._foreach_norm(gradients, 2.0))))
        case MemoryBoundOp.GRADIENT_CLIP:
            gradients = tensors(device, dtype, shape.elements)
            factor = torch.ones((), device=device)  # multiplied whatever it is, and leaves them as they are
            return Kept(lambda: torch._foreach_mul_(gradients, factor))
    return _update(shape, dtype, device)


def _update(shape: MemoryBoundShape, dtype: DType, device: torch.device) -> Action:
    made, moments, *copies = shape.formats
    if TORCH[moments] is not TORCH[dtype]:
        raise Unsupported(f"moments in {moments.value} of weights in {dtype.value}: PyTorch's optimizers have none")
    weights = tensors(device, dtype, shape.elements)
    gradients = tensors(device, dtype, shape.elements)
    for weight, gradient in zip(weights, gradients, strict=True):
        weight.requires_grad_().grad = gradient
    steps: list[Step] = []
    if TORCH[made] is not TORCH[dtype]:
        steps.append(_copying(tensors(device, made, shape.elements), gradients))
    steps.append(_optimizer(shape, weights).step)
    sources = [weight.detach() for weight in weights]
    steps += [_copying(sources, tensors(device, copy, shape.elements)) for copy in copies]
    return Steps(steps)


class Steps:
    """Run one after the other."""

    def __init__(self, steps: Sequence[Step]) -> None:
        self._steps = steps

    def __call__(self) -> None:
        """Run all of them once."""
        for step in self._steps:
            step()


def _copying(sources: list[Tensor], copies: list[Tensor]) -> Step:
    return lambda: torch._foreach_copy_(copies, sources)


def _optimizer(shape: MemoryBoundShape, weights: list[Tensor]) -> torch.optim.Optimizer:
    fused, foreach = (True, None) if shape.fused else (None, True)
    if shape.routine is MemoryBoundOp.ADAM:
        return torch.optim.AdamW(weights, lr=1e-4, fused=fused, foreach=foreach)
    return torch.optim.SGD(weights, lr=1e-4, momentum=0.9, fused=fused, foreach=foreach)
