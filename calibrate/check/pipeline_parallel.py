"""How do ranks share the model by stages with torch.distributed.pipelining?

The scenario's schedule is torch's own of that name. What the stages do between microbatches (waiting, receiving) is
outside of forward and backward. Losses are divided by the number of microbatches, so that gradients need no scaling.
"""

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from types import MappingProxyType
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe, ScheduleInterleaved1F1B

from calibrate.check.phase_timer import Part, Timeline
from calibrate.check.torch_model import Transformer, build, loss
from calibrate.check.trainer import Batch, building
from calibrate.check.weight_update import Update
from clustersim.parallel.plan import Plan
from clustersim.schedules.gpipe import GPipe
from clustersim.schedules.interleaved import Interleaved
from clustersim.schedules.one_f_one_b import OneFOneB
from clustersim.schedules.schedule import Schedule

SCHEDULES: Final[Mapping[type[Schedule], Any]] = MappingProxyType(
    {GPipe: ScheduleGPipe, OneFOneB: Schedule1F1B, Interleaved: ScheduleInterleaved1F1B}
)


class _TimedStage(PipelineStage):
    """A stage whose passes are noted."""

    timeline: Timeline | None = None

    def forward_one_chunk(self, *args: Any, **kwargs: Any) -> Any:
        """One microbatch forward."""
        with self.timed(Part.FORWARD):
            return super().forward_one_chunk(*args, **kwargs)

    def backward_one_chunk(self, *args: Any, **kwargs: Any) -> Any:
        """One microbatch backward."""
        with self.timed(Part.BACKWARD):
            return super().backward_one_chunk(*args, **kwargs)

    def timed(self, part: Part) -> AbstractContextManager[object]:
        """What runs inside belongs to a part."""
        return nullcontext() if self.timeline is None else self.timeline.of(part)


class Staged:
    """The stages of this rank and the schedule that runs them."""

    def __init__(self, plan: Plan, schedule: Schedule, device: torch.device) -> None:
        rank = dist.get_rank()
        with building(plan, device):
            parts: list[Transformer] = [build(plan, stage) for stage in plan.stages_on_rank(rank)]
        self.model = nn.ModuleList(parts)
        self.update = Update(list(self.model.parameters()), plan.training, _summed)
        self.update.accumulate_in_epilogues(self.model)
        count = len(plan.stages)
        numbers = [stage.index for stage in plan.stages_on_rank(rank)]
        self._stages = [_TimedStage(part, n, count, device) for part, n in zip(parts, numbers, strict=True)]
        self._plan, self._first, self._last = plan, 0 in numbers, count - 1 in numbers
        whole = self._stages if plan.placement.max_chunks > 1 else self._stages[0]
        self._schedule = SCHEDULES[type(schedule)](whole, plan.microbatches, loss_fn=self._loss, scale_grads=False)

    def passes(self, batch: Batch, timeline: Timeline) -> None:
        """All microbatches through the stages of this rank."""
        for stage in self._stages:
            stage.timeline = timeline
        given = (batch.tokens.flatten(0, 1),) if self._first else ()
        target = batch.targets.flatten(0, 1) if self._last else None
        self._schedule.step(*given, target=target, return_outputs=False)

    def _loss(self, logits: Tensor, targets: Tensor) -> Tensor:
        with self._stages[0].timed(Part.FORWARD):
            return loss(logits, targets, self._plan.training) / self._plan.microbatches


def _summed(squares: Tensor) -> Tensor:
    dist.all_reduce(squares)
    return squares
