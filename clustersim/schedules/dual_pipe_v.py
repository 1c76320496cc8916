"""DualPipeV: DualPipe cut in half, two chunks in a V, forwards overlapped with backwards.

Rank r of p holds the stages r and 2p - 1 - r, as in ZB-V. It warms up, and from then on runs overlapped
pairs: a forward of one chunk with a backward of the other, so that the expert communication of the one is
hidden by the compute of the other. The warm-up and the cool-down split backward in two, `I` and `W`, where
others would wait.

With equal stages and passes (F = I = W), backward B and F&B a pair, the bubble of the rank that waits longest
is (p - 1)(F&B + B - 3W): the authors' (PP/2 - 1)(F&B + B - 3W), whose PP counts stages, of which there are
2p. A rank keeps the activations of at most 2p + 1 of them. There must be at least as many microbatches as
stages. Reference: deepseek-ai/DualPipe, README (table of bubbles) and dualpipe/dualpipev.py; DeepSeek-V3
Technical Report (arXiv:2412.19437), section 3.2.1; torch.distributed.pipelining.ScheduleDualPipeV, whose
order this is.
"""

from collections import deque
from dataclasses import dataclass, field
from itertools import count
from typing import ClassVar

from clustersim.common.errors import InputError
from clustersim.program.action import Action, ActionKind, OverlappedPair, PipelineOrder, ScheduleEntry
from clustersim.program.placement import Placement
from clustersim.schedules.schedule import ScheduleTraits, require_positive

_F, _B = ActionKind.FORWARD, ActionKind.BACKWARD
_I, _W = ActionKind.INPUT_GRADIENT, ActionKind.WEIGHT_GRADIENT


@dataclass(frozen=True, slots=True)
class DualPipeV(ScheduleTraits):
    """DualPipeV. Needs at least as many microbatches as stages."""

    is_periodic: ClassVar[bool] = True
    overlaps_passes: ClassVar[bool] = True
    may_pair_passes: ClassVar[bool] = True
    name: ClassVar[str] = "dualpipev"

    def placement(self, ranks: int) -> Placement:
        """Down the ranks and back."""
        return Placement((*range(ranks), *reversed(range(ranks))))

    def require_supported(self, ranks: int, microbatches: int) -> None:
        """Raise InputError where there are fewer microbatches than stages."""
        require_positive(ranks, microbatches)
        if microbatches < 2 * ranks:
            raise InputError(
                f"dualpipev on {ranks} pipeline ranks has {2 * ranks} stages and needs as many microbatches, not "
                f"{microbatches}"
            )

    def order(self, ranks: int, microbatches: int) -> PipelineOrder:
        """The entries of every pipeline rank; raise InputError as `require_supported` does."""
        self.require_supported(ranks, microbatches)
        return tuple(_DualPipeRank(rank, ranks).build_entries(microbatches) for rank in range(ranks))


class _DualPipeChunk:
    """A stage, and the index of its next microbatch in each direction."""

    def __init__(self, stage: int) -> None:
        self.stage = stage
        self._forwards, self._backwards = count(), count()

    def next_forward(self) -> Action:
        """The next forward."""
        return Action(self.stage, _F, next(self._forwards))

    def next_backward(self, kind: ActionKind) -> Action:
        """The next backward, full or its input-gradient half."""
        return Action(self.stage, kind, next(self._backwards))


@dataclass(slots=True)
class _DualPipeRank:
    """Builds one rank's entries; holds its deferred weight gradients."""

    rank: int
    ranks: int
    entries: list[ScheduleEntry] = field(default_factory=list)
    _deferred_wgrads: deque[Action] = field(default_factory=deque)
    _down: _DualPipeChunk = field(init=False)
    _up: _DualPipeChunk = field(init=False)

    def __post_init__(self) -> None:
        self._down, self._up = _DualPipeChunk(self.rank), _DualPipeChunk(2 * self.ranks - 1 - self.rank)

    def build_entries(self, microbatches: int) -> tuple[ScheduleEntry, ...]:
        """The rank's entries."""
        downstream_ranks = self.ranks - self.rank - 1  # ranks after this one
        self._warm_up(downstream_ranks)
        self._steady_state(microbatches - self.ranks - downstream_ranks)
        for _ in range(downstream_ranks):
            self.entries += [
                self._up.next_backward(_B),
                OverlappedPair(self._up.next_forward(), self._down.next_backward(_B)),
            ]
        self._cool_down(downstream_ranks)
        return tuple(self.entries)

    def _warm_up(self, downstream_ranks: int) -> None:
        self.entries += [self._down.next_forward() for _ in range(2 * downstream_ranks)]
        for _ in range(self.rank + 1):
            self.entries += [self._down.next_forward(), self._up.next_forward()]
        for _ in range(downstream_ranks):
            self._split_backward(self._up)
            self._weight_gradient()
            self.entries.append(self._up.next_forward())

    def _steady_state(self, rounds: int) -> None:
        """The steady state. The last rank's first forward and backward are at the V's turn, hence not overlapped."""
        for round_index in range(rounds):
            pair = OverlappedPair(self._down.next_forward(), self._up.next_backward(_B))
            is_turn = round_index == 0 and self.rank == self.ranks - 1
            self.entries += [*pair] if is_turn else [pair]
            self.entries.append(OverlappedPair(self._up.next_forward(), self._down.next_backward(_B)))

    def _cool_down(self, downstream_ranks: int) -> None:
        """The remaining backwards, full at first, then split."""
        backward_count = 2 * (self.rank + 1)
        full_count = self.rank + 1
        for index in range(backward_count):
            chunk = self._down if index % 2 else self._up
            self._backward(chunk, is_split=index >= full_count)
        for _ in range(downstream_ranks):
            self._weight_gradient()
            self._backward(self._down, is_split=True)
        for _ in range(self.rank + 1):
            self._weight_gradient()

    def _backward(self, chunk: _DualPipeChunk, *, is_split: bool) -> None:
        if is_split:
            self._split_backward(chunk)
        else:
            self.entries.append(chunk.next_backward(_B))

    def _split_backward(self, chunk: _DualPipeChunk) -> None:
        action = chunk.next_backward(_I)
        self.entries.append(action)
        self._deferred_wgrads.append(action._replace(kind=_W))

    def _weight_gradient(self) -> None:
        """The oldest deferred weight gradient, if there is one."""
        if self._deferred_wgrads:
            self.entries.append(self._deferred_wgrads.popleft())
