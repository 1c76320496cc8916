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

_TIME_GRIDS: Final = (3, 5, 10)  # steps of time in a forward
_F, _I, _W = ActionKind.FORWARD, ActionKind.INPUT_GRADIENT, ActionKind.WEIGHT_GRADIENT
_OUTPUT_DIRECTION: Final = MappingProxyType({_F: 1, _I: -1, _W: 0})  # to which stage a pass's output goes


@dataclass(frozen=True, slots=True)
class PassCosts:
    """What a microbatch's passes through a stage take, in one unit of time.

    waiting: what is kept of it between `I` and `W`, as a part of what is kept between `F` and `I`; it may be above 1.
    """

    forward: float = 1.0
    input_gradient: float = 1.0
    weight_gradient: float = 1.0
    pending_memory_ratio: float = 1.0


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

    def require_supported(self, ranks: int, microbatches: int) -> None:
        """Any number of microbatches is legal."""
        require_positive(ranks, microbatches)

    def order(self, ranks: int, microbatches: int) -> PipelineOrder:
        """The actions of every pipeline rank."""
        self.require_supported(ranks, microbatches)
        options = product(_TIME_GRIDS, (True, False))
        schedulers = [
            self._build_scheduler(ranks, microbatches, grid=grid, is_patient=is_patient) for grid, is_patient in options
        ]
        return min((scheduler.build_order() for scheduler in schedulers), key=self._max_rank_span)

    def _build_scheduler(self, ranks: int, microbatches: int, *, grid: int, is_patient: bool) -> "_ListScheduler":
        durations = _durations(self.costs, grid)
        return _ListScheduler(
            ranks=tuple(_ZeroBubbleRank(stage) for stage in range(ranks)),
            microbatches=microbatches,
            durations=durations,
            memory_limit=float(self.memory * ranks),
            pending_memory_ratio=self.costs.pending_memory_ratio,
            min_gap=durations[_W] if is_patient else 0,
        )

    def _max_rank_span(self, order: PipelineOrder) -> float:
        costs = self.costs
        backward = costs.input_gradient + costs.weight_gradient
        return dry_run(order, forward=costs.forward, backward=backward, weight=costs.weight_gradient).max_rank_span


def _durations(costs: PassCosts, grid: int) -> dict[ActionKind, int]:
    """Steps of time that passes take, at least one, where a forward takes `grid` of them."""
    costs_by_kind = {_F: costs.forward, _I: costs.input_gradient, _W: costs.weight_gradient}
    return {kind: max(1, round(grid * cost / costs.forward)) for kind, cost in costs_by_kind.items()}


@dataclass(slots=True)
class _ZeroBubbleRank:
    """A pipeline rank whose order is being found.

    forwards, inputs: when each `F` and `I` begun so far ends; weights: how many `W` have begun; free: when it is.
    """

    stage: int
    actions: list[Action] = field(default_factory=list)
    forward_ends: list[int] = field(default_factory=list)
    input_ends: list[int] = field(default_factory=list)
    weight_count: int = 0
    free_at: int = 0
    prefers_forward: bool = True

    def start_pass(self, kind: ActionKind, end: int) -> None:
        """Begin the next pass of a kind, which ends then."""
        self.free_at = end
        if kind is _W:
            self.actions.append(Action(self.stage, kind, self.weight_count))
            self.weight_count += 1
            return
        ends = self.forward_ends if kind is _F else self.input_ends
        self.actions.append(Action(self.stage, kind, len(ends)))
        ends.append(end)
        self.prefers_forward = kind is _I


@dataclass(slots=True)
class _ListScheduler:
    """Where the order is found, in order of time.

    durations: steps of time by kind; room: microbatches' activations that a rank may keep when it begins a forward;
    waiting: the part of them kept between `I` and `W`; patience: gaps known to be shorter than this are not filled with
    a `W`.
    """

    ranks: tuple[_ZeroBubbleRank, ...]
    microbatches: int
    durations: Mapping[ActionKind, int]
    memory_limit: float
    pending_memory_ratio: float
    min_gap: int

    def build_order(self) -> PipelineOrder:
        """Run all passes; return their order. Ranks free at one time choose last stage first, as gradients come."""
        events = [(0, 0)]
        while events:
            now, negative_stage = heapq.heappop(events)
            rank = self.ranks[-negative_stage]
            kind = self._choose_pass(rank, now) if rank.free_at <= now else None
            if kind is not None:
                rank.start_pass(kind, now + self.durations[kind])
                for stage in {rank.stage, rank.stage + _OUTPUT_DIRECTION[kind]}:
                    if 0 <= stage < len(self.ranks):
                        heapq.heappush(events, (rank.free_at, -stage))
        return tuple(tuple(rank.actions) for rank in self.ranks)

    def _choose_pass(self, rank: _ZeroBubbleRank, now: int) -> ActionKind | None:
        """What a free rank runs; None: it waits."""
        forward_time, gradient_time = self._forward_ready_time(rank), self._gradient_ready_time(rank)
        if forward_time <= now and (rank.prefers_forward or gradient_time > now):
            return _F
        if gradient_time <= now:
            return _I if self._fits_pending(rank) else _W
        gap = min(forward_time, gradient_time) - now
        return _W if rank.weight_count < len(rank.input_ends) and gap >= self.min_gap else None

    def _held_activations(self, rank: _ZeroBubbleRank) -> float:
        """Microbatches' activations that a rank keeps."""
        input_count = len(rank.input_ends)
        return len(rank.forward_ends) - input_count + self.pending_memory_ratio * (input_count - rank.weight_count)

    def _fits_pending(self, rank: _ZeroBubbleRank) -> bool:
        """Whether there is memory for what one more input gradient leaves; else some weight gradient is to be run."""
        return rank.weight_count == len(rank.input_ends) or self._held_activations(rank) <= self.memory_limit

    def _forward_ready_time(self, rank: _ZeroBubbleRank) -> float:
        """When the next forward may run; infinite: there is none, no memory for it, or it is not known yet."""
        forward_count = len(rank.forward_ends)
        if forward_count == self.microbatches or self._held_activations(rank) + 1 > self.memory_limit:
            return math.inf
        return _pass_end(self.ranks[rank.stage - 1].forward_ends, forward_count) if rank.stage else 0.0

    def _gradient_ready_time(self, rank: _ZeroBubbleRank) -> float:
        """When the next input gradient may run; infinite: there is none, or it is not known yet."""
        input_count = len(rank.input_ends)
        if input_count == len(rank.forward_ends):
            return math.inf
        is_last_stage = rank.stage == len(self.ranks) - 1
        return 0.0 if is_last_stage else _pass_end(self.ranks[rank.stage + 1].input_ends, input_count)


def _pass_end(ends: Sequence[int], pass_index: int) -> float:
    """When a pass ends; infinite: it has not begun."""
    return ends[pass_index] if pass_index < len(ends) else math.inf
