"""Pipeline actions: what does a pipeline rank run, and in which order?

Actions and their text form follow torch.distributed.pipelining: stage, kind, microbatch, as in `0F0`, `2B1`.
Stages are numbered through the model (virtual stages; `placement` maps them to ranks). `B` is the full
backward; `I` and `W` are its halves (input gradients and weight gradients). A forward and a backward of
different microbatches may overlap on one rank: an `OverlappedPair`, torch's `(0F3;3B1)OVERLAP_F_B`.
"""

from collections.abc import Iterable
from itertools import chain
from typing import Final, NamedTuple, cast

from clustersim.common.enums import IdentityEnum


class ActionKind(IdentityEnum):
    """Kind of pass; the value is the letter in torch's notation."""

    FORWARD = "F"
    BACKWARD = "B"
    INPUT_GRADIENT = "I"
    WEIGHT_GRADIENT = "W"


FORWARD: Final = ActionKind.FORWARD
BACKWARD: Final = ActionKind.BACKWARD
"""Module constants for hot loops: CPython 3.11 looks up enum members ten times more slowly than globals."""


class Action(NamedTuple):
    """The forward or backward of one microbatch through one stage.

    A named tuple, as in torch: a step has tens of thousands of them, and they serve as message tags.
    """

    stage: int
    kind: ActionKind
    microbatch: int

    def __str__(self) -> str:
        return f"{self.stage}{self.kind.value}{self.microbatch}"


class OverlappedPair(NamedTuple):
    """A forward and a backward of different microbatches (or stages) that overlap on one rank: OVERLAP_F_B."""

    forward: Action
    backward: Action

    def __str__(self) -> str:
        return f"({self.forward};{self.backward})OVERLAP_F_B"


ScheduleEntry = Action | OverlappedPair
"""One entry of a rank's pipeline schedule."""
PipelineOrder = tuple[tuple[ScheduleEntry, ...], ...]
"""[pipeline ranks][entries] the schedule entries of every pipeline rank, in execution order."""


def flatten_entry(entry: ScheduleEntry) -> tuple[Action, ...]:
    """The action of a single entry, or the forward and the backward of an overlapped pair."""
    return (entry,) if isinstance(entry, Action) else (entry.forward, entry.backward)


def flatten_entries(entries: Iterable[ScheduleEntry]) -> tuple[Action, ...]:
    """All actions of schedule entries in order; an overlapped pair gives its forward, then its backward."""
    entries = tuple(entries)
    if OverlappedPair not in set(map(type, entries)):
        return cast("tuple[Action, ...]", entries)
    return tuple(chain.from_iterable(map(flatten_entry, entries)))
