"""How do gradients become new weights? Buffers of gradients, clipping, and torch's own optimizers.

Gradients stay in memory from step to step and are zeroed, so that autograd adds to them in place. Where they are
wider than the weights that compute, autograd's gradient is added to a buffer (`accumulate_kernels`) and freed at once. The
optimizer updates the master weights if there are any, and the compute weights are refreshed from them. Weights whose
gradients a strategy spreads over ranks (DTensors) and those that it does not form groups of their own, since torch's
lists of tensors (foreach) take one kind only.

Beside fused kernels gradients are clipped as Megatron-LM does it (`clip_grads.py`, `clip_grad_by_total_norm_fp32`): the
host reads the norm, and scales them by one more kernel where it exceeds the limit. Beside foreach kernels as
`torch.nn.utils.clip_grad_norm_` does: they are scaled whatever it is.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Final

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from calibrate.check.fused_linear import Linear
from calibrate.check.operator_labels import labelled, optimizer
from calibrate.check.torch_dtypes import TORCH
from clustersim.model.kernels import MemoryBoundOp
from clustersim.model.training import Optimizer, Training

_RATE, _MOMENTUM = 1e-4, 0.9
LIMIT: Final = 1e3
"""Of the norm: above what random weights have, as in a steady run, in which it is rarely exceeded."""
_ROUTINES = {Optimizer.ADAM: MemoryBoundOp.ADAM, Optimizer.SGD: MemoryBoundOp.SGD}
OverRanks = Callable[[Tensor], Tensor]
"""Sum of squares of one rank's own gradients to that of the whole model's."""


@dataclass
class Update:
    """Gradients and optimizer of one rank's weights.

    over_ranks: sums squares of gradients over the ranks that hold other parts of the model; own: the weights that no
    other rank holds, where only some are such.
    """

    weights: Sequence[nn.Parameter]
    training: Training
    over_ranks: OverRanks = lambda squares: squares
    own: Sequence[nn.Parameter] = ()
    _masters: list[nn.Parameter] = field(default_factory=list)
    _own: list[nn.Parameter] = field(default_factory=list)

    def __post_init__(self) -> None:
        formats = self.training.recipe.weight_formats
        wide, narrow = TORCH[formats.updated], TORCH[formats.stored]
        self.weights = list(self.weights)
        if wide is narrow or all(weight.dtype is wide for weight in self.weights):
            self._masters = self.weights
            for weight in self.weights:
                weight.grad = torch.zeros_like(weight)
        else:
            self._masters = [_master(weight, wide) for weight in self.weights]
        own = {id(weight) for weight in self.own}
        both = zip(self.weights, self._masters, strict=True)
        self._own = [master for weight, master in both if id(weight) in own]
        self._optimizer = _optimizer(self.training, [group for group in self._groups() if group])
        self.zero()

    def accumulate_in_epilogues(self, modules: nn.Module) -> None:
        """Let fused linear layers add to these gradients themselves."""
        buffers = {id(weight): master.grad for weight, master in zip(self.weights, self._masters, strict=True)}
        for module in modules.modules():
            if isinstance(module, Linear) and module.fused:
                module.into = buffers[id(module.weight)]

    def zero(self) -> None:
        """Zero the gradients in place."""
        for group in self._groups():
            gradients = [weight.grad for weight in group if weight.grad is not None]
            if gradients:
                torch._foreach_zero_(gradients)

    def step(self) -> None:
        """Clip, update, and refresh the weights that compute."""
        if self.training.gradient_clipping:
            self._clip()
        with labelled(optimizer(_ROUTINES[self.training.optimizer])):
            self._optimizer.step()
            if self._masters is not self.weights:
                with torch.no_grad():
                    torch._foreach_copy_(list(self.weights), list(self._masters))

    def states(self) -> list[Tensor]:
        """Every tensor that stays from step to step: weights, gradients, masters and moments."""
        kept: list[Tensor] = [*self.weights, *self._masters]
        kept += [weight.grad for weight in self._masters if weight.grad is not None]
        for state in self._optimizer.state.values():
            kept += [item for item in state.values() if isinstance(item, Tensor)]
        return kept

    def _groups(self) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
        spread = [weight for weight in self._masters if isinstance(weight.detach(), DTensor)]
        plain = [weight for weight in self._masters if not isinstance(weight.detach(), DTensor)]
        return spread, plain

    def _clip(self) -> None:
        """Fused optimizers scale where the norm exceeds the limit, for which the host waits; else whatever it is."""
        with labelled(optimizer(MemoryBoundOp.GRADIENT_NORM)):
            norm = self._norm()
        if self.training.fused and float(norm) <= LIMIT:
            return
        with labelled(optimizer(MemoryBoundOp.GRADIENT_CLIP)):
            for group in filter(None, self._groups()):
                clip_grads_with_norm_(group, LIMIT, norm, foreach=True)

    def _norm(self) -> Tensor:
        """Of the whole model's gradients."""
        own = {id(weight) for weight in self._own}
        spread, plain = self._groups()
        common = [weight for weight in plain if id(weight) not in own]
        squares = torch.stack([_squares(group) for group in (spread, common) if group]).sum()
        if self._own:
            return (squares + self.over_ranks(_squares(self._own))).sqrt()
        return self.over_ranks(squares).sqrt()


def _squares(weights: Sequence[nn.Parameter]) -> Tensor:
    """The sum of squares of gradients."""
    norm = get_total_norm([weight.grad for weight in weights if weight.grad is not None], foreach=True)
    return norm.full_tensor() ** 2 if isinstance(norm, DTensor) else norm**2


def _master(weight: nn.Parameter, wide: torch.dtype) -> nn.Parameter:
    """A wider copy of a weight, with a gradient to which that of the weight is added as soon as it is complete."""
    master = nn.Parameter(weight.detach().to(wide))
    master.grad = torch.zeros_like(master)

    def accumulate(complete: Tensor) -> None:
        if master.grad is not None and complete.grad is not None:
            master.grad.add_(complete.grad)
            complete.grad = None

    weight.register_post_accumulate_grad_hook(accumulate)  # type: ignore[no-untyped-call]
    return master


def _optimizer(training: Training, groups: Sequence[list[nn.Parameter]]) -> torch.optim.Optimizer:
    parameters = [{"params": group} for group in groups]
    fused = training.fused or None
    if training.optimizer is Optimizer.ADAM:
        return torch.optim.AdamW(parameters, lr=_RATE, fused=fused, foreach=not fused)
    return torch.optim.SGD(parameters, lr=_RATE, momentum=_MOMENTUM, fused=fused, foreach=not fused)
