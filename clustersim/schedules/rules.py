"""Is an order of actions a pipeline schedule, and how long does it take with unit costs?

For a placement of stages on p ranks and m microbatches, `verify` holds an order against these rules:

1. There are p rows, one per rank, and each runs actions only of its own stages, and only of microbatches 0 to m-1.
2. No action occurs twice. Each stage and microbatch has one forward `F`, and either one whole backward `B` or its
   two halves `I` (input gradient) and `W` (weight gradient).
3. On its rank `F` comes before `B` or `I`, and `I` before `W`.
4. The rows can run side by side: `F` of stage s waits for `F` of s-1, `B` or `I` of stage s for `B` or `I` of s+1, and
   a dry run with these waits ends. Messages take no time and there is room for all of them.
5. Optionally: no rank keeps more microbatches' activations than it may. A forward's are kept until its `B` or `W`.

Reference: torch.distributed.pipelining.schedules `_validate_schedule` and `_simulate_comms_compute`.
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from types import MappingProxyType
from typing import Final

from clustersim.errors import InputError
from clustersim.program.action import Action, ActionKind, Order
from clustersim.program.placement import Placement

F, B = ActionKind.FORWARD, ActionKind.BACKWARD
INPUT, WEIGHT = ActionKind.INPUT_GRADIENT, ActionKind.WEIGHT_GRADIENT
_HELD: Final = MappingProxyType({F: 1, B: -1, INPUT: 0, WEIGHT: -1})


_Output = tuple[int, bool, int]
"""What an action leaves for another stage: (stage, whether activations and not gradients, microbatch)."""


@dataclass(frozen=True, slots=True)
class DryRun:
    """When each action of an order ended, in the order's shape and in the unit of its costs."""

    ends: tuple[tuple[float, ...], ...]

    @property
    def finish(self) -> float:
        """When the last action ended."""
        return max((row[-1] for row in self.ends if row), default=0.0)

    @property
    def longest(self) -> float:
        """From when a rank's first action ended until its last one did, on the rank that takes longest."""
        return max((row[-1] - row[0] for row in self.ends if row), default=0.0)


def verify(order: Order, *, placement: Placement, microbatches: int, in_flight: Sequence[int] | None = None) -> None:
    """Raise InputError that names the rank, the action and the broken rule. in_flight: the most per rank."""
    if len(order) != placement.size:
        raise InputError(f"schedule orders {len(order)} ranks, but stages are placed on {placement.size}")
    for rank, actions in enumerate(order):
        stages = placement.stages_of(rank)
        _require_own(rank, actions, stages, microbatches)
        _require_own_order(rank, actions)
        _require_complete(rank, actions, len(stages) * microbatches)
    dry_run(order)
    if in_flight is not None:
        _require_room(peak_in_flight(order), in_flight)


def _require_room(peaks: Sequence[int], limits: Sequence[int]) -> None:
    for rank, (peak, limit) in enumerate(zip(peaks, limits, strict=True)):
        if peak > limit:
            raise InputError(f"schedule keeps {peak} activations in flight on rank {rank}; {limit} is the most")


def _require_own(rank: int, actions: Sequence[Action], stages: Sequence[int], microbatches: int) -> None:
    for step, action in enumerate(actions):
        if action.stage not in stages:
            held = ", ".join(map(str, stages))
            raise InputError(f"schedule rank {rank}, step {step}: {action} is not of this rank's stages {held}")
        if not 0 <= action.microbatch < microbatches:
            raise InputError(
                f"schedule rank {rank}, step {step}: {action} is not of microbatches 0 to {microbatches - 1}"
            )


def _require_own_order(rank: int, actions: Sequence[Action]) -> None:
    seen: set[Action] = set()
    for step, action in enumerate(actions):
        if action in seen:
            raise InputError(f"schedule rank {rank}, step {step}: {action} runs a second time")
        missing = [before for before in _own_before(action) if before not in seen]
        if missing:
            raise InputError(f"schedule rank {rank}, step {step}: {action} runs before {missing[0]}")
        seen.add(action)


def _require_complete(rank: int, actions: Sequence[Action], passes: int) -> None:
    counts = Counter(action.kind for action in actions)
    halved = {(action.stage, action.microbatch) for action in actions if action.kind is INPUT}
    both = any(action.kind is B and (action.stage, action.microbatch) in halved for action in actions)
    halves = counts[INPUT], counts[WEIGHT]
    if both or counts[F] != passes or halves != (passes - counts[B],) * 2:
        found = ", ".join(f"{counts[kind]} {kind.value}" for kind in ActionKind)
        raise InputError(
            f"schedule rank {rank} has {found}; {passes} F and {passes} B, or I and W in place of a B, are needed"
        )


def _own_before(action: Action) -> Iterator[Action]:
    if action.kind is not F:
        yield Action(action.stage, INPUT if action.kind is WEIGHT else F, action.microbatch)


def peak_in_flight(order: Order) -> tuple[int, ...]:
    """For each rank the most (stage, microbatch) pairs whose activations it keeps at once."""
    return tuple(max(accumulate(_HELD[action.kind] for action in actions), default=0) for actions in order)


def dry_run(order: Order, *, forward: float = 1.0, backward: float = 2.0, weight: float | None = None) -> DryRun:
    """Run an order with these costs per action; raise InputError on a deadlock. weight: of `W`; None: half a backward.

    `I` takes what `W` leaves of a backward.
    """
    weight = backward / 2 if weight is None else weight
    cost = {F: forward, B: backward, INPUT: backward - weight, WEIGHT: weight}
    last = max((action.stage for actions in order for action in actions), default=0)
    bench = _Bench(cost, last, tuple([] for _ in order))
    awake = list(range(len(order)))
    while awake:
        rank = awake.pop()
        awake += bench.advance(rank, order[rank])
    _require_ended(order, bench.ends)
    return DryRun(tuple(map(tuple, bench.ends)))


@dataclass(slots=True)
class _Bench:
    """A dry run under way. done: when an output was there; sleepers: which rank waits for an output."""

    cost: Mapping[ActionKind, float]
    last: int
    ends: tuple[list[float], ...]
    done: dict[_Output, float] = field(default_factory=dict)
    sleepers: dict[_Output, int] = field(default_factory=dict)

    def advance(self, rank: int, actions: Sequence[Action]) -> list[int]:
        """Run a rank's actions up to the first that must wait; say which ranks this woke."""
        ends, woken = self.ends[rank], []
        for action in actions[len(ends) :]:
            awaited = _awaited(action, self.last)
            if awaited is not None and awaited not in self.done:
                self.sleepers[awaited] = rank
                break
            begin = max(ends[-1] if ends else 0.0, 0.0 if awaited is None else self.done[awaited])
            ends.append(begin + self.cost[action.kind])
            if action.kind is not WEIGHT:
                woken += self._put((action.stage, action.kind is F, action.microbatch), ends[-1])
        return woken

    def _put(self, output: _Output, end: float) -> list[int]:
        self.done[output] = end
        return [self.sleepers.pop(output)] if output in self.sleepers else []


def _awaited(action: Action, last: int) -> _Output | None:
    """Which output of another stage an action waits for."""
    stage, kind, microbatch = action
    if kind is F:
        return (stage - 1, True, microbatch) if stage > 0 else None
    return (stage + 1, False, microbatch) if kind is not WEIGHT and stage < last else None


def _require_ended(order: Order, ends: Sequence[Sequence[float]]) -> None:
    stuck = [
        f"rank {rank} at {actions[len(row)]}"
        for rank, (actions, row) in enumerate(zip(order, ends, strict=True))
        if len(row) < len(actions)
    ]
    if stuck:
        raise InputError(f"schedule deadlocks: {', '.join(stuck)} wait for actions that never run")
