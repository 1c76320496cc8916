"""Interface between lowering and schedules: stage placement, and the order of passes on every pipeline rank."""

from typing import Protocol

from clustersim.common.errors import InputError
from clustersim.program.action import PipelineOrder
from clustersim.program.placement import Placement


class Schedule(Protocol):
    """A rule that places stages on pipeline ranks and orders forward and backward passes of microbatches on them.

    The number of stages per rank (chunks) follows from the placement. Schedules from outside the package come in
    through `csv_schedule` and `custom_schedule`.
    """

    @property
    def name(self) -> str:
        """Name in scenarios and on pages."""

    def placement(self, ranks: int) -> Placement:
        """Pipeline rank of each stage, with this number of ranks; raise InputError where that is not supported."""

    def require_supported(self, ranks: int, microbatches: int) -> None:
        """Raise InputError where the schedule does not support these numbers of ranks and microbatches."""

    def order(self, ranks: int, microbatches: int) -> PipelineOrder:
        """The entries of every pipeline rank; raise InputError as `require_supported` does."""


def require_positive(ranks: int, microbatches: int) -> None:
    """Raise InputError unless there is at least one pipeline rank and one microbatch."""
    if ranks < 1:
        raise InputError(f"a pipeline of {ranks} ranks cannot be scheduled; 1 is the fewest")
    if microbatches < 1:
        raise InputError(f"a pipeline cannot run {microbatches} microbatches; 1 is the fewest")
