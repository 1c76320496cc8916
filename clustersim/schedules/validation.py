"""Is an order of actions a pipeline schedule, and how long does it take with unit costs?

For a placement of stages on p ranks and m microbatches, `verify` holds an order against these rules:

1. There are p rows, one per rank, and each runs actions only of its own stages, and only of microbatches 0 to m-1.
2. No action occurs twice. Each stage and microbatch has one forward `F`, and either one whole backward `B` or its
   two halves `I` (input gradient) and `W` (weight gradient).
3. On its rank `F` comes before `B` or `I`, and `I` before `W`.
4. The rows can run side by side: `F` of stage s waits for `F` of s-1, `B` or `I` of stage s for `B` or `I` of s+1, and
   a dry run with these waits ends. Messages take no time and there is room for all of them. A pair waits for what
   either of its passes waits for, and what both of them send leaves at its end.

Reference: torch.distributed.pipelining.schedules `_validate_schedule` and `_simulate_comms_compute`.
"""

from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field
from itertools import accumulate, product
from types import MappingProxyType
from typing import Final, Protocol

from clustersim.common.errors import InputError
from clustersim.program.action import (
    Action,
    ActionKind,
    OverlappedPair,
    PipelineOrder,
    ScheduleEntry,
    flatten_entries,
    flatten_entry,
)
from clustersim.program.placement import Placement

F, B = ActionKind.FORWARD, ActionKind.BACKWARD
INPUT, WEIGHT = ActionKind.INPUT_GRADIENT, ActionKind.WEIGHT_GRADIENT
_HELD: Final = MappingProxyType({F: 1, B: -1, INPUT: 0, WEIGHT: -1})
_UNITS: Final = MappingProxyType(dict.fromkeys(ActionKind, 1.0))
_MOST_STUCK: Final = 3  # ranks that a sentence about a deadlock names

_Output = tuple[int, bool, int]
"""What an action leaves for another stage: (stage, whether activations and not gradients, microbatch)."""


@dataclass(frozen=True, slots=True)
class DryRun:
    """When each step of an order ended, in the order's shape and in the unit of its costs."""

    ends: tuple[tuple[float, ...], ...]

    @property
    def finish(self) -> float:
        """When the last action ended."""
        return max((row[-1] for row in self.ends if row), default=0.0)

    @property
    def longest(self) -> float:
        """From when a rank's first action ended until its last one did, on the rank that takes longest."""
        return max((row[-1] - row[0] for row in self.ends if row), default=0.0)


class Places(Protocol):
    """What errors call an order and its parts."""

    @property
    def whole(self) -> str:
        """The order."""

    def row(self, rank: int) -> str:
        """What a rank runs."""

    def step(self, rank: int, step: int) -> str:
        """An action, by its number among those of its rank, from 0."""


@dataclass(frozen=True, slots=True)
class Counted:
    """Ranks and steps as they are numbered inside, from 0."""

    whole: str = "schedule"

    def row(self, rank: int) -> str:
        """By its number."""
        return f"{self.whole} rank {rank}"

    def step(self, rank: int, step: int) -> str:
        """By its number."""
        return f"{self.row(rank)}, step {step}"


_COUNTED: Final = Counted()


def verify(order: PipelineOrder, *, placement: Placement, microbatches: int, places: Places = _COUNTED) -> None:
    """Raise InputError that names the rank, the action and the broken rule. places: what errors call them."""
    if len(order) != placement.pipeline_size:
        raise InputError(
            f"{places.whole} orders {len(order)} ranks, but stages are placed on {placement.pipeline_size}"
        )
    for rank, steps in enumerate(order):
        stages = placement.stages_on_rank(rank)
        for step, action in _numbered(steps):
            if broken := _not_own(action, stages, microbatches):
                raise InputError(f"{places.step(rank, step)}: {action} {broken}")
        _require_own_order(steps, rank, places)
        if wrong := next(_incomplete(flatten_entries(steps), stages, microbatches), None):
            raise InputError(f"{places.row(rank)} {wrong}")
    _require_ended(order, _run(order, _UNITS), places)


def _numbered(steps: Sequence[ScheduleEntry]) -> Iterator[tuple[int, Action]]:
    """Every action, and the number of its step."""
    yield from ((number, action) for number, step in enumerate(steps) for action in flatten_entry(step))


def _not_own(action: Action, stages: Sequence[int], microbatches: int) -> str:
    """Why an action is none of its rank's; empty if it is."""
    if action.stage not in stages:
        return f"is not of this rank's stages {', '.join(map(str, stages))}"
    if not 0 <= action.microbatch < microbatches:
        return f"is not of microbatches 0 to {microbatches - 1}"
    return ""


def _require_own_order(steps: Sequence[ScheduleEntry], rank: int, places: Places) -> None:
    seen: set[Action] = set()
    for step, action in _numbered(steps):
        if action in seen:
            raise InputError(f"{places.step(rank, step)}: {action} runs a second time")
        missing = [before for before in _own_before(action) if before not in seen]
        if missing:
            raise InputError(f"{places.step(rank, step)}: {action} runs before {missing[0]}")
        seen.add(action)


def _incomplete(actions: Sequence[Action], stages: Sequence[int], microbatches: int) -> Iterator[str]:
    """What a rank lacks or has twice, pass by pass."""
    there = set(actions)
    for stage, microbatch in product(stages, range(microbatches)):
        forward, whole, inputs, weights = (Action(stage, kind, microbatch) for kind in (F, B, INPUT, WEIGHT))
        halves = [half for half in (inputs, weights) if half in there]
        if forward not in there:
            yield f"lacks {forward}"
        elif whole in there and halves:
            yield f"has {whole} and {halves[0]}; a backward is whole, or in two halves"
        elif whole not in there and len(halves) < 2:
            yield f"lacks {weights}" if halves else f"lacks {whole}, or {inputs} and {weights}"


def _own_before(action: Action) -> Iterator[Action]:
    if action.kind is not F:
        yield Action(action.stage, INPUT if action.kind is WEIGHT else F, action.microbatch)


def peak_in_flight(order: PipelineOrder) -> tuple[int, ...]:
    """For each rank the most (stage, microbatch) pairs whose activations it keeps at once, from `F` to `B` or `W`."""
    return tuple(max(accumulate(_HELD[action.kind] for action in flatten_entries(steps)), default=0) for steps in order)


def dry_run(
    order: PipelineOrder,
    *,
    forward: float = 1.0,
    backward: float = 2.0,
    weight: float | None = None,
    pair: float | None = None,
) -> DryRun:
    """Run an order with these costs per action; raise InputError on a deadlock.

    weight: of `W`, None: half a backward; `I` takes what `W` leaves of a backward. pair: of a forward and a backward
    side by side, None: pairs are run one after the other, and `ends` has each of their passes.
    """
    weight = backward / 2 if weight is None else weight
    cost = {F: forward, B: backward, INPUT: backward - weight, WEIGHT: weight}
    order = tuple(map(flatten_entries, order)) if pair is None else order
    ends = _run(order, cost, pair=pair or 0.0)
    _require_ended(order, ends, _COUNTED)
    return DryRun(tuple(map(tuple, ends)))


def runs_in_pairs(order: PipelineOrder) -> bool:
    """Whether an order still ends where a forward's output leaves only with that of a backward right behind it."""
    order = tuple(map(flatten_entries, order))
    ends = _run(order, _UNITS, paired=True)
    return all(len(row) == len(steps) for steps, row in zip(order, ends, strict=True))


def _run(
    order: PipelineOrder, cost: Mapping[ActionKind, float], *, pair: float = 1.0, paired: bool = False
) -> tuple[list[float], ...]:
    """When steps end, of each rank as far as it comes. paired: as `runs_in_pairs` has it."""
    bench = _Bench(cost, pair, _last(order), tuple([] for _ in order), paired)
    awake = list(range(len(order)))
    while awake:
        rank = awake.pop()
        awake += bench.advance(rank, order[rank])
    return bench.ends


def _last(order: PipelineOrder) -> int:
    """The last stage."""
    return max((action.stage for steps in order for action in flatten_entries(steps)), default=0)


@dataclass(slots=True)
class _Bench:
    """A dry run under way.

    pair: what a pair costs; paired: as `runs_in_pairs` has it; done: when an output was there; sleepers: which rank
    waits for an output.
    """

    cost: Mapping[ActionKind, float]
    pair: float
    last: int
    ends: tuple[list[float], ...]
    paired: bool
    done: dict[_Output, float] = field(default_factory=dict)
    sleepers: dict[_Output, int] = field(default_factory=dict)

    def advance(self, rank: int, steps: Sequence[ScheduleEntry]) -> list[int]:
        """Run a rank's steps up to the first that must wait; say which ranks this woke."""
        ends, woken = self.ends[rank], []
        for number in range(len(ends), len(steps)):
            step = steps[number]
            awaited = [item for action in flatten_entry(step) for item in _awaited(action, self.last)]
            missing = next((element for element in awaited if element not in self.done), None)
            if missing is not None:
                self.sleepers[missing] = rank
                break
            begin = max([ends[-1] if ends else 0.0, *(self.done[entry] for entry in awaited)])
            ends.append(begin + (self.pair if isinstance(step, OverlappedPair) else self.cost[step.kind]))
            if not self._held(steps[number : number + 2]):
                held = self._held(steps[max(0, number - 1) : number + 1])
                for each in flatten_entries(steps[number - held : number + 1]):
                    woken += self._put(each, ends[-1])
        return woken

    def _held(self, two: Sequence[ScheduleEntry]) -> bool:
        """Whether the output of the first of two steps waits for that of the second."""
        kinds = tuple(step.kind for step in two if isinstance(step, Action))
        return self.paired and kinds == (F, B)

    def _put(self, action: Action, end: float) -> list[int]:
        if action.kind is WEIGHT:
            return []
        output = action.stage, action.kind is F, action.microbatch
        self.done[output] = end
        return [self.sleepers.pop(output)] if output in self.sleepers else []


def _awaited(action: Action, last: int) -> list[_Output]:
    """Which output of another stage an action waits for, if any."""
    stage, kind, microbatch = action
    if kind is F:
        return [(stage - 1, True, microbatch)] if stage > 0 else []
    return [(stage + 1, False, microbatch)] if kind is not WEIGHT and stage < last else []


def _require_ended(order: PipelineOrder, ends: Sequence[Sequence[float]], places: Places) -> None:
    """Raise InputError unless every rank came to its end."""
    done = {action for row, steps in zip(ends, order, strict=True) for action in flatten_entries(steps[: len(row)])}
    stuck = [
        f"{places.step(rank, len(row))} ({steps[len(row)]}) waits for {_awaited_action(steps[len(row)], order, done)}"
        for rank, (steps, row) in enumerate(zip(order, ends, strict=True))
        if len(row) < len(steps)
    ]
    if stuck:
        others = f"; and {len(stuck) - _MOST_STUCK} others wait" if len(stuck) > _MOST_STUCK else ""
        named = (item.removeprefix(f"{places.whole} ") for item in stuck[:_MOST_STUCK])
        raise InputError(f"{places.whole} deadlocks: {'; '.join(named)}{others}")


def _awaited_action(step: ScheduleEntry, order: PipelineOrder, done: Set[Action]) -> Action:
    """Which action of another stage a step waits for; a whole backward where the order has neither form of it."""
    waits = (_forms(item) for action in flatten_entry(step) for item in _awaited(action, _last(order)))
    forms = next(wait for wait in waits if done.isdisjoint(wait))
    there = {action for steps in order for action in flatten_entries(steps)}
    return next((form for form in forms if form in there), forms[-1])


def _forms(output: _Output) -> list[Action]:
    """The actions that may leave an output."""
    stage, forward, microbatch = output
    return [Action(stage, kind, microbatch) for kind in ((F,) if forward else (INPUT, B))]
