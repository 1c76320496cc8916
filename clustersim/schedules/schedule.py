"""In which order does every pipeline rank work? The seam between lowering and the shelf of schedules."""

from typing import Protocol

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
