"""Is an order of actions a valid pipeline schedule, and how long does it take with unit costs?

For a placement of stages on p ranks and m microbatches, `validate_order` checks these rules:

1. There are p rows, one per rank, and each runs actions only of its own stages, and only of microbatches 0 to
   m-1.
2. No action occurs twice. Each stage and microbatch has one forward `F`, and either one full backward `B` or
   its two halves `I` (input gradient) and `W` (weight gradient).
3. On its rank `F` comes before `B` or `I`, and `I` before `W`.
4. The ranks do not deadlock: `F` of stage s waits for `F` of s-1, `B` or `I` of stage s for `B` or `I` of
   s+1, and a dry run with these dependencies ends. Messages take no time and buffers are unlimited. An
   overlapped pair waits for the dependencies of both its passes, and the outputs of both are sent at its end.

Reference: torch.distributed.pipelining.schedules `_validate_schedule` and `_simulate_comms_compute`.
"""

from collections.abc import Callable, Iterator, Sequence, Set
from dataclasses import dataclass, field
from itertools import product
from typing import Final, Protocol

from clustersim.common.errors import InputError
from clustersim.program.action import (
    Action,
    ActionKind,
    PipelineOrder,
    ScheduleEntry,
    flatten_entries,
    flatten_entry,
)
from clustersim.program.placement import Placement

F, B = ActionKind.FORWARD, ActionKind.BACKWARD
INPUT, WEIGHT = ActionKind.INPUT_GRADIENT, ActionKind.WEIGHT_GRADIENT
_MAX_STUCK_SHOWN: Final = 3  # maximum number of ranks listed in a deadlock message

_Output = tuple[int, bool, int]
"""Output of an action for another stage: (stage, whether activation rather than gradient, microbatch)."""


@dataclass(frozen=True, slots=True)
class OrderCosts:
    """Costs of an order.

    entry: of an action or overlapped pair; message: until an action's output is at another stage, None: no time.
    sender_waits: a rank goes on once its messages have arrived.
    """

    entry: Callable[[ScheduleEntry], float]
    message: Callable[[Action], float] | None = None
    sender_waits: bool = False


_UNIT_COSTS: Final = OrderCosts(lambda _: 1.0)


@dataclass(frozen=True, slots=True)
class DryRun:
    """End time of each entry of an order, in the order's shape and in the unit of its costs."""

    end_times: tuple[tuple[float, ...], ...]

    @property
    def makespan(self) -> float:
        """End time of the last action."""
        return max((rank_ends[-1] for rank_ends in self.end_times if rank_ends), default=0.0)

    @property
    def max_rank_span(self) -> float:
        """Longest time, over ranks, between the end of a rank's first entry and the end of its last."""
        return max((rank_ends[-1] - rank_ends[0] for rank_ends in self.end_times if rank_ends), default=0.0)


class OrderLabels(Protocol):
    """Labels of an order and its entries in error messages."""

    @property
    def label(self) -> str:
        """Label of the order."""

    def rank_label(self, rank: int) -> str:
        """Label of a rank."""

    def entry_label(self, rank: int, entry_index: int) -> str:
        """Label of an entry, by its index on the rank, from 0."""


@dataclass(frozen=True, slots=True)
class IndexLabels:
    """Labels by rank and entry index, from 0."""

    label: str = "schedule"

    def rank_label(self, rank: int) -> str:
        """Label of a rank."""
        return f"{self.label} rank {rank}"

    def entry_label(self, rank: int, entry_index: int) -> str:
        """Label of an entry."""
        return f"{self.rank_label(rank)}, step {entry_index}"


_INDEX_LABELS: Final = IndexLabels()


def validate_order(
    order: PipelineOrder, *, placement: Placement, microbatches: int, labels: OrderLabels = _INDEX_LABELS
) -> None:
    """Raise InputError that names the rank, the action and the violated rule. labels: of the order in the message."""
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
    """Every action with the index of its entry."""
    yield from ((index, action) for index, entry in enumerate(entries) for action in flatten_entry(entry))


def _check_rank_action(action: Action, stages: Sequence[int], microbatches: int) -> str:
    """Reason why an action does not belong to its rank; empty if it does."""
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
    """Violations of rule 2 on a rank, pass by pass."""
    present = set(actions)
    for stage, microbatch in product(stages, range(microbatches)):
        forward, full_backward, input_gradient, weight_gradient = (
            Action(stage, kind, microbatch) for kind in (F, B, INPUT, WEIGHT)
        )
        halves = [half for half in (input_gradient, weight_gradient) if half in present]
        if forward not in present:
            yield f"has no {forward}"
        elif full_backward in present and halves:
            yield f"has {full_backward} and {halves[0]}; a backward is whole, or in two halves"
        elif full_backward not in present and len(halves) < 2:
            yield (
                f"has no {weight_gradient}"
                if halves
                else f"has neither {full_backward} nor {input_gradient} and {weight_gradient}"
            )


def _local_dependencies(action: Action) -> Iterator[Action]:
    if action.kind is not F:
        yield Action(action.stage, INPUT if action.kind is WEIGHT else F, action.microbatch)


def dry_run(
    order: PipelineOrder,
    *,
    forward: float = 1.0,
    backward: float = 2.0,
    weight: float | None = None,
    pair: float | None = None,
) -> DryRun:
    """Simulate an order with these costs per action; raise InputError on a deadlock.

    weight: of `W`, None: half a backward; `I` takes the remainder of a backward. pair: of an overlapped forward
    and backward, None: the passes of pairs run in sequence, and `end_times` has an entry for each of them.
    """
    weight = backward / 2 if weight is None else weight
    cost = {F: forward, B: backward, INPUT: backward - weight, WEIGHT: weight}
    order = tuple(map(flatten_entries, order)) if pair is None else order
    return run_order(order, OrderCosts(lambda entry: cost[entry.kind] if isinstance(entry, Action) else pair or 0.0))


def run_order(order: PipelineOrder, costs: OrderCosts) -> DryRun:
    """Simulate an order; raise InputError on a deadlock."""
    end_times = _simulate_order(order, costs)
    _require_no_deadlock(order, end_times, _INDEX_LABELS)
    return DryRun(tuple(map(tuple, end_times)))


def runs_with_paired_sends(order: PipelineOrder) -> bool:
    """Whether an order still completes if a forward's output is sent only with that of a backward right behind it."""
    order = tuple(map(flatten_entries, order))
    end_times = _simulate_order(order, _UNIT_COSTS, pairs_sends=True)
    return all(len(rank_ends) == len(entries) for entries, rank_ends in zip(order, end_times, strict=True))


def _simulate_order(order: PipelineOrder, costs: OrderCosts, *, pairs_sends: bool = False) -> tuple[list[float], ...]:
    """End times of each rank's entries, up to a deadlock. pairs_sends: as `runs_with_paired_sends` defines it."""
    state = _DryRunState(costs, _last_stage(order), tuple([] for _ in order), pairs_sends)
    ready_ranks = list(range(len(order)))
    while ready_ranks:
        rank = ready_ranks.pop()
        ready_ranks += state.advance(rank, order[rank])
    return state.end_times


def _last_stage(order: PipelineOrder) -> int:
    """Index of the last stage."""
    return max((stage for entries in order for stage, _, _ in flatten_entries(entries)), default=0)


@dataclass(slots=True)
class _DryRunState:
    """State of a dry run.

    pairs_sends: as in `runs_with_paired_sends`; output_times: when each output
    became available; waiting_ranks: the rank that waits for an output.
    """

    costs: OrderCosts
    last_stage: int
    end_times: tuple[list[float], ...]
    pairs_sends: bool
    output_times: dict[_Output, float] = field(default_factory=dict)
    waiting_ranks: dict[_Output, int] = field(default_factory=dict)

    def advance(self, rank: int, entries: Sequence[ScheduleEntry]) -> list[int]:
        """Run a rank's entries up to the first that must wait; return the ranks that this woke."""
        ends, woken = self.end_times[rank], list[int]()
        now = ends[-1] if ends else 0.0
        output_times, waiting_ranks, last_stage, costs = (
            self.output_times,
            self.waiting_ranks,
            self.last_stage,
            self.costs,
        )
        for index in range(len(ends), len(entries)):
            entry = entries[index]
            actions = flatten_entry(entry)
            for action in actions:
                awaited = _awaited_output(action, last_stage)
                if awaited is None:
                    continue
                available = output_times.get(awaited)
                if available is None:
                    waiting_ranks[awaited] = rank
                    return woken
                now = max(now, available)
            sent = now = now + costs.entry(entry)
            for done_action in self._sent_with(entries, index) if self.pairs_sends else actions:
                message = 0.0 if costs.message is None else costs.message(done_action)
                now += message if costs.sender_waits else 0.0
                stage, kind, microbatch = done_action
                if kind is not WEIGHT:
                    output = stage, kind is F, microbatch
                    output_times[output] = sent + message
                    if output in waiting_ranks:
                        woken.append(waiting_ranks.pop(output))
            ends.append(now)
        return woken

    def _sent_with(self, entries: Sequence[ScheduleEntry], index: int) -> Sequence[Action]:
        """The actions whose outputs are sent once an entry has run, where sends are paired."""
        if self._delays_send(entries[index : index + 2]):
            return ()
        is_delayed = self._delays_send(entries[max(0, index - 1) : index + 1])
        return flatten_entries(entries[index - is_delayed : index + 1])

    def _delays_send(self, entry_pair: Sequence[ScheduleEntry]) -> bool:
        """Whether the output of the first of two entries is sent with that of the second."""
        return [entry.kind for entry in entry_pair if isinstance(entry, Action)] == [F, B]


def _awaited_output(action: Action, last_stage: int) -> _Output | None:
    """The output of another stage that an action waits for, if there is one."""
    stage, kind, microbatch = action
    if kind is F:
        return (stage - 1, True, microbatch) if stage > 0 else None
    return (stage + 1, False, microbatch) if kind is not WEIGHT and stage < last_stage else None


def _require_no_deadlock(order: PipelineOrder, end_times: Sequence[Sequence[float]], labels: OrderLabels) -> None:
    """Raise InputError unless every rank completed."""
    if all(len(rank_ends) == len(entries) for entries, rank_ends in zip(order, end_times, strict=True)):
        return
    done = {
        action
        for rank_ends, entries in zip(end_times, order, strict=True)
        for action in flatten_entries(entries[: len(rank_ends)])
    }
    stuck = [
        f"{labels.entry_label(rank, len(rank_ends))} ({entries[len(rank_ends)]}) waits for "
        f"{_awaited_action(entries[len(rank_ends)], order, done)}"
        for rank, (entries, rank_ends) in enumerate(zip(order, end_times, strict=True))
        if len(rank_ends) < len(entries)
    ]
    omitted = f"; and {len(stuck) - _MAX_STUCK_SHOWN} others wait" if len(stuck) > _MAX_STUCK_SHOWN else ""
    shown_ranks = (message.removeprefix(f"{labels.label} ") for message in stuck[:_MAX_STUCK_SHOWN])
    raise InputError(f"{labels.label} deadlocks: {'; '.join(shown_ranks)}{omitted}")


def _awaited_action(entry: ScheduleEntry, order: PipelineOrder, done: Set[Action]) -> Action:
    """The action of another stage that an entry waits for; a full backward where the order has neither form of it."""
    candidates = (
        _producing_actions(output)
        for action in flatten_entry(entry)
        if (output := _awaited_output(action, _last_stage(order))) is not None
    )
    forms = next(candidate for candidate in candidates if done.isdisjoint(candidate))
    present = {action for entries in order for action in flatten_entries(entries)}
    return next((form for form in forms if form in present), forms[-1])


def _producing_actions(output: _Output) -> list[Action]:
    """The actions that may produce an output."""
    stage, is_forward, microbatch = output
    return [Action(stage, kind, microbatch) for kind in ((F,) if is_forward else (INPUT, B))]
