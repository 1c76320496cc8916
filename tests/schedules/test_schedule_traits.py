"""What schedules say of themselves is true of their orders."""

import pytest

from clustersim.program.action import ActionKind, OverlappedPair, ScheduleEntry, flatten_entries
from clustersim.schedules.overlapped_1f1b import Overlapped1F1B
from clustersim.schedules.registry import SCHEDULE_NAMES, build_schedule
from clustersim.schedules.schedule import Schedule

RANKS, MICROBATCHES = 4, 16
SCHEDULES: tuple[Schedule, ...] = (
    *map(build_schedule, SCHEDULE_NAMES),
    Overlapped1F1B(build_schedule("1f1b")),
    Overlapped1F1B(build_schedule("interleaved")),
)


def entries_of(schedule: Schedule) -> tuple[tuple[ScheduleEntry, ...], ...]:
    return schedule.order(RANKS, MICROBATCHES)


@pytest.fixture(params=SCHEDULES, ids=repr)
def schedule(request: pytest.FixtureRequest) -> Schedule:
    selected: Schedule = request.param
    return selected


def test_whole_backwards_are_those_of_which_none_is_split(schedule: Schedule) -> None:
    kinds = {action.kind for entries in entries_of(schedule) for action in flatten_entries(entries)}
    has_pairs = any(isinstance(entry, OverlappedPair) for entries in entries_of(schedule) for entry in entries)
    assert schedule.has_whole_backwards == (kinds == {ActionKind.FORWARD, ActionKind.BACKWARD} and not has_pairs)


def test_schedules_that_may_pair_passes_do(schedule: Schedule) -> None:
    has_pairs = any(isinstance(entry, OverlappedPair) for entries in entries_of(schedule) for entry in entries)
    assert schedule.may_pair_passes == has_pairs
    assert schedule.may_pair_passes or not schedule.overlaps_passes


def test_bidirectional_schedules_are_those_of_bidirectional_placements(schedule: Schedule) -> None:
    assert schedule.is_bidirectional == schedule.placement(RANKS).bidirectional


def test_rounds_pass_every_microbatch_of_a_round_through_a_chunk_before_the_next(schedule: Schedule) -> None:
    """With rounds, the first rank's second chunk begins after one forward per rank; else sooner or later."""
    forwards = [action for action in flatten_entries(entries_of(schedule)[0]) if action.kind is ActionKind.FORWARD]
    first_stage = forwards[0].stage
    until_other_chunk = next(
        (index for index, action in enumerate(forwards) if action.stage != first_stage), len(forwards)
    )
    assert (schedule.round_size(RANKS) > 1) == (until_other_chunk == RANKS)


def test_staggered_ends_are_ends_after_different_numbers_of_passes(schedule: Schedule) -> None:
    """Without bubbles between its first pass and its last, a rank's order ends with its deferred weight gradients."""
    last_kinds = [flatten_entries(entries)[-1].kind for entries in entries_of(schedule)]
    assert not schedule.ends_staggered or set(last_kinds) == {ActionKind.WEIGHT_GRADIENT}
