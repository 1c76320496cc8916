"""A real training step, and the interface between the timed steps and the strategies that run them.

Every strategy has weights with gradients (`weight_update`) and runs forward and backward of all microbatches
(`run_passes`).
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn

from calibrate.check.phase_timer import PhaseTimer, StepPhase
from calibrate.check.torch_dtypes import TRAINING_DTYPES
from calibrate.check.weight_update import WeightUpdate
from clustersim.parallel.plan import Plan


@dataclass(frozen=True, slots=True)
class TrainingBatch:
    """tokens, targets: [microbatches, sequences, tokens] of this replica."""

    tokens: Tensor
    targets: Tensor


class Trainer(Protocol):
    """A model that this process trains, by itself or with others."""

    @property
    def model(self) -> nn.Module:
        """The modules of this rank."""

    @property
    def weight_update(self) -> WeightUpdate:
        """Gradients and optimizer."""

    def run_passes(self, batch: TrainingBatch, timer: PhaseTimer) -> None:
        """Run forward and backward of every microbatch."""


@dataclass(slots=True)
class MicrobatchTrainer:
    """Forward and backward, microbatch by microbatch.

    microbatch_context: factory of a context for each microbatch, called with whether it is the last.
    """

    model: nn.Module
    weight_update: WeightUpdate
    microbatch_context: Callable[[bool], AbstractContextManager[object]] = lambda _last: nullcontext()

    def run_passes(self, batch: TrainingBatch, timer: PhaseTimer) -> None:
        """Run all microbatches; gradients of the mean over microbatches accumulate in the update's buffers."""
        microbatch_count = len(batch.tokens)
        for index in range(microbatch_count):
            with self.microbatch_context(index == microbatch_count - 1):
                with timer.time_phase(StepPhase.FORWARD):
                    loss = self.model(batch.tokens[index], batch.targets[index]) / microbatch_count
                with timer.time_phase(StepPhase.BACKWARD):
                    loss.backward()


def training_step(trainer: Trainer, batch: TrainingBatch, timer: PhaseTimer) -> None:
    """Run one training step."""
    with timer.time_phase(None):
        trainer.weight_update.zero_gradients()
        trainer.run_passes(batch, timer)
        with timer.time_phase(StepPhase.OPTIMIZER):
            trainer.weight_update.update_weights()


def random_batch(plan: Plan, device: torch.device) -> TrainingBatch:
    """Random tokens of one replica's share of the global batch."""
    size = (plan.microbatches, plan.training.microbatch, plan.training.sequence)
    tokens, targets = (torch.randint(plan.model.vocab, size, device=device) for _ in range(2))
    return TrainingBatch(tokens, targets)


@contextmanager
def construction_settings(plan: Plan, device: torch.device, *, optimizer_format: bool = False) -> Iterator[None]:
    """Create weights on the device in the compute format, or in the format that the optimizer updates."""
    formats, previous = plan.training.recipe.weight_formats, torch.get_default_dtype()
    torch.set_default_dtype(TRAINING_DTYPES[formats.updated if optimizer_format else formats.stored])
    try:
        with device:
            yield
    finally:
        torch.set_default_dtype(previous)
