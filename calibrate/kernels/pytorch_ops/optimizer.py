"""Optimizer updates and gradient clipping in PyTorch.

`torch.optim` in its fused or foreach implementation, over a list of tensors as a model has them. Gradients
in another format than the updated weights are converted first, and a copy of the weights in the compute
format is refreshed afterwards. Moments have the weights' format: PyTorch supports no other.
"""

from collections.abc import Callable, Sequence
from typing import Final

import torch
from torch import Tensor

from calibrate.devices.stopwatch import Action
from calibrate.kernels.formulas import UnsupportedKernel
from calibrate.kernels.pytorch_ops.actions import ResultRetainingAction
from calibrate.kernels.pytorch_ops.random_tensors import TORCH_DTYPES, normal_tensor
from clustersim.common.dtypes import DType
from clustersim.model.kernels import MemoryBoundOp, MemoryBoundShape

UpdateStep = Callable[[], object]

MAX_TENSOR_ELEMENTS: Final = 2**22  # elements of a tensor; models of a few GB have few larger ones


def random_parameters(device: torch.device, dtype: DType, elements: int) -> list[Tensor]:
    """Random tensors with this many elements in total."""
    full_count, remainder = divmod(elements, MAX_TENSOR_ELEMENTS)
    return [
        normal_tensor(device, dtype, size)
        for size in [MAX_TENSOR_ELEMENTS] * full_count + [remainder] * (remainder > 0)
    ]


def prepare_optimizer(shape: MemoryBoundShape, dtype: DType, device: torch.device) -> Action:
    """An update, or gradient norm or clipping; raise UnsupportedKernel if PyTorch has no such formats."""
    match shape.routine:
        case MemoryBoundOp.GRADIENT_NORM:
            gradients = random_parameters(device, dtype, shape.elements)
            return ResultRetainingAction(
                lambda: torch.linalg.vector_norm(torch.stack(torch._foreach_norm(gradients, 2.0)))
            )
        case MemoryBoundOp.GRADIENT_CLIP:
            gradients = random_parameters(device, dtype, shape.elements)
            factor = torch.ones(
                (), device=device
            )  # applied unconditionally; a factor of 1 leaves the gradients unchanged
            return ResultRetainingAction(lambda: torch._foreach_mul_(gradients, factor))
    return _update_action(shape, dtype, device)


def _update_action(shape: MemoryBoundShape, dtype: DType, device: torch.device) -> Action:
    gradient_dtype, moment_dtype, *copy_dtypes = shape.formats
    if TORCH_DTYPES[moment_dtype] is not TORCH_DTYPES[dtype]:
        raise UnsupportedKernel(
            f"moments in {moment_dtype.value} of weights in {dtype.value}: PyTorch's optimizers have none"
        )
    weights = random_parameters(device, dtype, shape.elements)
    gradients = random_parameters(device, dtype, shape.elements)
    for weight, gradient in zip(weights, gradients, strict=True):
        weight.requires_grad_().grad = gradient
    steps: list[UpdateStep] = []
    if TORCH_DTYPES[gradient_dtype] is not TORCH_DTYPES[dtype]:
        steps.append(_copy_step(random_parameters(device, gradient_dtype, shape.elements), gradients))
    steps.append(_build_optimizer(shape, weights).step)
    sources = [weight.detach() for weight in weights]
    steps += [_copy_step(sources, random_parameters(device, copy_dtype, shape.elements)) for copy_dtype in copy_dtypes]
    return SequentialAction(steps)


class SequentialAction:
    """Runs several steps one after the other."""

    def __init__(self, steps: Sequence[UpdateStep]) -> None:
        self._steps = steps

    def __call__(self) -> None:
        """Run all of them once."""
        for step in self._steps:
            step()


def _copy_step(sources: list[Tensor], copies: list[Tensor]) -> UpdateStep:
    return lambda: torch._foreach_copy_(copies, sources)


def _build_optimizer(shape: MemoryBoundShape, weights: list[Tensor]) -> torch.optim.Optimizer:
    fused, foreach = (True, None) if shape.fused else (None, True)
    if shape.routine is MemoryBoundOp.ADAM:
        return torch.optim.AdamW(weights, lr=1e-4, fused=fused, foreach=foreach)
    return torch.optim.SGD(weights, lr=1e-4, momentum=0.9, fused=fused, foreach=foreach)
