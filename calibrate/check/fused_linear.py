"""How does a linear layer add its weight gradient to the accumulated one?

Unfused as autograd does it: the product, then AccumulateGrad's addition. Fused, the product's epilogue adds it
(Megatron-LM, `LinearWithGradAccumulationAndAsyncCommunication` with gradient accumulation fusion): here `addmm` into
the gradient itself, for which autograd must not see the weight. That needs a gradient that is there already, so it is
used where the strategy gives one (`into`); DDP, FSDP and DTensor reduce what autograd hands them, unfused.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from calibrate.check.operator_labels import PRODUCT, labelled


class Linear(nn.Linear):
    """A linear layer. fused: its weight gradient may be added in the product's epilogue, to `into` if that is given."""

    def __init__(self, inputs: int, outputs: int, *, bias: bool, fused: bool) -> None:
        super().__init__(inputs, outputs, bias=bias)
        self.fused = fused
        self.into: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        """[.., inputs] to [.., outputs]."""
        with labelled(PRODUCT):
            if self.into is None:
                return functional.linear(x, self.weight, self.bias)
            made: Tensor = _Accumulating.apply(x, self.weight, self.bias, self.into)  # type: ignore[no-untyped-call]
            return made


class _Accumulating(torch.autograd.Function):
    """A linear layer that adds its weight gradient to a tensor."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, into: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.into, ctx.biased = into, bias is not None
        return functional.linear(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, Tensor | None, None]:
        x, weight = ctx.saved_tensors
        gradient = gradients[0]
        rows = gradient.flatten(0, -2)
        _add_product(ctx.into, rows.t(), x.flatten(0, -2))
        return gradient @ weight, None, rows.sum(0) if ctx.biased else None, None


def _add_product(into: Tensor, a: Tensor, b: Tensor) -> None:
    """Add a b to a tensor, in the product's epilogue also where that is wider."""
    if into.dtype is a.dtype:
        into.addmm_(a, b)
    else:
        torch.addmm(into, a, b, into.dtype, out=into)
