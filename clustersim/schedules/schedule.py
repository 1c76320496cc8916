"""In which order does every pipeline rank work? The seam between lowering and the shelf of schedules."""

from typing import Protocol

from clustersim.errors import InputError
from clustersim.program.action import Order


class Schedule(Protocol):
    """A rule that orders forward and backward passes of microbatches on pipeline ranks."""

    @property
    def chunks(self) -> int:
        """Model chunks (virtual stages) per pipeline rank."""

    @property
    def name(self) -> str:
        """The name under which scenario files know it."""

    def order(self, ranks: int, microbatches: int) -> Order:
        """The actions of every pipeline rank; raise InputError where the schedule cannot run these numbers."""


def require_positive(ranks: int, microbatches: int) -> None:
    """Raise InputError unless there is at least one pipeline rank and one microbatch."""
    if ranks < 1:
        raise InputError(f"a pipeline of {ranks} ranks cannot be scheduled; 1 is the fewest")
    if microbatches < 1:
        raise InputError(f"a pipeline cannot run {microbatches} microbatches; 1 is the fewest")
