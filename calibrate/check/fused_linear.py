"""Linear layer with optional gradient accumulation fusion.

Unfused as autograd does it: the weight-gradient matmul, then AccumulateGrad's addition. Fused, the matmul's
epilogue accumulates (Megatron-LM, `LinearWithGradAccumulationAndAsyncCommunication` with gradient
accumulation fusion): here `addmm` into the gradient itself, for which autograd must not see the weight. That
needs an existing gradient, so it is used where the strategy provides one (`gradient_buffer`); DDP, FSDP and
DTensor reduce what autograd returns, unfused.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from calibrate.check.operator_labels import MATMUL, record_label


class FusedWgradLinear(nn.Linear):
    """A linear layer whose weight gradient may be accumulated in the matmul's epilogue, into `gradient_buffer`."""

    def __init__(self, inputs: int, outputs: int, *, bias: bool, fused: bool) -> None:
        super().__init__(inputs, outputs, bias=bias)
        self.fused = fused
        self.gradient_buffer: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        """[.., inputs] to [.., outputs]."""
        with record_label(MATMUL):
            if self.gradient_buffer is None:
                return functional.linear(x, self.weight, self.bias)
            output: Tensor = _AccumulatingLinear.apply(x, self.weight, self.bias, self.gradient_buffer)  # type: ignore[no-untyped-call]
            return output


class _AccumulatingLinear(torch.autograd.Function):
    """A linear layer that adds its weight gradient to a tensor."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, gradient_buffer: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.gradient_buffer, ctx.gpt_biases = gradient_buffer, bias is not None
        return functional.linear(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, Tensor | None, None]:
        x, weight = ctx.saved_tensors
        gradient = gradients[0]
        flat_gradient = gradient.flatten(0, -2)
        _add_matmul(ctx.gradient_buffer, flat_gradient.t(), x.flatten(0, -2))
        return gradient @ weight, None, flat_gradient.sum(0) if ctx.gpt_biases else None, None


def _add_matmul(accumulator: Tensor, a: Tensor, b: Tensor) -> None:
    """Add a b to a tensor, in the matmul's epilogue also if the tensor has higher precision."""
    if accumulator.dtype is a.dtype:
        accumulator.addmm_(a, b)
    else:
        torch.addmm(accumulator, a, b, accumulator.dtype, out=accumulator)
