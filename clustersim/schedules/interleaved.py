"""In which order does interleaved 1F1B work? 1F1B over several model chunks per rank.

Rank r of p holds the v stages r, r+p, ..., r+(v-1)p. Microbatches go in rounds: a round's microbatches pass a rank's
first chunk, then its second, and so on. The warm-up is (v - 1) rounds of one chunk and two more forwards for every
rank that follows. With equal stages the bubble is (p - 1)/(v m) of the ideal time where a round is p microbatches.

Megatron-LM wants microbatches in multiples of p: rounds of exactly p. torch.distributed.pipelining relaxes this:
there are max(1, m // p) rounds, and m must be a multiple of that number. This is torch's rule; where m is a multiple
of p, it is Megatron's order too. (Old Megatron ran all forwards first where m = p; its newer versions do not.)
Reference: Narayanan et al. 2021 (arXiv:2104.04473), section 2.2.2, figure 4 bottom; Megatron-LM's
`forward_backward_pipelining_with_interleaving`; torch's ScheduleInterleaved1F1B.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from clustersim.common.errors import InputError
from clustersim.program.action import Action, ActionKind, PipelineOrder
from clustersim.program.placement import Placement, looped_placement
from clustersim.schedules.interleave_1f1b import alternate
from clustersim.schedules.schedule import require_positive


@dataclass(frozen=True, slots=True)
class Interleaved:
    """Interleaved 1F1B with `chunks` (at least 2) model chunks per rank."""

    chunks: int
    name: ClassVar[str] = "interleaved"

    def __post_init__(self) -> None:
        if self.chunks < 2:
            raise InputError(
                f"schedule interleaved needs at least 2 model chunks per rank, not {self.chunks}; with 1 it is 1f1b"
            )

    def placement(self, ranks: int) -> Placement:
        """Stages in a loop: rank r of p holds r, r + p, ..."""
        return looped_placement(ranks, self.chunks)

    def require(self, ranks: int, microbatches: int) -> None:
        """Raise InputError where microbatches do not divide into rounds."""
        require_positive(ranks, microbatches)
        if not _legal(ranks, microbatches):
            raise InputError(_refusal(ranks, microbatches))

    def order(self, ranks: int, microbatches: int) -> PipelineOrder:
        """The actions of every pipeline rank; raise InputError as `require` does."""
        self.require(ranks, microbatches)
        placement = self.placement(ranks)
        return tuple(self._rank_order(rank, placement, microbatches) for rank in range(ranks))

    def _rank_order(self, rank: int, placement: Placement, microbatches: int) -> tuple[Action, ...]:
        ranks, stages = placement.pipeline_size, placement.stages_on_rank(rank)
        size = microbatches // _rounds(ranks, microbatches)
        warmup = (self.chunks - 1) * size + 2 * (ranks - 1 - rank)
        forwards = _passes(ActionKind.FORWARD, stages, microbatches, size)
        backwards = _passes(ActionKind.BACKWARD, stages[::-1], microbatches, size)
        return alternate(forwards, backwards, min(warmup, len(forwards)))


def _passes(kind: ActionKind, stages: Sequence[int], microbatches: int, size: int) -> list[Action]:
    """Rounds of `size` microbatches through `stages`, one stage after the other."""
    return [
        Action(stage, kind, microbatch)
        for first in range(0, microbatches, size)
        for stage in stages
        for microbatch in range(first, first + size)
    ]


def _rounds(ranks: int, microbatches: int) -> int:
    return max(1, microbatches // ranks)


def _legal(ranks: int, microbatches: int) -> bool:
    return microbatches % _rounds(ranks, microbatches) == 0


def _refusal(ranks: int, microbatches: int) -> str:
    rounds = _rounds(ranks, microbatches)
    fewer = next(m for m in range(microbatches - 1, 0, -1) if _legal(ranks, m))
    more = next(m for m in range(microbatches + 1, microbatches + ranks + 1) if _legal(ranks, m))
    return (
        f"interleaved on {ranks} pipeline ranks cannot split {microbatches} microbatches into {rounds} "
        f"equal rounds; {fewer} and {more} microbatches fit"
    )
