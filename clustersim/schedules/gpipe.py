"""GPipe: all forwards, then all backwards.

Every rank keeps the activations of all m microbatches at once. With equal stages, forward f and backward b,
the step lasts (m + p - 1)(f + b), so the bubble is (p - 1)/m of the ideal time m(f + b).
Reference: Huang et al. 2019 (arXiv:1811.06965), figure 2. Backwards run in ascending order of microbatches,
as in torch.distributed.pipelining.ScheduleGPipe; the paper's figure draws them descending, which takes as
long.
"""

from dataclasses import dataclass
from typing import ClassVar

from clustersim.program.action import Action, ActionKind, PipelineOrder
from clustersim.schedules.schedule import OneStagePerRank


@dataclass(frozen=True, slots=True)
class GPipe(OneStagePerRank):
    """All forwards, then all backwards. Any number of microbatches is legal."""

    has_whole_backwards: ClassVar[bool] = True
    name: ClassVar[str] = "gpipe"

    def order(self, ranks: int, microbatches: int) -> PipelineOrder:
        """The actions of every pipeline rank."""
        self.require_supported(ranks, microbatches)
        kinds = (ActionKind.FORWARD, ActionKind.BACKWARD)
        return tuple(
            tuple(Action(rank, kind, microbatch) for kind in kinds for microbatch in range(microbatches))
            for rank in range(ranks)
        )
