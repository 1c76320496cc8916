"""Interleaved 1F1B: 1F1B over several model chunks per rank.

Rank r of p holds the v stages r, r+p, ..., r+(v-1)p. Microbatches go in rounds: a round's microbatches pass a
rank's first chunk, then its second, and so on. The warm-up is (v - 1) rounds of one chunk and two more
forwards for every rank that follows. With equal stages the bubble is (p - 1)/(v m) of the ideal time where a
round is p microbatches.

Megatron-LM wants microbatches in multiples of p: rounds of exactly p. torch.distributed.pipelining relaxes
this: there are max(1, m // p) rounds, and m must be a multiple of that number. This is torch's rule; where m
is a multiple of p, it is Megatron's order too. (Old Megatron ran all forwards first where m = p; its newer
versions do not.) Reference: Narayanan et al. 2021 (arXiv:2104.04473), section 2.2.2, figure 4 bottom;
Megatron-LM's `forward_backward_pipelining_with_interleaving`; torch's ScheduleInterleaved1F1B.

Rounds of more than p microbatches (`microbatch_group_size`) lie between this order and the breadth-first one, which
has one round of all: they warm up with more microbatches, whose activations they hold, and hide the messages
between stages behind them. The last round takes what is left, but not fewer than p. Reference: Llama 3's flexible N
(arXiv:2407.21783, section 3.3.2, figure 6); Megatron-LM's `microbatch_group_size_per_vp_stage`
(megatron/core/pipeline_parallel/schedules.py, `get_schedule_table`).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from clustersim.common.errors import InputError
from clustersim.program.action import Action, ActionKind, PipelineOrder
from clustersim.program.placement import Placement, looped_placement
from clustersim.schedules.interleave_1f1b import interleave_1f1b
from clustersim.schedules.schedule import ScheduleTraits, require_positive


@dataclass(frozen=True, slots=True)
class Interleaved(ScheduleTraits):
    """Interleaved 1F1B with `chunks` (at least 2) model chunks per rank.

    microbatch_group_size: microbatches of a round, at least as many as ranks; None: as many as ranks, by torch's rule.
    """

    has_whole_backwards: ClassVar[bool] = True
    is_periodic: ClassVar[bool] = True
    chunks: int
    microbatch_group_size: int | None = None
    name: ClassVar[str] = "interleaved"

    def __post_init__(self) -> None:
        if self.chunks < 2:
            raise InputError(
                f"schedule interleaved needs at least 2 model chunks per rank, not {self.chunks}; with 1 it is 1f1b"
            )

    def round_size(self, ranks: int) -> int:
        """Microbatches of a round."""
        return self.microbatch_group_size or ranks

    def placement(self, ranks: int) -> Placement:
        """Stages in a loop: rank r of p holds r, r + p, ..."""
        return looped_placement(ranks, self.chunks)

    def require_supported(self, ranks: int, microbatches: int) -> None:
        """Raise InputError where microbatches do not divide into rounds."""
        require_positive(ranks, microbatches)
        if self.microbatch_group_size is not None:
            _require_group_size(self.microbatch_group_size, ranks, microbatches)
        elif not _is_supported(ranks, microbatches):
            raise InputError(_describe_refusal(ranks, microbatches))

    def order(self, ranks: int, microbatches: int) -> PipelineOrder:
        """The actions of every pipeline rank; raise InputError as `require_supported` does."""
        self.require_supported(ranks, microbatches)
        placement = self.placement(ranks)
        return tuple(self._rank_order(rank, placement, microbatches) for rank in range(ranks))

    def _rank_order(self, rank: int, placement: Placement, microbatches: int) -> tuple[Action, ...]:
        ranks, stages = placement.pipeline_size, placement.stages_on_rank(rank)
        round_size = self.microbatch_group_size or microbatches // _round_count(ranks, microbatches)
        warmup = (self.chunks - 1) * round_size + 2 * (ranks - 1 - rank)
        forwards = _round_passes(ActionKind.FORWARD, stages, microbatches, round_size)
        backwards = _round_passes(ActionKind.BACKWARD, stages[::-1], microbatches, round_size)
        return interleave_1f1b(forwards, backwards, min(warmup, len(forwards)))


def _round_passes(kind: ActionKind, stages: Sequence[int], microbatches: int, round_size: int) -> list[Action]:
    """Rounds of `round_size` microbatches through `stages`, one stage after the other."""
    return [
        Action(stage, kind, microbatch)
        for round_start in range(0, microbatches, round_size)
        for stage in stages
        for microbatch in range(round_start, min(round_start + round_size, microbatches))
    ]


def _require_group_size(group_size: int, ranks: int, microbatches: int) -> None:
    """Raise InputError unless every round has a microbatch for each rank (Megatron-LM refuses others, too)."""
    remainder = microbatches % group_size
    if ranks <= group_size <= microbatches and (remainder == 0 or remainder >= ranks):
        return
    legal = [
        size for size in range(ranks, microbatches + 1) if microbatches % size == 0 or microbatches % size >= ranks
    ]
    nearest = sorted(sorted(legal, key=lambda size: abs(size - group_size))[:2])
    advice = f"; {' and '.join(map(str, nearest))} would do" if nearest else ""
    raise InputError(
        f"interleaved: microbatch_group_size {group_size} does not split {microbatches} microbatches into rounds of at "
        f"least {ranks}, one for each pipeline rank{advice}"
    )


def _round_count(ranks: int, microbatches: int) -> int:
    return max(1, microbatches // ranks)


def _is_supported(ranks: int, microbatches: int) -> bool:
    return microbatches % _round_count(ranks, microbatches) == 0


def _describe_refusal(ranks: int, microbatches: int) -> str:
    round_count = _round_count(ranks, microbatches)
    fewer = next(m for m in range(microbatches - 1, 0, -1) if _is_supported(ranks, m))
    more = next(m for m in range(microbatches + 1, microbatches + ranks + 1) if _is_supported(ranks, m))
    return (
        f"interleaved on {ranks} pipeline ranks cannot split {microbatches} microbatches into {round_count} "
        f"equal rounds; {fewer} and {more} microbatches fit"
    )
