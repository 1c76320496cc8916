"""What do pipeline ranks hold, and how large is a schedule's bubble, for any number of microbatches?

The package's order is played. Once every rank is in its steady state, a microbatch for each pipeline rank more adds as
much as the last ones did; so two numbers of microbatches are played for all larger ones that leave the same remainder.
Orders of several chunks are regular only where pipeline ranks divide the microbatches; others are played in full.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from operator import le
from typing import Any, Final

from clustersim.common.errors import InputError
from clustersim.model.presets import load_preset
from clustersim.model.training import Training
from clustersim.parallel.layout import Layout
from clustersim.parallel.plan import Plan
from clustersim.planning.explorer.settings import ExplorerSpace, chunk_count
from clustersim.program.action import Action, ActionKind, flatten_entries
from clustersim.results.explorer_tables import LookupTable
from clustersim.scenario.validation_rules.consistency import MAX_PASSES, check_batch
from clustersim.schedules.schedule import Schedule
from clustersim.schedules.validation import dry_run

_BUBBLE_MICROBATCHES: Final = tuple(2**power for power in range(11))
"""Microbatches at which the page draws the bubble."""
_STEADY_PER_RANK: Final = 2  # times as many microbatches as pipeline ranks
_FORWARD, _BACKWARD = 1.0, 2.0  # as long as these take in a bubble of equal stages
PeakCandidate = list[int]
"""Which of a rank's stages runs backward, then the microbatches that each of them holds."""


@dataclass(frozen=True, slots=True)
class ScheduleRun:
    """finish: of the step, in forwards; held: for each pipeline rank its moments."""

    makespan: float
    held: list[list[PeakCandidate]]

    def bubble(self, passes: int) -> float:
        """The share of the step in which a rank waits for others, which runs so many forwards and backwards."""
        return 1 - passes * (_FORWARD + _BACKWARD) / self.makespan

    def extrapolate(self, previous: "ScheduleRun", times: int) -> "ScheduleRun":
        """As much further, `times` over, as this is from `before`."""
        held = [
            [
                [count + times * (count - previous_count) for count, previous_count in zip(*pair, strict=True)]
                for pair in zip(*ranks, strict=True)
            ]
            for ranks in zip(self.held, previous.held, strict=True)
        ]
        return ScheduleRun(self.makespan + times * (self.makespan - previous.makespan), held)


ScheduleRunner = Callable[[Schedule, int, int], ScheduleRun]


def build_schedule_tables(space: ExplorerSpace) -> tuple[LookupTable, LookupTable]:
    """What schedules do with microbatches, and the sentences of those that cannot run so many."""
    axes = {key: space.setting_values[key] for key in ("schedule", "chunks", "pp")}
    axes["microbatches"] = tuple(sorted({*space.setting_values["microbatches"], *_BUBBLE_MICROBATCHES}))
    max_stages = (
        max(model.layer_count for model in space.models) + 2
    )  # stages: the first and the last can do without layers
    run_cache: dict[tuple[Schedule, int, int], ScheduleRun] = {}

    def runnable_schedule(schedule: str, chunks: int, pp: int, microbatches: int) -> Schedule | None:
        """The schedule, where it is one with so many chunks and there are not too many stages and passes."""
        candidate = space.schedule_with({"schedule": schedule, "chunks": chunks})
        is_in_range = pp in space.feasible_pp_degrees and pp * chunks <= max_stages
        return (
            candidate
            if is_in_range and chunk_count(candidate) == chunks and pp * chunks * microbatches <= MAX_PASSES
            else None
        )

    def cached_run(*run_key: Any) -> ScheduleRun:
        if run_key not in run_cache:
            run_cache[run_key] = dry_run_schedule(*run_key)
        return run_cache[run_key]

    def schedule_entry(**settings: Any) -> dict[str, Any] | None:
        schedule, pp, microbatches = runnable_schedule(**settings), settings["pp"], settings["microbatches"]
        if schedule is None or (chunk_count(schedule) > 1 and pp == 1):
            return None
        try:
            run = run_or_extrapolate(schedule, pp, microbatches, cached_run)
        except InputError:
            return None
        return {"bubble": run.bubble(microbatches * chunk_count(schedule)), "held": run.held}

    def rejection_messages(**settings: Any) -> list[str] | None:
        schedule, pp, microbatches = runnable_schedule(**settings), settings["pp"], settings["microbatches"]
        if schedule is None or (pp > 1 and extrapolation_base(schedule, pp, microbatches)):
            return None
        return [*check_batch(space.scenario_with(**settings, batch=microbatches))] or None

    return LookupTable.tabulate(schedule_entry, **axes), LookupTable.tabulate(rejection_messages, **axes)


def run_or_extrapolate(schedule: Schedule, pp: int, microbatches: int, runner: ScheduleRunner) -> ScheduleRun:
    """What a step does, played or as what follows from fewer microbatches."""
    base_count = extrapolation_base(schedule, pp, microbatches)
    if not base_count:
        return runner(schedule, pp, microbatches)
    return runner(schedule, pp, base_count + pp).extrapolate(
        runner(schedule, pp, base_count), (microbatches - base_count) // pp - 1
    )


def extrapolation_base(schedule: Schedule, pp: int, microbatches: int) -> int:
    """The fewest microbatches from which, and from as many and one for each pipeline rank, these follow; or 0."""
    base_count = _STEADY_PER_RANK * pp + microbatches % pp
    return (
        base_count if base_count + pp < microbatches and (chunk_count(schedule) == 1 or microbatches % pp == 0) else 0
    )


def dry_run_schedule(schedule: Schedule, pp: int, microbatches: int) -> ScheduleRun:
    """Play a step in full."""
    order = schedule.order(pp, microbatches)
    plan = Plan(load_preset("llama-tiny"), Training(1, microbatches), Layout(pp=pp), schedule.placement)
    slots = [{stage.index: slot for slot, stage in enumerate(plan.stages_on_rank(rank))} for rank in range(pp)]
    held = [_peak_candidates(flatten_entries(entries), slot) for entries, slot in zip(order, slots, strict=True)]
    return ScheduleRun(dry_run(order, forward=_FORWARD, backward=_BACKWARD).makespan, held)


def _peak_candidates(actions: Sequence[Action], slots: Mapping[int, int]) -> list[PeakCandidate]:
    """When a rank's backwards begin, but for moments at which another backward of the stage meets as much or more."""
    held = [0] * len(slots)
    states: set[tuple[int, ...]] = set()
    for action in actions:
        slot = slots[action.stage]
        if action.kind is ActionKind.FORWARD:
            held[slot] += 1
        else:
            states.add((slot, *held))
            held[slot] -= 1
    return [
        [*state] for slot in sorted(slots.values()) for state in _pareto_states({m for m in states if m[0] == slot})
    ]


def _pareto_states(states: set[tuple[int, ...]]) -> list[tuple[int, ...]]:
    """Those of which one is the fullest, however large stages are: none holds as much or more, nor do two around it."""
    maximal: list[tuple[int, ...]] = []
    for state in sorted(states, key=sum, reverse=True):
        if not any(all(map(le, state, other)) for other in maximal):
            maximal.append(state)
    maximal.sort()
    ends = {0, len(maximal) - 1}
    return [
        candidate
        for index, candidate in enumerate(maximal)
        if index in ends or not _is_midpoint(*maximal[index - 1 : index + 2])
    ]


def _is_midpoint(previous: tuple[int, ...], state: tuple[int, ...], following: tuple[int, ...]) -> bool:
    return all(2 * b == a + c for a, b, c in zip(previous, state, following, strict=True))
