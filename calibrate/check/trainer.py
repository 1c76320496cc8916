"""What does a real training step do? The seam between the steps that are timed and the strategies that run them.

Every strategy has weights with gradients (`update`) and runs forward and backward of all microbatches (`passes`).
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn

from calibrate.check.phase_timer import Part, Timeline
from calibrate.check.torch_dtypes import TORCH
from calibrate.check.weight_update import Update
from clustersim.parallel.plan import Plan


@dataclass(frozen=True, slots=True)
class Batch:
    """tokens, targets: [microbatches, sequences, tokens] of this replica."""

    tokens: Tensor
    targets: Tensor


class Trainer(Protocol):
    """A model that this process trains, alone or with others."""

    @property
    def model(self) -> nn.Module:
        """The modules of this rank."""

    @property
    def update(self) -> Update:
        """Gradients and optimizer."""

    def passes(self, batch: Batch, timeline: Timeline) -> None:
        """Forward and backward of every microbatch."""


@dataclass(slots=True)
class Loop:
    """Forward and backward, microbatch after microbatch. around: entered for each, told whether it is the last."""

    model: nn.Module
    update: Update
    around: Callable[[bool], AbstractContextManager[object]] = lambda _last: nullcontext()

    def passes(self, batch: Batch, timeline: Timeline) -> None:
        """Gradients of the mean over microbatches add up in the update's buffers."""
        count = len(batch.tokens)
        for number in range(count):
            with self.around(number == count - 1):
                with timeline.of(Part.FORWARD):
                    loss = self.model(batch.tokens[number], batch.targets[number]) / count
                with timeline.of(Part.BACKWARD):
                    loss.backward()


def step(trainer: Trainer, batch: Batch, timeline: Timeline) -> None:
    """One training step."""
    with timeline.of(None):
        trainer.update.zero()
        trainer.passes(batch, timeline)
        with timeline.of(Part.OPTIMIZER):
            trainer.update.step()


def random_batch(plan: Plan, device: torch.device) -> Batch:
    """Random tokens of one replica's part of the global batch."""
    size = (plan.microbatches, plan.training.microbatch, plan.training.sequence)
    tokens, targets = (torch.randint(plan.model.vocab, size, device=device) for _ in range(2))
    return Batch(tokens, targets)


@contextmanager
def building(plan: Plan, device: torch.device, *, held_weights: bool = False) -> Iterator[None]:
    """Make weights on the device in the format that computes, or in that which the optimizer holds."""
    formats, before = plan.training.recipe.weight_formats, torch.get_default_dtype()
    torch.set_default_dtype(TORCH[formats.updated if held_weights else formats.stored])
    try:
        with device:
            yield
    finally:
        torch.set_default_dtype(before)
