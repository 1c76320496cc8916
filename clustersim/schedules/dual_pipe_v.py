"""In which order does DualPipeV work? DualPipe cut in half: two chunks in a V, forwards beside backwards.

Rank r of p holds the stages r and 2p - 1 - r, as in ZB-V. It warms up, and from then on runs pairs: a forward of one
chunk beside a backward of the other, so that what the one sends to experts hides behind what the other computes. The
warm-up and the end run backward in halves, `I` and `W`, where others would wait.

With equal stages and passes (F = I = W), backward B and F&B a pair, the bubble of the rank that waits longest is
(p - 1)(F&B + B - 3W): the authors' (PP/2 - 1)(F&B + B - 3W), whose PP counts stages, of which there are 2p. A rank
keeps the activations of at most 2p + 1 of them. Microbatches are at least as many as stages.
Reference: deepseek-ai/DualPipe, README (table of bubbles) and dualpipe/dualpipev.py; DeepSeek-V3 Technical Report
(arXiv:2412.19437), section 3.2.1; torch.distributed.pipelining.ScheduleDualPipeV, whose order this is.
"""

from collections import deque
from dataclasses import dataclass, field
from itertools import count
from typing import ClassVar

from clustersim.common.errors import InputError
from clustersim.program.action import Action, ActionKind, OverlappedPair, PipelineOrder, ScheduleEntry
from clustersim.program.placement import Placement
from clustersim.schedules.schedule import require_positive

_F, _B = ActionKind.FORWARD, ActionKind.BACKWARD
_I, _W = ActionKind.INPUT_GRADIENT, ActionKind.WEIGHT_GRADIENT


@dataclass(frozen=True, slots=True)
class DualPipeV:
    """DualPipeV. Microbatches are at least as many as stages."""

    name: ClassVar[str] = "dualpipev"

    def placement(self, ranks: int) -> Placement:
        """Down the ranks and back."""
        return Placement((*range(ranks), *reversed(range(ranks))))

    def require(self, ranks: int, microbatches: int) -> None:
        """Raise InputError where there are fewer microbatches than stages."""
        require_positive(ranks, microbatches)
        if microbatches < 2 * ranks:
            raise InputError(
                f"dualpipev on {ranks} pipeline ranks has {2 * ranks} stages and needs as many microbatches, not "
                f"{microbatches}"
            )

    def order(self, ranks: int, microbatches: int) -> PipelineOrder:
        """The steps of every pipeline rank; raise InputError as `require` does."""
        self.require(ranks, microbatches)
        return tuple(_Rank(rank, ranks).order(microbatches) for rank in range(ranks))


class _Chunk:
    """A stage, and its next microbatch each way."""

    def __init__(self, stage: int) -> None:
        self.stage = stage
        self._forwards, self._backwards = count(), count()

    def forward(self) -> Action:
        """The next forward."""
        return Action(self.stage, _F, next(self._forwards))

    def backward(self, kind: ActionKind) -> Action:
        """The next backward, whole or its half of the inputs."""
        return Action(self.stage, kind, next(self._backwards))


@dataclass(slots=True)
class _Rank:
    """One rank of so many, and the weight gradients that it has put off."""

    number: int
    ranks: int
    steps: list[ScheduleEntry] = field(default_factory=list)
    _later: deque[Action] = field(default_factory=deque)
    _down: _Chunk = field(init=False)
    _up: _Chunk = field(init=False)

    def __post_init__(self) -> None:
        self._down, self._up = _Chunk(self.number), _Chunk(2 * self.ranks - 1 - self.number)

    def order(self, microbatches: int) -> tuple[ScheduleEntry, ...]:
        """The rank's steps."""
        after = self.ranks - self.number - 1  # ranks from the next one on
        self._warm_up(after)
        self._pairs(microbatches - self.ranks - after)
        for _ in range(after):
            self.steps += [self._up.backward(_B), OverlappedPair(self._up.forward(), self._down.backward(_B))]
        self._end(after)
        return tuple(self.steps)

    def _warm_up(self, after: int) -> None:
        self.steps += [self._down.forward() for _ in range(2 * after)]
        for _ in range(self.number + 1):
            self.steps += [self._down.forward(), self._up.forward()]
        for _ in range(after):
            self._halved(self._up)
            self._weights()
            self.steps.append(self._up.forward())

    def _pairs(self, rounds: int) -> None:
        """The steady state. The last rank's first forward and backward are of the V's turn, and not side by side."""
        for done in range(rounds):
            pair = OverlappedPair(self._down.forward(), self._up.backward(_B))
            turns = done == 0 and self.number == self.ranks - 1
            self.steps += [*pair] if turns else [pair]
            self.steps.append(OverlappedPair(self._up.forward(), self._down.backward(_B)))

    def _end(self, after: int) -> None:
        """What is left of backward, whole at first, then in halves."""
        left = 2 * (self.number + 1)
        whole = self.number + 1
        for place in range(left):
            chunk = self._down if place % 2 else self._up
            self._backward(chunk, halved=place >= whole)
        for _ in range(after):
            self._weights()
            self._backward(self._down, halved=True)
        for _ in range(self.number + 1):
            self._weights()

    def _backward(self, chunk: _Chunk, *, halved: bool) -> None:
        if halved:
            self._halved(chunk)
        else:
            self.steps.append(chunk.backward(_B))

    def _halved(self, chunk: _Chunk) -> None:
        action = chunk.backward(_I)
        self.steps.append(action)
        self._later.append(action._replace(kind=_W))

    def _weights(self) -> None:
        """The oldest weight gradient that was put off, if there is one."""
        if self._later:
            self.steps.append(self._later.popleft())
