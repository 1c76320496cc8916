"""How far is a simulation? Whoever wants to know asks, so the engine does nothing for it.

The answer is the tasks that are done of those of all simulated ranks. It may be asked from another thread: counting
reads what the engine writes.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class TaskProgress:
    """done_flags: for each rank, or batch of ranks with equal programs, whether each task is done."""

    done_flags: tuple[Sequence[int], ...]

    @property
    def task_count(self) -> int:
        """Number of tasks to do."""
        return sum(map(len, self.done_flags))

    @property
    def done_count(self) -> int:
        """Number of tasks that are done."""
        return sum(flags.count(1) for flags in self.done_flags)


ProgressWatcher = Callable[[TaskProgress], None]
"""Is given the progress when a simulation begins, to ask for it until it ends."""


def ignore_progress(progress: TaskProgress) -> None:
    """The watcher that never asks."""
