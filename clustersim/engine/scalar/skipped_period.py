"""One period of a rank in steady state, which is skipped a number of times."""

from collections.abc import Mapping
from dataclasses import dataclass

from clustersim.program.task import Stream


@dataclass(frozen=True, slots=True)
class SkippedPeriod:
    """One period of a rank.

    task_count: tasks of the rank; stream_task_counts: of each of its streams; first_undone: its first task that
    is not done; end_done: one behind its last task that is done; lowest_task_id, highest_task_id: tasks that were
    recorded in the period or are in flight.
    """

    task_count: int
    stream_task_counts: Mapping[Stream, int]
    first_undone: int
    end_done: int
    lowest_task_id: int
    highest_task_id: int
