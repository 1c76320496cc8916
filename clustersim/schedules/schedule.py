"""Where is each stage, and in which order does every pipeline rank work? Between lowering and schedules."""

from typing import Protocol

from clustersim.common.errors import InputError
from clustersim.program.action import PipelineOrder
from clustersim.program.placement import Placement


class Schedule(Protocol):
    """A rule that places stages on pipeline ranks and orders forward and backward passes of microbatches on them.

    How many stages a rank holds (its chunks) is what the placement says. Schedules from outside the package come in
    through `listed` and `imported`.
    """

    @property
    def name(self) -> str:
        """What scenarios and pages call it."""

    def placement(self, ranks: int) -> Placement:
        """Which of so many pipeline ranks holds which stage; raise InputError where it is not for so many."""

    def require_supported(self, ranks: int, microbatches: int) -> None:
        """Raise InputError where the schedule cannot run these numbers."""

    def order(self, ranks: int, microbatches: int) -> PipelineOrder:
        """The actions of every pipeline rank; raise InputError as `require` does."""


def require_positive(ranks: int, microbatches: int) -> None:
    """Raise InputError unless there is at least one pipeline rank and one microbatch."""
    if ranks < 1:
        raise InputError(f"a pipeline of {ranks} ranks cannot be scheduled; 1 is the fewest")
    if microbatches < 1:
        raise InputError(f"a pipeline cannot run {microbatches} microbatches; 1 is the fewest")
