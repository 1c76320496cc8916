"""What do pipeline ranks hold, and how large is a schedule's bubble, for any number of microbatches?

The package's own order is dry-run. Once every rank is in steady state, one more microbatch per pipeline
rank adds as much as the last ones did, so two microbatch counts determine all larger ones with the same
remainder. Orders with several chunks are regular only if pipeline ranks divide the microbatches; others are
dry-run in full.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from operator import le
from typing import Any, Final

from clustersim.common.errors import InputError
from clustersim.common.lru import lru_memoize
from clustersim.model.presets import load_preset
from clustersim.model.training import Training
from clustersim.parallel.layout import Layout
from clustersim.parallel.plan import Plan
from clustersim.planning.explorer.settings import ExplorerSpace, chunk_count
from clustersim.program.action import FORWARD, Action, flatten_entries
from clustersim.results.explorer_tables import LookupTable
from clustersim.scenario.validation_rules.consistency import MAX_PASSES, check_batch
from clustersim.schedules.schedule import Schedule
from clustersim.schedules.validation import dry_run

_BUBBLE_MICROBATCHES: Final = tuple(2**power for power in range(11))
"""Microbatch counts at which the page draws the bubble."""
_STEADY_PER_RANK: Final = 3  # microbatches per pipeline rank from warm-up to steady state, in which none is reduced
_FORWARD_TIME, _BACKWARD_TIME = 1.0, 2.0  # relative durations in a bubble of equal stages
PeakState = tuple[int, ...]
PeakCandidate = list[int]
"""A moment of a rank as integers.

Which of its stages runs backward; the number of microbatches that each stage holds; for each stage 1 from its
first backward to its last, that is while gradients are accumulated; 1 once a stage has begun its last.
"""


@dataclass(frozen=True, slots=True)
class ScheduleRun:
    """A dry run. makespan: of the step, in units of a forward; held: for each pipeline rank its peak candidates."""

    makespan: float
    held: list[list[PeakCandidate]]

    def bubble(self, passes: int) -> float:
        """Share of the step in which a rank waits, if it runs this many forwards and backwards."""
        return 1 - passes * (_FORWARD_TIME + _BACKWARD_TIME) / self.makespan

    def extrapolate(self, previous: "ScheduleRun", times: int) -> "ScheduleRun":
        """Extrapolate: add `times` times the difference from `previous`."""
        held = [
            [
                [count + times * (count - previous_count) for count, previous_count in zip(*pair, strict=True)]
                for pair in zip(*ranks, strict=True)
            ]
            for ranks in zip(self.held, previous.held, strict=True)
        ]
        return ScheduleRun(self.makespan + times * (self.makespan - previous.makespan), held)


def build_schedule_tables(space: ExplorerSpace) -> tuple[LookupTable, LookupTable]:
    """Tables of bubble and held microbatches by schedule, and of the messages of those that cannot run."""
    axes = {key: space.setting_values[key] for key in ("schedule", "chunks", "pp")}
    axes["microbatches"] = tuple(sorted({*space.setting_values["microbatches"], *_BUBBLE_MICROBATCHES}))
    max_stages = (
        max(model.layer_count for model in space.models) + 2
    )  # stages: the first and the last may have no layers

    def runnable_schedule(schedule: str, chunks: int, pp: int, microbatches: int) -> Schedule | None:
        """The schedule if it has this many chunks and its stages and passes are not too many, else None."""
        candidate = space.schedule_with({"schedule": schedule, "chunks": chunks})
        is_in_range = pp in space.feasible_pp_degrees and pp * chunks <= max_stages
        return (
            candidate
            if is_in_range and chunk_count(candidate) == chunks and pp * chunks * microbatches <= MAX_PASSES
            else None
        )

    def schedule_entry(**settings: Any) -> dict[str, Any] | None:
        schedule, pp, microbatches = runnable_schedule(**settings), settings["pp"], settings["microbatches"]
        if schedule is None or (chunk_count(schedule) > 1 and pp == 1):
            return None
        try:
            run = run_or_extrapolate(schedule, pp, microbatches)
        except InputError:
            return None
        return {"bubble": run.bubble(microbatches * chunk_count(schedule)), "held": run.held}

    def rejection_messages(**settings: Any) -> list[str] | None:
        schedule, pp, microbatches = runnable_schedule(**settings), settings["pp"], settings["microbatches"]
        if schedule is None or (pp > 1 and extrapolation_base(schedule, pp, microbatches)):
            return None
        return [*check_batch(space.scenario_with(**settings, batch=microbatches))] or None

    return LookupTable.tabulate(schedule_entry, **axes), LookupTable.tabulate(rejection_messages, **axes)


def run_or_extrapolate(schedule: Schedule, pp: int, microbatches: int) -> ScheduleRun:
    """The dry run of a step, or its extrapolation from fewer microbatches."""
    base_count = extrapolation_base(schedule, pp, microbatches)
    if not base_count:
        return dry_run_schedule(schedule, pp, microbatches)
    return dry_run_schedule(schedule, pp, base_count + pp).extrapolate(
        dry_run_schedule(schedule, pp, base_count), (microbatches - base_count) // pp - 1
    )


def extrapolation_base(schedule: Schedule, pp: int, microbatches: int) -> int:
    """The smallest microbatch count n from which the step follows, given n and n + pp microbatches; 0 if none."""
    base_count = _STEADY_PER_RANK * pp + microbatches % pp
    return (
        base_count if base_count + pp < microbatches and (chunk_count(schedule) == 1 or microbatches % pp == 0) else 0
    )


@lru_memoize(20_000)
def dry_run_schedule(schedule: Schedule, pp: int, microbatches: int) -> ScheduleRun:
    """Dry-run a step in full; cached, since settings have the same few orders."""
    order = schedule.order(pp, microbatches)
    plan = Plan(load_preset("llama-tiny"), Training(1, microbatches), Layout(pp=pp), schedule.placement)
    slots = [{stage.index: slot for slot, stage in enumerate(plan.stages_on_rank(rank))} for rank in range(pp)]
    held = [_peak_candidates(flatten_entries(entries), slot) for entries, slot in zip(order, slots, strict=True)]
    return ScheduleRun(dry_run(order, forward=_FORWARD_TIME, backward=_BACKWARD_TIME).makespan, held)


def _peak_candidates(actions: Sequence[Action], slots: Mapping[int, int]) -> list[PeakCandidate]:
    """States when backwards begin, without those dominated by another backward of the same stage."""
    held, accumulating, is_reducing = [0] * len(slots), [0] * len(slots), 0
    remaining = Counter(slots[stage] for stage, kind, _ in actions if kind is not FORWARD)
    states: dict[int, set[PeakState]] = {slot: set() for slot in sorted(slots.values())}
    for stage, kind, _ in actions:
        slot = slots[stage]
        if kind is FORWARD:
            held[slot] += 1
            continue
        remaining[slot] -= 1
        accumulating[slot] = 1
        if not remaining[slot]:
            is_reducing = 1
        states[slot].add((slot, *held, *accumulating, is_reducing))
        held[slot] -= 1
        if not remaining[slot]:
            accumulating[slot] = 0
    return [[*state] for slot_states in states.values() for state in _pareto_states(slot_states)]


def _pareto_states(states: set[PeakState]) -> list[PeakState]:
    """States that can be the memory peak for some stage sizes: neither dominated nor midway between others."""
    maximal: list[PeakState] = []
    for state in sorted(states, key=sum, reverse=True):
        for other in maximal:
            if all(map(le, state, other)):
                break
        else:
            maximal.append(state)
    maximal.sort()
    ends = {0, len(maximal) - 1}
    return [
        candidate
        for index, candidate in enumerate(maximal)
        if index in ends or not _is_midpoint(*maximal[index - 1 : index + 2])
    ]


def _is_midpoint(previous: PeakState, state: PeakState, following: PeakState) -> bool:
    return all(2 * b == a + c for a, b, c in zip(previous, state, following, strict=True))
