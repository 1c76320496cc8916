"""Zero-bubble schedules ZB-1p and ZB-2p: weight gradients fill what would be bubbles.

Backward is split in two: `I` (the gradient of the input), for which the stage before waits, and `W` (the
gradient of the weights), on which nothing depends. The order is found by list scheduling with the costs of
passes, without messages: a free rank runs a ready `I` or `F`, alternating, an `F` only while there is memory
for it; else a `W`. The memory limit is p (ZB-1p, as in 1F1B) or 2p microbatches (ZB-2p). Data kept for
pending weight gradients counts with its real size: with tensor and sequence parallelism more is kept between
`I` and `W` than before `I` (the gradients of row-parallel outputs are unsharded, `memory.activations`), so an
`I` adds memory, and where the limit is exceeded a `W` runs first. So memory never exceeds the limit by more than the
excess of one microbatch's pending data over its activations: the authors' scheduler also
uses the measured memory that passes add and free, and runs `W` while `max_mem` would be exceeded
(sail-sg/zero-bubble-pipeline-parallelism, scheduler/zb.py).

A greedy choice is not always the best, so several orders are built and the one with the smallest maximum rank
time is used: gaps known to be shorter than a `W` are left open or filled, and costs are rounded to thirds,
fifths and tenths of a forward (the coarser, the more passes count as equally long and stay in step).

With F = I = W a rank of ZB-1p takes m (F + I + W) + (p - 1)(F + I - W), as ZB-H1's do, and one of ZB-2p has
no bubble, as ZB-H2's, if m is at least 2p - 1: its ranks begin and end one forward after each other.
Reference: Qi et al. 2023, "Zero Bubble Pipeline Parallelism" (arXiv:2401.10241), sections 2 and 3.1.
"""

import heapq
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from types import MappingProxyType
from typing import ClassVar, Final

from clustersim.program.action import Action, ActionKind, PipelineOrder
from clustersim.schedules.schedule import OneStagePerRank, PassCosts
from clustersim.schedules.validation import dry_run

_TIME_GRIDS: Final = (3, 5, 10)  # time steps per forward
_F, _I, _W = ActionKind.FORWARD, ActionKind.INPUT_GRADIENT, ActionKind.WEIGHT_GRADIENT
_OUTPUT_DIRECTION: Final = MappingProxyType({_F: 1, _I: -1, _W: 0})  # offset of the stage that receives a pass's output


_EQUAL_COSTS: Final = PassCosts()


@dataclass(frozen=True, slots=True)
class ZeroBubble(OneStagePerRank):
    """memory: activations that a rank may hold, in units of p microbatches. Any number of microbatches is supported."""

    takes_pass_costs: ClassVar[bool] = True
    memory: int
    costs: PassCosts = _EQUAL_COSTS

    @property
    def name(self) -> str:
        """`zb-1p` or `zb-2p`."""
        return f"zb-{self.memory}p"

    @property
    def ends_staggered(self) -> bool:
        """Whether ranks may hold more microbatches than those of 1F1B, and so end one after the other."""
        return self.memory > 1

    def with_pass_costs(self, costs: PassCosts) -> "ZeroBubble":
        """The schedule for passes of these costs."""
        return replace(self, costs=costs)

    def order(self, ranks: int, microbatches: int) -> PipelineOrder:
        """The actions of every pipeline rank."""
        self.require_supported(ranks, microbatches)
        options = product(_TIME_GRIDS, (True, False))
        schedulers = [
            self._build_scheduler(ranks, microbatches, grid=grid, requires_full_gap=requires_full_gap)
            for grid, requires_full_gap in options
        ]
        return min((scheduler.build_order() for scheduler in schedulers), key=self._max_rank_span)

    def _build_scheduler(
        self, ranks: int, microbatches: int, *, grid: int, requires_full_gap: bool
    ) -> "_ListScheduler":
        durations = _durations(self.costs, grid)
        return _ListScheduler(
            ranks=tuple(_ZeroBubbleRank(stage) for stage in range(ranks)),
            microbatches=microbatches,
            durations=durations,
            memory_limit=float(self.memory * ranks),
            pending_memory_ratio=self.costs.pending_memory_ratio,
            min_gap=durations[_W] if requires_full_gap else 0,
        )

    def _max_rank_span(self, order: PipelineOrder) -> float:
        costs = self.costs
        backward = costs.input_gradient + costs.weight_gradient
        return dry_run(order, forward=costs.forward, backward=backward, weight=costs.weight_gradient).max_rank_span


def _durations(costs: PassCosts, grid: int) -> dict[ActionKind, int]:
    """Durations of passes in time steps, at least one; a forward takes `grid` of them."""
    costs_by_kind = {_F: costs.forward, _I: costs.input_gradient, _W: costs.weight_gradient}
    return {kind: max(1, round(grid * cost / costs.forward)) for kind, cost in costs_by_kind.items()}


@dataclass(slots=True)
class _ZeroBubbleRank:
    """A pipeline rank whose order is being built.

    forward_ends, input_ends: end times of all `F` and `I` started so far; weight_count: number of `W` started;
    free_at: end time of its current pass.
    """

    stage: int
    actions: list[Action] = field(default_factory=list)
    forward_ends: list[int] = field(default_factory=list)
    input_ends: list[int] = field(default_factory=list)
    weight_count: int = 0
    free_at: int = 0
    prefers_forward: bool = True

    def start_pass(self, kind: ActionKind, end: int) -> None:
        """Start the next pass of a kind, which ends at `end`."""
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
    """List scheduler that builds an order in time order.

    durations: time steps by kind; memory_limit: activations, in microbatches, up to which a rank may start a
    forward; pending_memory_ratio: as in `PassCosts`; min_gap: shorter known gaps are not
    filled with a `W`.
    """

    ranks: tuple[_ZeroBubbleRank, ...]
    microbatches: int
    durations: Mapping[ActionKind, int]
    memory_limit: float
    pending_memory_ratio: float
    min_gap: int

    def build_order(self) -> PipelineOrder:
        """Schedule all passes; return their order. Of ranks free at the same time the last stage chooses first."""
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
        """The pass that a free rank runs; None: it waits."""
        forward_time, gradient_time = self._forward_ready_time(rank), self._gradient_ready_time(rank)
        if forward_time <= now and (rank.prefers_forward or gradient_time > now):
            return _F
        if gradient_time <= now:
            return _I if self._fits_pending(rank) else _W
        gap = min(forward_time, gradient_time) - now
        return _W if rank.weight_count < len(rank.input_ends) and gap >= self.min_gap else None

    def _held_activations(self, rank: _ZeroBubbleRank) -> float:
        """Activations that a rank holds, in microbatches."""
        input_count = len(rank.input_ends)
        return len(rank.forward_ends) - input_count + self.pending_memory_ratio * (input_count - rank.weight_count)

    def _fits_pending(self, rank: _ZeroBubbleRank) -> bool:
        """Whether the limit is kept, so that an input gradient may run; else a weight gradient must run first."""
        return rank.weight_count == len(rank.input_ends) or self._held_activations(rank) <= self.memory_limit

    def _forward_ready_time(self, rank: _ZeroBubbleRank) -> float:
        """Time at which the next forward is ready; infinite if there is none, no memory for it, or it is unknown."""
        forward_count = len(rank.forward_ends)
        if forward_count == self.microbatches or self._held_activations(rank) + 1 > self.memory_limit:
            return math.inf
        return _pass_end(self.ranks[rank.stage - 1].forward_ends, forward_count) if rank.stage else 0.0

    def _gradient_ready_time(self, rank: _ZeroBubbleRank) -> float:
        """Time at which the next input gradient is ready; infinite: there is none, or it is not known yet."""
        input_count = len(rank.input_ends)
        if input_count == len(rank.forward_ends):
            return math.inf
        is_last_stage = rank.stage == len(self.ranks) - 1
        return 0.0 if is_last_stage else _pass_end(self.ranks[rank.stage + 1].input_ends, input_count)


def _pass_end(ends: Sequence[int], pass_index: int) -> float:
    """End time of a pass; infinite: it has not started."""
    return ends[pass_index] if pass_index < len(ends) else math.inf
