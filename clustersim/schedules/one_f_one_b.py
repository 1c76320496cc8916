"""In which order does 1F1B run passes? One backward after each forward, as soon as the pipeline is full.

Rank r of p warms up with p - 1 - r forwards, so it never keeps more than p - r microbatches' activations; the
bubble is GPipe's, (p - 1)/m of the ideal time with equal stages.
Reference: PipeDream-Flush (Narayanan et al. 2021, arXiv:2104.04473, section 2.2.1, figure 4 top);
Megatron-LM's `forward_backward_pipelining_without_interleaving` and
torch.distributed.pipelining.Schedule1F1B.
"""

from dataclasses import dataclass
from typing import ClassVar

from clustersim.program.action import BACKWARD, FORWARD, Action, PipelineOrder
from clustersim.schedules.interleave_1f1b import interleave_1f1b
from clustersim.schedules.schedule import OneStagePerRank


@dataclass(frozen=True, slots=True)
class OneFOneB(OneStagePerRank):
    """One forward, one backward. Any number of microbatches is legal; fewer than ranks only shorten the warm-up."""

    has_whole_backwards: ClassVar[bool] = True
    is_periodic: ClassVar[bool] = True
    name: ClassVar[str] = "1f1b"

    def order(self, ranks: int, microbatches: int) -> PipelineOrder:
        """The actions of every pipeline rank, in execution order; ranks: size of the pipeline."""
        self.require_supported(ranks, microbatches)
        return tuple(_rank_order(rank, min(ranks - 1 - rank, microbatches), microbatches) for rank in range(ranks))


def _rank_order(stage: int, warmup: int, microbatches: int) -> tuple[Action, ...]:
    """Actions of the rank that holds `stage`: forwards and backwards alternate (one stage, no interleaved pipeline)."""
    forwards = [Action(stage, FORWARD, microbatch) for microbatch in range(microbatches)]
    backwards = [Action(stage, BACKWARD, microbatch) for microbatch in range(microbatches)]
    return interleave_1f1b(forwards, backwards, warmup)
