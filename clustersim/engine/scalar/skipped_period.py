"""What is one period of what a rank does, once it does the same again and again?"""

from collections.abc import Mapping
from dataclasses import dataclass

from clustersim.program.task import Stream


@dataclass(frozen=True, slots=True)
class Skipped:
    """One period of a rank.

    tasks: of the rank, streams: of each of its streams. first: the rank's first task that is not done, last: behind all
    that are done. lowest, furthest: tasks that the period is of, and that are under way.
    """

    tasks: int
    streams: Mapping[Stream, int]
    first: int
    last: int
    lowest: int
    furthest: int
