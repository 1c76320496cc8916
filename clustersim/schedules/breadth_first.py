"""Breadth-first pipeline parallelism: all microbatches through a chunk, then the next chunk.

Rank r of p holds the v stages r, r + p, ..., r + (v - 1)p, as in interleaved 1F1B. It runs all m forwards of
its first stage, then of its second, and so on; then all backwards of its last stage, and back. With equal
stages the bubble is (p - 1)/(v m) of the ideal time, as interleaved 1F1B's, but activations of all m
microbatches are kept on every stage. Its advantage: each stage's parameters are needed, and its gradients
complete, in one contiguous interval, so that sharded ones are gathered and reduced once per stage and
direction.

Any number of microbatches is supported; with fewer than p, a rank also waits between its chunks. Backwards
run in descending order of microbatches, as in torch.
Reference: Lamy-Poirier 2022, "Breadth-First Pipeline Parallelism" (arXiv:2211.05953);
torch.distributed.pipelining.ScheduleLoopedBFS.
"""

from dataclasses import dataclass
from typing import ClassVar

from clustersim.common.errors import InputError
from clustersim.program.action import Action, ActionKind, PipelineOrder
from clustersim.program.placement import Placement, looped_placement
from clustersim.schedules.schedule import ScheduleTraits


@dataclass(frozen=True, slots=True)
class BreadthFirst(ScheduleTraits):
    """Breadth-first order with `chunks` (at least 2) model chunks per rank."""

    has_whole_backwards: ClassVar[bool] = True
    chunks: int
    name: ClassVar[str] = "bfs"

    def __post_init__(self) -> None:
        if self.chunks < 2:
            raise InputError(
                f"schedule bfs needs at least 2 model chunks per rank, not {self.chunks}; with 1 it is gpipe"
            )

    def placement(self, ranks: int) -> Placement:
        """Stages in a loop: rank r of p holds r, r + p, ..."""
        return looped_placement(ranks, self.chunks)

    def order(self, ranks: int, microbatches: int) -> PipelineOrder:
        """The actions of every pipeline rank."""
        self.require_supported(ranks, microbatches)
        placement = self.placement(ranks)
        return tuple(_rank_order(placement.stages_on_rank(rank), microbatches) for rank in range(ranks))


def _rank_order(stages: tuple[int, ...], microbatches: int) -> tuple[Action, ...]:
    ascending = range(microbatches)
    forwards = [Action(stage, ActionKind.FORWARD, microbatch) for stage in stages for microbatch in ascending]
    backwards = [
        Action(stage, ActionKind.BACKWARD, microbatch) for stage in stages[::-1] for microbatch in ascending[::-1]
    ]
    return (*forwards, *backwards)
