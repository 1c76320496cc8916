"""Zero-bubble schedule ZB-V: two chunks in a V, weight gradients fill what would be bubbles.

Rank r of p holds the stages r and 2p - 1 - r: the model goes down the ranks and comes back, so the first rank
has the embedding and the head, and a microbatch's backward begins where its forward ended. Backward is split
in two: `I` (the gradient of the input), for which the stage before waits, and `W` (of the weights), on which
nothing depends.

The order is the authors' for passes that take equally long, F = I = W, which is also what torch runs whatever
they take; rank r warms up with 2(p - r) - 1 forwards down, r pairs of both chunks, and p - r microbatches
that turn around. With F = I = W and at least 2p - 1 microbatches no rank ever waits between its first pass
and its last, and none keeps more than 2p half-stages' activations, what 1F1B keeps on its first rank. Ranks
begin and end one pass after each other, so the remaining bubble vanishes only across consecutive steps. With
fewer microbatches the order is that of 2p - 1, with the excess ones removed.
Reference: Qi et al. 2023, "Zero Bubble Pipeline Parallelism" (arXiv:2401.10241), section 6;
torch.distributed.pipelining.ScheduleZBVZeroBubble.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import count
from typing import ClassVar

from clustersim.program.action import Action, ActionKind, PipelineOrder
from clustersim.program.placement import Placement
from clustersim.schedules.schedule import ScheduleTraits

_F, _I, _W = ActionKind.FORWARD, ActionKind.INPUT_GRADIENT, ActionKind.WEIGHT_GRADIENT


@dataclass(frozen=True, slots=True)
class ZeroBubbleV(ScheduleTraits):
    """ZB-V. Any number of microbatches is legal."""

    is_periodic: ClassVar[bool] = True
    name: ClassVar[str] = "zb-v"

    @property
    def ends_staggered(self) -> bool:
        """Ranks begin and end one pass after each other."""
        return True

    def placement(self, ranks: int) -> Placement:
        """Down the ranks and back."""
        return Placement((*range(ranks), *reversed(range(ranks))))

    def order(self, ranks: int, microbatches: int) -> PipelineOrder:
        """The actions of every pipeline rank."""
        self.require_supported(ranks, microbatches)
        padded_microbatches = max(2 * ranks - 1, microbatches)
        return tuple(
            tuple(
                action for action in _rank_order(rank, ranks, padded_microbatches) if action.microbatch < microbatches
            )
            for rank in range(ranks)
        )


class _ZbvChunk:
    """A stage, and the index of its next microbatch for each kind of pass."""

    def __init__(self, stage: int) -> None:
        self._stage = stage
        self._next = {kind: count() for kind in (_F, _I, _W)}

    def next_passes(self, *kinds: ActionKind) -> Iterator[Action]:
        """The next pass of each of these kinds."""
        for kind in kinds:
            yield Action(self._stage, kind, next(self._next[kind]))


def _rank_order(rank: int, ranks: int, microbatches: int) -> Iterator[Action]:
    """The actions of one rank; for at least 2 * ranks - 1 microbatches."""
    down, up = _ZbvChunk(rank), _ZbvChunk(2 * ranks - 1 - rank)
    remaining_ranks = ranks - rank  # ranks from this one to the last
    yield from down.next_passes(*[_F] * (2 * remaining_ranks - 1))
    for _ in range(rank):
        yield from up.next_passes(_F)
        yield from down.next_passes(_F)
    for _ in range(remaining_ranks):
        yield from up.next_passes(_F, _I, _W)
    yield from _steady_state(down, up, microbatches - ranks, forwards=microbatches - (2 * ranks - rank - 1))
    for _ in range(rank):
        yield from down.next_passes(_I)
        yield from up.next_passes(_I)
    for _ in range(remaining_ranks):
        yield from down.next_passes(_I, _W)
    yield from up.next_passes(*[_W] * rank)
    yield from down.next_passes(*[_W] * rank)


def _steady_state(down: _ZbvChunk, up: _ZbvChunk, rounds: int, *, forwards: int) -> Iterator[Action]:
    """Steady state: one microbatch through both chunks in each direction; forwards down in the first rounds only."""
    for round_index in range(rounds):
        if round_index < forwards:
            yield from down.next_passes(_F)
        yield from down.next_passes(_I, _W)
        yield from up.next_passes(_F, _I, _W)
