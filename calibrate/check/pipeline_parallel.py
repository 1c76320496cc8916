"""Pipeline-parallel training with torch.distributed.pipelining.

The scenario's schedule is torch's own of the same name. What stages do between microbatches (waiting,
receiving) is outside of the forward and backward phases. Losses are divided by the number of microbatches,
so gradients need no scaling.
"""

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from types import MappingProxyType
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe, ScheduleInterleaved1F1B

from calibrate.check.phase_timer import PhaseTimer, StepPhase
from calibrate.check.torch_model import TransformerStage, build_stage, mean_loss
from calibrate.check.trainer import TrainingBatch, construction_settings
from calibrate.check.weight_update import WeightUpdate, all_reduce_squares
from clustersim.parallel.plan import Plan
from clustersim.schedules.gpipe import GPipe
from clustersim.schedules.interleaved import Interleaved
from clustersim.schedules.one_f_one_b import OneFOneB
from clustersim.schedules.schedule import Schedule

TORCH_SCHEDULES: Final[Mapping[type[Schedule], Any]] = MappingProxyType(
    {GPipe: ScheduleGPipe, OneFOneB: Schedule1F1B, Interleaved: ScheduleInterleaved1F1B}
)


class _TimedStage(PipelineStage):
    """A stage whose forward and backward passes are timed."""

    timer: PhaseTimer | None = None

    def forward_one_chunk(self, *args: Any, **kwargs: Any) -> Any:
        """Forward of one microbatch."""
        with self.time_phase(StepPhase.FORWARD):
            return super().forward_one_chunk(*args, **kwargs)

    def backward_one_chunk(self, *args: Any, **kwargs: Any) -> Any:
        """Backward of one microbatch."""
        with self.time_phase(StepPhase.BACKWARD):
            return super().backward_one_chunk(*args, **kwargs)

    def time_phase(self, phase: StepPhase) -> AbstractContextManager[object]:
        """A context that attributes its time to a phase."""
        return nullcontext() if self.timer is None else self.timer.time_phase(phase)


class PipelineTrainer:
    """The stages of this rank and the schedule that runs them."""

    def __init__(self, plan: Plan, schedule: Schedule, device: torch.device) -> None:
        rank = dist.get_rank()
        with construction_settings(plan, device):
            modules: list[TransformerStage] = [build_stage(plan, stage) for stage in plan.stages_on_rank(rank)]
        self.model = nn.ModuleList(modules)
        self.weight_update = WeightUpdate(list(self.model.parameters()), plan.training, all_reduce_squares)
        self.weight_update.accumulate_in_epilogues(self.model)
        stage_count = len(plan.stages)
        stage_indices = [stage.index for stage in plan.stages_on_rank(rank)]
        self._stages = [
            _TimedStage(module, stage_index, stage_count, device)
            for module, stage_index in zip(modules, stage_indices, strict=True)
        ]
        self._plan, self._has_first_stage, self._has_last_stage = (
            plan,
            0 in stage_indices,
            stage_count - 1 in stage_indices,
        )
        local_stages = self._stages if plan.placement.max_chunks > 1 else self._stages[0]
        self._schedule = TORCH_SCHEDULES[type(schedule)](
            local_stages, plan.microbatches, loss_fn=self._loss, scale_grads=False
        )

    def run_passes(self, batch: TrainingBatch, timer: PhaseTimer) -> None:
        """Run all microbatches through the stages of this rank."""
        for stage in self._stages:
            stage.timer = timer
        inputs = (batch.tokens.flatten(0, 1),) if self._has_first_stage else ()
        target = batch.targets.flatten(0, 1) if self._has_last_stage else None
        self._schedule.step(*inputs, target=target, return_outputs=False)

    def _loss(self, logits: Tensor, targets: Tensor) -> Tensor:
        with self._stages[0].time_phase(StepPhase.FORWARD):
            return mean_loss(logits, targets, self._plan.training) / self._plan.microbatches
