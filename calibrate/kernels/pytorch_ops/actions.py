"""Actions that run a computation once when called.

An action has no arguments and retains its result until it is run again, as a training step retains what a
later kernel reads. So outputs are not written to memory that the allocator has just recycled and that is
still cached.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from calibrate.devices.stopwatch import Action
from calibrate.kernels.pytorch_ops.random_tensors import fill_normal


class ResultRetainingAction:
    """Runs a computation and retains its result until the next run."""

    def __init__(self, compute: Callable[[], Any]) -> None:
        self._compute = compute
        self.result: Any = None

    def __call__(self) -> None:
        """Run once."""
        self.result = None
        self.result = self._compute()


class RotatingAction:
    """Runs several actions in rotation, so that none finds its operands in a cache."""

    def __init__(self, actions: Sequence[Action]) -> None:
        self._actions = actions
        self._next = 0

    def __call__(self) -> None:
        """Run the next action."""
        self._actions[self._next]()
        self._next = (self._next + 1) % len(self._actions)


def backward_action(result: Tensor, inputs: Sequence[Tensor], gradient: Tensor | None = None) -> ResultRetainingAction:
    """Gradients of inputs for a gradient of the result (random if none is given); the graph is retained."""
    output_gradient = fill_normal(torch.empty_like(result)) if gradient is None else gradient
    return ResultRetainingAction(lambda: torch.autograd.grad(result, inputs, output_gradient, retain_graph=True))
