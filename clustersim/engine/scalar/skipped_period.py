"""What is one period of what a rank does, once it does the same again and again?"""

from collections.abc import Mapping
from dataclasses import dataclass

from clustersim.program.task import Stream


@dataclass(frozen=True, slots=True)
class SkippedPeriod:
    """One period of a rank.

    tasks: of the rank, streams: of each of its streams. first: the rank's first task that is not done, last: behind all
    that are done. lowest, furthest: tasks that the period is of, and that are under way.
    """

    task_count: int
    stream_task_counts: Mapping[Stream, int]
    first_undone: int
    end_done: int
    lowest_task_id: int
    highest_task_id: int
