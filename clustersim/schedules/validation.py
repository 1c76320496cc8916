"""Is an order of actions a pipeline schedule, and how long does it take with unit costs?

For a placement of stages on p ranks and m microbatches, `validate_order` holds an order against these rules:

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
_ACTIVATION_DELTA: Final = MappingProxyType({F: 1, B: -1, INPUT: 0, WEIGHT: -1})
_UNIT_COSTS: Final = MappingProxyType(dict.fromkeys(ActionKind, 1.0))
_MAX_STUCK_SHOWN: Final = 3  # ranks that a sentence about a deadlock names

_Output = tuple[int, bool, int]
"""What an action leaves for another stage: (stage, whether activations and not gradients, microbatch)."""


@dataclass(frozen=True, slots=True)
class DryRun:
    """When each step of an order ended, in the order's shape and in the unit of its costs."""

    end_times: tuple[tuple[float, ...], ...]

    @property
    def makespan(self) -> float:
        """When the last action ended."""
        return max((rank_ends[-1] for rank_ends in self.end_times if rank_ends), default=0.0)

    @property
    def max_rank_span(self) -> float:
        """From when a rank's first action ended until its last one did, on the rank that takes longest."""
        return max((rank_ends[-1] - rank_ends[0] for rank_ends in self.end_times if rank_ends), default=0.0)


class OrderLabels(Protocol):
    """What errors call an order and its parts."""

    @property
    def label(self) -> str:
        """The order."""

    def rank_label(self, rank: int) -> str:
        """What a rank runs."""

    def entry_label(self, rank: int, entry_index: int) -> str:
        """An action, by its number among those of its rank, from 0."""


@dataclass(frozen=True, slots=True)
class IndexLabels:
    """Ranks and steps as they are numbered inside, from 0."""

    label: str = "schedule"

    def rank_label(self, rank: int) -> str:
        """By its number."""
        return f"{self.label} rank {rank}"

    def entry_label(self, rank: int, entry_index: int) -> str:
        """By its number."""
        return f"{self.rank_label(rank)}, step {entry_index}"


_INDEX_LABELS: Final = IndexLabels()


def validate_order(
    order: PipelineOrder, *, placement: Placement, microbatches: int, labels: OrderLabels = _INDEX_LABELS
) -> None:
    """Raise InputError that names the rank, the action and the broken rule. places: what errors call them."""
    if len(order) != placement.pipeline_size:
        raise InputError(
            f"{labels.label} orders {len(order)} ranks, but stages are placed on {placement.pipeline_size}"
        )
    for rank, entries in enumerate(order):
        stages = placement.stages_on_rank(rank)
        for entry_index, action in _indexed_actions(entries):
            if violation := _check_rank_action(action, stages, microbatches):
                raise InputError(f"{labels.entry_label(rank, entry_index)}: {action} {violation}")
        _require_local_order(entries, rank, labels)
        if omission := next(_missing_passes(flatten_entries(entries), stages, microbatches), None):
            raise InputError(f"{labels.rank_label(rank)} {omission}")
    _require_no_deadlock(order, _simulate_order(order, _UNIT_COSTS), labels)


def _indexed_actions(entries: Sequence[ScheduleEntry]) -> Iterator[tuple[int, Action]]:
    """Every action, and the number of its step."""
    yield from ((index, action) for index, entry in enumerate(entries) for action in flatten_entry(entry))


def _check_rank_action(action: Action, stages: Sequence[int], microbatches: int) -> str:
    """Why an action is none of its rank's; empty if it is."""
    if action.stage not in stages:
        return f"is not of this rank's stages {', '.join(map(str, stages))}"
    if not 0 <= action.microbatch < microbatches:
        return f"is not of microbatches 0 to {microbatches - 1}"
    return ""


def _require_local_order(entries: Sequence[ScheduleEntry], rank: int, labels: OrderLabels) -> None:
    seen: set[Action] = set()
    for entry_index, action in _indexed_actions(entries):
        if action in seen:
            raise InputError(f"{labels.entry_label(rank, entry_index)}: {action} runs a second time")
        missing = [dependency for dependency in _local_dependencies(action) if dependency not in seen]
        if missing:
            raise InputError(f"{labels.entry_label(rank, entry_index)}: {action} runs before {missing[0]}")
        seen.add(action)


def _missing_passes(actions: Sequence[Action], stages: Sequence[int], microbatches: int) -> Iterator[str]:
    """What a rank lacks or has twice, pass by pass."""
    present = set(actions)
    for stage, microbatch in product(stages, range(microbatches)):
        forward, full_backward, input_gradient, weight_gradient = (
            Action(stage, kind, microbatch) for kind in (F, B, INPUT, WEIGHT)
        )
        halves = [half for half in (input_gradient, weight_gradient) if half in present]
        if forward not in present:
            yield f"lacks {forward}"
        elif full_backward in present and halves:
            yield f"has {full_backward} and {halves[0]}; a backward is whole, or in two halves"
        elif full_backward not in present and len(halves) < 2:
            yield (
                f"lacks {weight_gradient}"
                if halves
                else f"lacks {full_backward}, or {input_gradient} and {weight_gradient}"
            )


def _local_dependencies(action: Action) -> Iterator[Action]:
    if action.kind is not F:
        yield Action(action.stage, INPUT if action.kind is WEIGHT else F, action.microbatch)


def peak_in_flight_microbatches(order: PipelineOrder) -> tuple[int, ...]:
    """For each rank the most (stage, microbatch) pairs whose activations it keeps at once, from `F` to `B` or `W`."""
    return tuple(
        max(accumulate(_ACTIVATION_DELTA[action.kind] for action in flatten_entries(entries)), default=0)
        for entries in order
    )


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
    end_times = _simulate_order(order, cost, pair_cost=pair or 0.0)
    _require_no_deadlock(order, end_times, _INDEX_LABELS)
    return DryRun(tuple(map(tuple, end_times)))


def runs_with_paired_sends(order: PipelineOrder) -> bool:
    """Whether an order still ends where a forward's output leaves only with that of a backward right behind it."""
    order = tuple(map(flatten_entries, order))
    end_times = _simulate_order(order, _UNIT_COSTS, pairs_sends=True)
    return all(len(rank_ends) == len(entries) for entries, rank_ends in zip(order, end_times, strict=True))


def _simulate_order(
    order: PipelineOrder, cost: Mapping[ActionKind, float], *, pair_cost: float = 1.0, pairs_sends: bool = False
) -> tuple[list[float], ...]:
    """When steps end, of each rank as far as it comes. paired: as `runs_with_paired_sends` has it."""
    state = _DryRunState(cost, pair_cost, _last_stage(order), tuple([] for _ in order), pairs_sends)
    ready_ranks = list(range(len(order)))
    while ready_ranks:
        rank = ready_ranks.pop()
        ready_ranks += state.advance(rank, order[rank])
    return state.end_times


def _last_stage(order: PipelineOrder) -> int:
    """The last stage."""
    return max((action.stage for entries in order for action in flatten_entries(entries)), default=0)


@dataclass(slots=True)
class _DryRunState:
    """A dry run under way.

    pair: what a pair costs; paired: as `runs_with_paired_sends` has it; done: when an output was there; sleepers: which rank
    waits for an output.
    """

    cost: Mapping[ActionKind, float]
    pair_cost: float
    last_stage: int
    end_times: tuple[list[float], ...]
    pairs_sends: bool
    output_times: dict[_Output, float] = field(default_factory=dict)
    waiting_ranks: dict[_Output, int] = field(default_factory=dict)

    def advance(self, rank: int, entries: Sequence[ScheduleEntry]) -> list[int]:
        """Run a rank's steps up to the first that must wait; say which ranks this woke."""
        ends, woken = self.end_times[rank], []
        for index in range(len(ends), len(entries)):
            entry = entries[index]
            inputs = [
                awaited_output
                for action in flatten_entry(entry)
                for awaited_output in _awaited_outputs(action, self.last_stage)
            ]
            missing = next((item for item in inputs if item not in self.output_times), None)
            if missing is not None:
                self.waiting_ranks[missing] = rank
                break
            begin = max([ends[-1] if ends else 0.0, *(self.output_times[element] for element in inputs)])
            ends.append(begin + (self.pair_cost if isinstance(entry, OverlappedPair) else self.cost[entry.kind]))
            if not self._delays_send(entries[index : index + 2]):
                is_delayed = self._delays_send(entries[max(0, index - 1) : index + 1])
                for each in flatten_entries(entries[index - is_delayed : index + 1]):
                    woken += self._publish_output(each, ends[-1])
        return woken

    def _delays_send(self, entry_pair: Sequence[ScheduleEntry]) -> bool:
        """Whether the output of the first of two steps waits for that of the second."""
        kinds = tuple(entry.kind for entry in entry_pair if isinstance(entry, Action))
        return self.pairs_sends and kinds == (F, B)

    def _publish_output(self, action: Action, end: float) -> list[int]:
        if action.kind is WEIGHT:
            return []
        output = action.stage, action.kind is F, action.microbatch
        self.output_times[output] = end
        return [self.waiting_ranks.pop(output)] if output in self.waiting_ranks else []


def _awaited_outputs(action: Action, last_stage: int) -> list[_Output]:
    """Which output of another stage an action waits for, if any."""
    stage, kind, microbatch = action
    if kind is F:
        return [(stage - 1, True, microbatch)] if stage > 0 else []
    return [(stage + 1, False, microbatch)] if kind is not WEIGHT and stage < last_stage else []


def _require_no_deadlock(order: PipelineOrder, end_times: Sequence[Sequence[float]], labels: OrderLabels) -> None:
    """Raise InputError unless every rank came to its end."""
    done = {
        action
        for rank_ends, entries in zip(end_times, order, strict=True)
        for action in flatten_entries(entries[: len(rank_ends)])
    }
    stuck = [
        f"{labels.entry_label(rank, len(rank_ends))} ({entries[len(rank_ends)]}) waits for {_awaited_action(entries[len(rank_ends)], order, done)}"
        for rank, (entries, rank_ends) in enumerate(zip(order, end_times, strict=True))
        if len(rank_ends) < len(entries)
    ]
    if stuck:
        omitted = f"; and {len(stuck) - _MAX_STUCK_SHOWN} others wait" if len(stuck) > _MAX_STUCK_SHOWN else ""
        shown_ranks = (message.removeprefix(f"{labels.label} ") for message in stuck[:_MAX_STUCK_SHOWN])
        raise InputError(f"{labels.label} deadlocks: {'; '.join(shown_ranks)}{omitted}")


def _awaited_action(entry: ScheduleEntry, order: PipelineOrder, done: Set[Action]) -> Action:
    """Which action of another stage a step waits for; a whole backward where the order has neither form of it."""
    candidates = (
        _producing_actions(output)
        for action in flatten_entry(entry)
        for output in _awaited_outputs(action, _last_stage(order))
    )
    forms = next(candidate for candidate in candidates if done.isdisjoint(candidate))
    present = {action for entries in order for action in flatten_entries(entries)}
    return next((form for form in forms if form in present), forms[-1])


def _producing_actions(output: _Output) -> list[Action]:
    """The actions that may leave an output."""
    stage, is_forward, microbatch = output
    return [Action(stage, kind, microbatch) for kind in ((F,) if is_forward else (INPUT, B))]
