"""Steady-state detection and fast-forward: periods that repeat are recorded again instead of being simulated.

Microbatch after microbatch and layer after layer, a steady step repeats itself. One rank is observed:
whenever it ends a task that occurs once per period, and all other events of that instant are processed, the
records since the last such time are compared with those of the period before (`period_comparison`). If they
are equal up to the shift, and every stream advanced by the same number of tasks in both periods, the
simulator state is periodic: the same operations are in flight with the same elapsed time. (A stream that
advanced reached its head within the period, so everything that the head depends on was compared. A stream
that did not advance waits for a task, or for a rank, that is yet to come.) What happens next depends on
nothing else, so it repeats the period, as long as the tasks do. That many periods are skipped: streams
advance to the tasks of the later period, operations in flight become those of that period, and the recorder
notes the repetition.

Where links are shared during computation a step may never be exactly steady: DeepSeek-V3's best layouts
repeat every 13 microbatches, except for a drift of a microsecond. Then nothing is skipped.

Nothing is skipped with jitter, with background traffic, where ranks synchronize inside segments, or without
coalescing.

Law (tests/laws/test_steady_state.py): the trace equals that of simulating all events, except for rounding.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

import numpy as np

from clustersim.common.arrays import IntArray
from clustersim.engine.fast_forward.period_comparison import PeriodComparison, Snapshot
from clustersim.engine.recording.recorder import RANK, RELATIVE_ROUNDING, TASK
from clustersim.engine.scalar.rank_process import RankProcess, StreamCursor
from clustersim.engine.scalar.shared_state import SharedState
from clustersim.engine.scalar.skipped_period import SkippedPeriod
from clustersim.program.loops import MIN_SAVED_TASKS
from clustersim.program.task import Stream

_MICROBATCHES: Final = 0
_LAYERS: Final = 1
"""Loop levels: periods are microbatches, or the layers within them."""


def watch_steady_state(shared: SharedState, ranks: Sequence[RankProcess]) -> None:
    """Install a detector on the rank with most tasks, where a steady state is possible."""
    has_background = shared.contention_map is not None and shared.contention_map.background
    observed = max(ranks, key=lambda rank: len(rank.done))
    if shared.jitter is None and shared.coalesce and not has_background and len(observed.done) > MIN_SAVED_TASKS:
        observed.mark_levels = _mark_levels(shared, observed.rank_id)
        observed.on_mark = SteadyStateDetector(shared, ranks).notify


def _mark_levels(shared: SharedState, rank_id: int) -> dict[int, int]:
    """Compute tasks that occur once per period, with the level of the loop."""
    program = shared.rank_program(rank_id)
    outer_loops, inner_loops = program.loops
    levels: dict[int, int] = {}
    is_spmd = len(shared.program.programs) == 1  # otherwise other ranks may be in other layers
    for level, loops in ((_LAYERS, inner_loops if is_spmd else ()), (_MICROBATCHES, outer_loops)):
        for loop in loops:
            task_ids = range(loop.begin, loop.end)
            first_compute = next(
                (task_id for task_id in task_ids if program.streams[task_id] is Stream.COMPUTE), loop.end
            )
            levels |= dict.fromkeys(range(first_compute, loop.end, loop.period), level)
    return levels


@dataclass(slots=True)
class SteadyStateDetector:
    """The latest snapshots of each loop level."""

    shared: SharedState
    ranks: Sequence[RankProcess]
    _cursors: list[StreamCursor] = field(init=False)
    _pending_levels: set[int] = field(init=False, default_factory=set)
    _snapshots: tuple[list[Snapshot], ...] = field(init=False, default_factory=lambda: ([], []))
    _break_cache: dict[tuple[int, int], IntArray] = field(init=False, default_factory=dict)

    def __post_init__(self) -> None:
        self._cursors = [cursor for rank in self.ranks for cursor in rank.cursors.values()]

    def notify(self, level: int) -> None:
        """A task that occurs once per period has ended."""
        if not self._pending_levels:
            self.shared.environment.call_at_end_of_instant(self._check_levels)
        self._pending_levels.add(level)

    def _check_levels(self) -> None:
        """Check the levels that were notified, if nothing else is due at this instant.

        Otherwise try again at its end.
        """
        levels, self._pending_levels = self._pending_levels, set()
        if not self.shared.environment.instant_is_over:
            for level in levels:
                self.notify(level)
        elif (
            not self.shared.recorder.sync_participants
        ):  # ranks that synchronize inside segments end them at different times
            for level in sorted(levels):
                if self._take_snapshot(self._snapshots[level]):
                    for snapshots in self._snapshots[level:]:  # inner loops of a skipped range start again
                        snapshots.clear()

    def _take_snapshot(self, snapshots: list[Snapshot]) -> bool:
        """Take a snapshot, and skip periods if the last two were equal; return whether any were skipped."""
        environment, recorder = self.shared.environment, self.shared.recorder
        positions, repetition_count = [cursor.position for cursor in self._cursors], len(recorder.repetitions)
        snapshots.append(
            Snapshot(
                environment.now,
                recorder.skipped_seconds,
                recorder.unrolled_sizes,
                recorder.recorded_sizes,
                repetition_count,
                positions,
            )
        )
        del snapshots[:-3]
        return len(snapshots) == 3 and self._skip_periods(*snapshots)

    def _skip_periods(self, first: Snapshot, second: Snapshot, third: Snapshot) -> bool:
        """Skip as many periods as follow that equal the last one; return whether any were skipped."""
        differs = abs(third.now - 2.0 * second.now + first.now) > RELATIVE_ROUNDING * third.now
        if differs or not self._progress_is_periodic(first, second, third):
            return False
        comparison = PeriodComparison(
            self.shared.recorder, (first, second, third), 1 + max(rank.rank_id for rank in self.ranks)
        )
        task_offsets = comparison.task_offsets()
        if task_offsets is None:
            return False
        rank_periods = self._rank_periods(comparison, task_offsets)
        count = min(self._period_count(rank, period) for rank, period in zip(self.ranks, rank_periods, strict=True))
        if count * comparison.period_sizes.spans < MIN_SAVED_TASKS:
            return False
        first_task_ids = np.zeros_like(task_offsets)
        first_task_ids[[rank.rank_id for rank in self.ranks]] = [period.lowest_task_id for period in rank_periods]
        repetition = comparison.create_repetition(count, task_offsets, first_task_ids)
        for rank, period in zip(self.ranks, rank_periods, strict=True):
            rank.skip_periods(period, repetition)
        self.shared.recorder.add_repetition(repetition)
        return True

    def _progress_is_periodic(self, first: Snapshot, second: Snapshot, third: Snapshot) -> bool:
        """Whether all streams advanced equally in both periods, and those that did not advance are waiting."""
        if any(
            n - b != b - a
            for a, b, n in zip(first.stream_positions, second.stream_positions, third.stream_positions, strict=True)
        ):
            return False
        positions = iter(zip(second.stream_positions, third.stream_positions, strict=True))
        return all(
            late != early
            or cursor.in_rendezvous
            or cursor.position == len(cursor.task_ids)
            or rank.unmet_dependencies(cursor)
            for rank in self.ranks
            for cursor, (early, late) in zip(rank.cursors.values(), positions, strict=False)
        )

    def _rank_periods(self, comparison: PeriodComparison, task_offsets: IntArray) -> list[SkippedPeriod]:
        """One period of each rank."""
        spans, earlier = comparison.period_spans(), iter(comparison.snapshots[1].stream_positions)
        rank_periods = []
        for rank in self.ranks:
            streams = {stream: cursor.position - next(earlier) for stream, cursor in rank.cursors.items()}
            task_ids = spans[spans[:, RANK] == rank.rank_id, TASK].astype(np.int64)
            rank_periods.append(_rank_period(rank, int(task_offsets[rank.rank_id]), streams, task_ids))
        return rank_periods

    def _period_count(self, rank: RankProcess, period: SkippedPeriod) -> int:
        """How often a rank's tasks repeat the last period, before any that an idle stream waits for."""
        if not period.task_count:
            return len(rank.done)
        breaks = self._find_breaks(rank, period.task_count)
        index = int(np.searchsorted(breaks, period.lowest_task_id))
        idle_cursors = (cursor for stream, cursor in rank.cursors.items() if not period.stream_task_counts[stream])
        ends = [
            len(rank.done),
            *breaks[index : index + 1].tolist(),
            *(dependency for cursor in idle_cursors for dependency in rank.unmet_dependencies(cursor)),
        ]
        count: int = (min(ends) - 1 - period.highest_task_id) // period.task_count
        return max(count, 0)

    def _find_breaks(self, rank: RankProcess, period: int) -> IntArray:
        """Task ids of a rank that differ from those one period before."""
        program_index = int(self.shared.program.program_index[rank.rank_id])
        if (program_index, period) not in self._break_cache:
            signatures = self.shared.program.programs[program_index].task_signatures
            self._break_cache[program_index, period] = (
                np.flatnonzero(signatures[period:] != signatures[:-period]) + period
            )
        return self._break_cache[program_index, period]


def _rank_period(
    rank: RankProcess, task_count: int, stream_task_counts: Mapping[Stream, int], task_ids: IntArray
) -> SkippedPeriod:
    """One period of a rank. task_ids: tasks that were recorded in it."""
    active_cursors = [
        cursor
        for stream, cursor in rank.cursors.items()
        if stream_task_counts[stream] and cursor.position < len(cursor.task_ids)
    ]
    in_flight = [cursor.task_ids[cursor.position] for cursor in active_cursors]
    lowest, highest = int(task_ids.min(initial=len(rank.done))), int(task_ids.max(initial=-1))
    first = min([lowest, *in_flight])
    next_undone = rank.done.find(0, first)
    first = next_undone if next_undone >= 0 else len(rank.done)
    return SkippedPeriod(
        task_count=task_count,
        stream_task_counts=stream_task_counts,
        first_undone=first,
        end_done=max(highest + 1, first),
        lowest_task_id=lowest,
        highest_task_id=max([highest, *in_flight]),
    )
