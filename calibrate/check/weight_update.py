"""Weight update of one rank: gradient buffers, clipping, and torch's own optimizers.

Gradients persist from step to step and are zeroed, so that autograd accumulates in place. If they have
higher precision than the compute weights, autograd's gradient is added to a buffer (`accumulate_kernels`) and freed
at once. The optimizer updates the master weights if there are any, and the compute weights are refreshed
from them. Weights whose gradients a strategy shards over ranks (DTensors) and those that it does not are
separate parameter groups, since torch's foreach operations take one kind only.

With fused kernels gradients are clipped as Megatron-LM does it (`clip_grads.py`,
`clip_grad_by_total_norm_fp32`): the host reads the norm, and scales the gradients by one more kernel if it
exceeds the limit. With foreach kernels as `torch.nn.utils.clip_grad_norm_` does: they are scaled
unconditionally.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Final

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from calibrate.check.fused_linear import FusedWgradLinear
from calibrate.check.operator_labels import optimizer_label, record_label
from calibrate.check.torch_dtypes import TRAINING_DTYPES
from clustersim.model.kernels import MemoryBoundOp
from clustersim.model.optimizers import Optimizer
from clustersim.model.training import FusedKernel, Training

_LEARNING_RATE, _MOMENTUM = 1e-4, 0.9
MAX_GRADIENT_NORM: Final = 1e3
"""Larger than the norm of random weights, as in a steady run, in which the limit is rarely exceeded."""
_OPTIMIZER_OPS = {Optimizer.ADAM: MemoryBoundOp.ADAM, Optimizer.SGD: MemoryBoundOp.SGD}
SumOverRanks = Callable[[Tensor], Tensor]
"""Reduces the sum of squares of one rank's gradients to that of the full model's."""


def all_reduce_squares(squares: Tensor) -> Tensor:
    """The sum over all ranks, where each holds other parameters."""
    dist.all_reduce(squares)
    return squares


@dataclass
class WeightUpdate:
    """Gradients and optimizer of one rank's weights.

    sum_over_ranks: sums squares of gradients over the ranks that hold other shards of the model; local_weights:
    the weights that no other rank holds, if only some are such.
    """

    weights: Sequence[nn.Parameter]
    training: Training
    sum_over_ranks: SumOverRanks = lambda squares: squares
    local_weights: Sequence[nn.Parameter] = ()
    _masters: list[nn.Parameter] = field(default_factory=list)
    _local_masters: list[nn.Parameter] = field(default_factory=list)

    def __post_init__(self) -> None:
        formats = self.training.recipe.weight_formats
        master_dtype, compute_dtype = TRAINING_DTYPES[formats.updated], TRAINING_DTYPES[formats.stored]
        self.weights = list(self.weights)
        if master_dtype is compute_dtype or all(weight.dtype is master_dtype for weight in self.weights):
            self._masters = self.weights
            for weight in self.weights:
                weight.grad = torch.zeros_like(weight)
        else:
            self._masters = [_master_weight(weight, master_dtype) for weight in self.weights]
        local_ids = {id(weight) for weight in self.local_weights}
        pairs = zip(self.weights, self._masters, strict=True)
        self._local_masters = [master for weight, master in pairs if id(weight) in local_ids]
        self._optimizer = _build_optimizer(self.training, [group for group in self._parameter_groups() if group])
        self.zero_gradients()

    def accumulate_in_epilogues(self, modules: nn.Module) -> None:
        """Let fused linear layers accumulate into these gradients themselves."""
        buffers = {id(weight): master.grad for weight, master in zip(self.weights, self._masters, strict=True)}
        for module in modules.modules():
            if isinstance(module, FusedWgradLinear) and module.fused:
                module.gradient_buffer = buffers[id(module.weight)]

    def zero_gradients(self) -> None:
        """Zero the gradients in place."""
        for group in self._parameter_groups():
            gradients = [weight.grad for weight in group if weight.grad is not None]
            if gradients:
                torch._foreach_zero_(gradients)

    def update_weights(self) -> None:
        """Clip, update, and refresh the compute weights."""
        if self.training.gradient_clipping:
            self._clip_gradients()
        with record_label(optimizer_label(_OPTIMIZER_OPS[self.training.scalar_optimizer])):
            self._optimizer.step()
            if self._masters is not self.weights:
                with torch.no_grad():
                    torch._foreach_copy_(list(self.weights), list(self._masters))

    def persistent_tensors(self) -> list[Tensor]:
        """Every tensor that persists from step to step: weights, gradients, masters and moments."""
        tensors: list[Tensor] = [*self.weights, *self._masters]
        tensors += [weight.grad for weight in self._masters if weight.grad is not None]
        for state in self._optimizer.state.values():
            tensors += [value for value in state.values() if isinstance(value, Tensor)]
        return tensors

    def _parameter_groups(self) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
        sharded = [weight for weight in self._masters if isinstance(weight.detach(), DTensor)]
        plain = [weight for weight in self._masters if not isinstance(weight.detach(), DTensor)]
        return sharded, plain

    def _clip_gradients(self) -> None:
        """Scale gradients always, or only if their norm exceeds the limit, for which the host waits."""
        with record_label(optimizer_label(MemoryBoundOp.GRADIENT_NORM)):
            norm = self._gradient_norm()
        if not self.training.overheads.scale_clipped_gradients and float(norm) <= MAX_GRADIENT_NORM:
            return
        with record_label(optimizer_label(MemoryBoundOp.GRADIENT_CLIP)):
            for group in filter(None, self._parameter_groups()):
                clip_grads_with_norm_(group, MAX_GRADIENT_NORM, norm, foreach=True)

    def _gradient_norm(self) -> Tensor:
        """Norm of the full model's gradients."""
        local_ids = {id(weight) for weight in self._local_masters}
        sharded, plain = self._parameter_groups()
        shared = [weight for weight in plain if id(weight) not in local_ids]
        squares = torch.stack([_sum_of_squares(group) for group in (sharded, shared) if group]).sum()
        if self._local_masters:
            return (squares + self.sum_over_ranks(_sum_of_squares(self._local_masters))).sqrt()
        return self.sum_over_ranks(squares).sqrt()


def _sum_of_squares(weights: Sequence[nn.Parameter]) -> Tensor:
    """Sum of squares of gradients."""
    norm = get_total_norm([weight.grad for weight in weights if weight.grad is not None], foreach=True)
    return norm.full_tensor() ** 2 if isinstance(norm, DTensor) else norm**2


def _master_weight(weight: nn.Parameter, dtype: torch.dtype) -> nn.Parameter:
    """A high-precision copy of a weight, whose gradient accumulates the weight's as soon as it is complete."""
    master = nn.Parameter(weight.detach().to(dtype))
    master.grad = torch.zeros_like(master)

    def accumulate(parameter: Tensor) -> None:
        if master.grad is not None and parameter.grad is not None:
            master.grad.add_(parameter.grad)
            parameter.grad = None

    weight.register_post_accumulate_grad_hook(accumulate)  # type: ignore[no-untyped-call]
    return master


def _build_optimizer(training: Training, groups: Sequence[list[nn.Parameter]]) -> torch.optim.Optimizer:
    parameters = [{"params": group} for group in groups]
    fused = training.fuses(FusedKernel.OPTIMIZER) or None
    if training.optimizer is Optimizer.ADAM:
        return torch.optim.AdamW(parameters, lr=_LEARNING_RATE, fused=fused, foreach=not fused)
    return torch.optim.SGD(parameters, lr=_LEARNING_RATE, momentum=_MOMENTUM, fused=fused, foreach=not fused)
