"""How do gradients become new weights? Buffers of gradients, clipping, and torch's own optimizers.

Gradients stay in memory from step to step and are zeroed, so that autograd adds to them in place. Where they are
wider than the weights that compute, autograd's gradient is added to a buffer (`accumulate`) and freed at once. The
optimizer updates the master weights if there are any, and the compute weights are refreshed from them. Weights whose
gradients a strategy spreads over ranks (DTensors) and those that it does not form groups of their own, since torch's
lists of tensors (foreach) take one kind only.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from calibrate.check.formats import TORCH
from calibrate.check.labels import labelled, optimizer
from calibrate.check.linear import Linear
from clustersim.workload.kernels import Routine
from clustersim.workload.training import Optimizer, Training

_RATE, _MOMENTUM, _LIMIT = 1e-4, 0.9, 1.0
_ROUTINES = {Optimizer.ADAM: Routine.ADAM, Optimizer.SGD: Routine.SGD}
OverRanks = Callable[[Tensor], Tensor]
"""Sum of squares of one rank's own gradients to that of the whole model's."""


@dataclass
class Update:
    """Gradients and optimizer of one rank's weights.

    over_ranks: sums squares of gradients over the ranks that hold other parts of the model.
    """

    weights: Sequence[nn.Parameter]
    training: Training
    over_ranks: OverRanks = lambda squares: squares
    _masters: list[nn.Parameter] = field(default_factory=list)

    def __post_init__(self) -> None:
        formats = self.training.recipe.weights
        wide, narrow = TORCH[formats.held], TORCH[formats.stored]
        self.weights = list(self.weights)
        if wide is narrow or all(weight.dtype is wide for weight in self.weights):
            self._masters = self.weights
            for weight in self.weights:
                weight.grad = torch.zeros_like(weight)
        else:
            self._masters = [_master(weight, wide) for weight in self.weights]
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
            kept += [each for each in state.values() if isinstance(each, Tensor)]
        return kept

    def _groups(self) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
        spread = [weight for weight in self._masters if isinstance(weight.detach(), DTensor)]
        plain = [weight for weight in self._masters if not isinstance(weight.detach(), DTensor)]
        return spread, plain

    def _clip(self) -> None:
        """Fused optimizers scale by the way, if the norm exceeds the limit; else all gradients are scaled."""
        with labelled(optimizer(Routine.GRADIENT_NORM)):
            norm = self._norm()
        if self.training.fused and isinstance(self._optimizer, torch.optim.AdamW):
            self._optimizer.grad_scale = (norm / _LIMIT).clamp(min=1.0)  # type: ignore[attr-defined]
            return
        with labelled(optimizer(Routine.GRADIENT_CLIP)):
            for group in filter(None, self._groups()):
                clip_grads_with_norm_(group, _LIMIT, norm, foreach=True)

    def _norm(self) -> Tensor:
        spread, plain = ([weight.grad for weight in group if weight.grad is not None] for group in self._groups())
        squares = []
        if spread:
            norm = get_total_norm(spread, foreach=True)
            squares.append(norm.full_tensor() ** 2 if isinstance(norm, DTensor) else norm**2)
        if plain:
            squares.append(get_total_norm(plain, foreach=True) ** 2)
        return self.over_ranks(torch.stack(squares).sum()).sqrt()


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
