"""What is run when a kernel is timed?

Something without arguments that computes a result and keeps it until it is run again, as a training step keeps what a
later kernel reads: so memory is not written that the allocator has just got back, still in a cache.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from calibrate.devices.stopwatch import Action
from calibrate.kernels.pytorch_ops.random_tensors import fill_normal


class ResultRetainingAction:
    """Run a computation; keep its result until the next run."""

    def __init__(self, compute: Callable[[], Any]) -> None:
        self._compute = compute
        self.result: Any = None

    def __call__(self) -> None:
        """Compute once."""
        self.result = None
        self.result = self._compute()


class RotatingAction:
    """Run one of several actions after the other, so that none finds its operands in a cache."""

    def __init__(self, actions: Sequence[Action]) -> None:
        self._actions = actions
        self._next = 0

    def __call__(self) -> None:
        """Run the next one."""
        self._actions[self._next]()
        self._next = (self._next + 1) % len(self._actions)


def backward_action(result: Tensor, inputs: Sequence[Tensor], gradient: Tensor | None = None) -> ResultRetainingAction:
    """The gradients of inputs, for a gradient of the result: random, where none is given; the graph is kept."""
    output_gradient = fill_normal(torch.empty_like(result)) if gradient is None else gradient
    return ResultRetainingAction(lambda: torch.autograd.grad(result, inputs, output_gradient, retain_graph=True))
