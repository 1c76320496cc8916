"""In which order do the zero-bubble schedules ZB-1p and ZB-2p work? Weight gradients fill what would be bubbles.

Backward is run in halves: `I` (the gradient of the input), for which the stage before waits, and `W` (the gradient of
the weights), for which nobody waits. The order is found by list scheduling with the costs of passes, without messages:
a rank that is free takes an `I` or an `F` that has come, in turn, an `F` only while there is memory for it; else a `W`.
Memory is that of p (ZB-1p, as in 1F1B) or 2p microbatches (ZB-2p). What waits for weight gradients counts as it is:
with tensor and sequence parallelism more waits of a microbatch than was kept (the gradients of row-parallel outputs are
whole, `memory.activations`), so an `I` adds memory, and where there is none a `W` runs first. So never more is held
than the limit and, at the first `I`, what one microbatch's waiting exceeds its activations by: the authors' scheduler
takes what passes were measured to add and free, too, and runs `W` while `max_mem` would be exceeded (sail-sg/zero-
bubble-pipeline-parallelism, scheduler/zb.py).

A greedy choice is not always the best, so a few orders are found and the one is taken whose longest rank takes least:
gaps that are known to be shorter than a `W` are left open or filled too, and costs are rounded to thirds, fifths and
tenths of a forward (the coarser, the more passes count as equally long and keep in step).

With F = I = W a rank of ZB-1p lasts m (F + I + W) + (p - 1)(F + I - W), as ZB-H1's do, and one of ZB-2p has no bubble,
as ZB-H2's, if m is at least 2p - 1: its ranks begin and end one forward after each other.
Reference: Qi et al. 2023, "Zero Bubble Pipeline Parallelism" (arXiv:2401.10241), sections 2 and 3.1.
"""

import heapq
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product
from types import MappingProxyType
from typing import Final

from clustersim.program.action import Action, ActionKind, PipelineOrder
from clustersim.program.placement import Placement, looped_placement
from clustersim.schedules.schedule import require_positive
from clustersim.schedules.validation import dry_run

_GRIDS: Final = (3, 5, 10)  # steps of time in a forward
_F, _I, _W = ActionKind.FORWARD, ActionKind.INPUT_GRADIENT, ActionKind.WEIGHT_GRADIENT
_TOWARDS: Final = MappingProxyType({_F: 1, _I: -1, _W: 0})  # to which stage a pass's output goes


@dataclass(frozen=True, slots=True)
class PassCosts:
    """What a microbatch's passes through a stage take, in one unit of time.

    waiting: what is kept of it between `I` and `W`, as a part of what is kept between `F` and `I`; it may be above 1.
    """

    forward: float = 1.0
    input_gradient: float = 1.0
    weight_gradient: float = 1.0
    waiting: float = 1.0


@dataclass(frozen=True, slots=True)
class ZeroBubble:
    """memory: how many times p microbatches' activations a rank may keep. Any number of microbatches is legal."""

    memory: int
    costs: PassCosts = PassCosts()

    @property
    def name(self) -> str:
        """`zb-1p` or `zb-2p`."""
        return f"zb-{self.memory}p"

    def placement(self, ranks: int) -> Placement:
        """One stage on each rank."""
        return looped_placement(ranks)

    def require(self, ranks: int, microbatches: int) -> None:
        """Any number of microbatches is legal."""
        require_positive(ranks, microbatches)

    def order(self, ranks: int, microbatches: int) -> PipelineOrder:
        """The actions of every pipeline rank."""
        self.require(ranks, microbatches)
        choices = product(_GRIDS, (True, False))
        benches = [self._bench(ranks, microbatches, grid=grid, patient=patient) for grid, patient in choices]
        return min((bench.run() for bench in benches), key=self._longest)

    def _bench(self, ranks: int, microbatches: int, *, grid: int, patient: bool) -> "_Bench":
        durations = _durations(self.costs, grid)
        return _Bench(
            ranks=tuple(_Rank(stage) for stage in range(ranks)),
            microbatches=microbatches,
            durations=durations,
            room=float(self.memory * ranks),
            waiting=self.costs.waiting,
            patience=durations[_W] if patient else 0,
        )

    def _longest(self, order: PipelineOrder) -> float:
        costs = self.costs
        backward = costs.input_gradient + costs.weight_gradient
        return dry_run(order, forward=costs.forward, backward=backward, weight=costs.weight_gradient).longest


def _durations(costs: PassCosts, grid: int) -> dict[ActionKind, int]:
    """Steps of time that passes take, at least one, where a forward takes `grid` of them."""
    seconds = {_F: costs.forward, _I: costs.input_gradient, _W: costs.weight_gradient}
    return {kind: max(1, round(grid * item / costs.forward)) for kind, item in seconds.items()}


@dataclass(slots=True)
class _Rank:
    """A pipeline rank whose order is being found.

    forwards, inputs: when each `F` and `I` begun so far ends; weights: how many `W` have begun; free: when it is.
    """

    stage: int
    actions: list[Action] = field(default_factory=list)
    forwards: list[int] = field(default_factory=list)
    inputs: list[int] = field(default_factory=list)
    weights: int = 0
    free: int = 0
    forward_next: bool = True

    def run(self, kind: ActionKind, end: int) -> None:
        """Begin the next pass of a kind, which ends then."""
        self.free = end
        if kind is _W:
            self.actions.append(Action(self.stage, kind, self.weights))
            self.weights += 1
            return
        ends = self.forwards if kind is _F else self.inputs
        self.actions.append(Action(self.stage, kind, len(ends)))
        ends.append(end)
        self.forward_next = kind is _I


@dataclass(slots=True)
class _Bench:
    """Where the order is found, in order of time.

    durations: steps of time by kind; room: microbatches' activations that a rank may keep when it begins a forward;
    waiting: the part of them kept between `I` and `W`; patience: gaps known to be shorter than this are not filled with
    a `W`.
    """

    ranks: tuple[_Rank, ...]
    microbatches: int
    durations: Mapping[ActionKind, int]
    room: float
    waiting: float
    patience: int

    def run(self) -> PipelineOrder:
        """Run all passes; return their order. Ranks free at one time choose last stage first, as gradients come."""
        awake = [(0, 0)]
        while awake:
            now, place = heapq.heappop(awake)
            rank = self.ranks[-place]
            kind = self._choice(rank, now) if rank.free <= now else None
            if kind is not None:
                rank.run(kind, now + self.durations[kind])
                for stage in {rank.stage, rank.stage + _TOWARDS[kind]}:
                    if 0 <= stage < len(self.ranks):
                        heapq.heappush(awake, (rank.free, -stage))
        return tuple(tuple(rank.actions) for rank in self.ranks)

    def _choice(self, rank: _Rank, now: int) -> ActionKind | None:
        """What a free rank runs; None: it waits."""
        forward, gradient = self._forward_comes(rank), self._gradient_comes(rank)
        if forward <= now and (rank.forward_next or gradient > now):
            return _F
        if gradient <= now:
            return _I if self._may_wait(rank) else _W
        gap = min(forward, gradient) - now
        return _W if rank.weights < len(rank.inputs) and gap >= self.patience else None

    def _kept(self, rank: _Rank) -> float:
        """Microbatches' activations that a rank keeps."""
        inputs = len(rank.inputs)
        return len(rank.forwards) - inputs + self.waiting * (inputs - rank.weights)

    def _may_wait(self, rank: _Rank) -> bool:
        """Whether there is memory for what one more input gradient leaves; else some weight gradient is to be run."""
        return rank.weights == len(rank.inputs) or self._kept(rank) <= self.room

    def _forward_comes(self, rank: _Rank) -> float:
        """When the next forward may run; infinite: there is none, no memory for it, or it is not known yet."""
        forwards = len(rank.forwards)
        if forwards == self.microbatches or self._kept(rank) + 1 > self.room:
            return math.inf
        return _end(self.ranks[rank.stage - 1].forwards, forwards) if rank.stage else 0.0

    def _gradient_comes(self, rank: _Rank) -> float:
        """When the next input gradient may run; infinite: there is none, or it is not known yet."""
        inputs = len(rank.inputs)
        if inputs == len(rank.forwards):
            return math.inf
        last = rank.stage == len(self.ranks) - 1
        return 0.0 if last else _end(self.ranks[rank.stage + 1].inputs, inputs)


def _end(ends: Sequence[int], number: int) -> float:
    """When a pass ends; infinite: it has not begun."""
    return ends[number] if number < len(ends) else math.inf
