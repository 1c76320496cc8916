"""What is one step of a pipeline, and what is an order of them?

Actions and their text form follow torch.distributed.pipelining: stage, kind, microbatch, as in `0F0`, `2B1`.
Stages are numbered through the model (virtual stages; `placement` says on which rank each is). `B` is the whole
backward; `I` and `W` are its halves (input and weight gradients). A forward and a backward of different microbatches
may run side by side: a pair, torch's `(0F3;3B1)OVERLAP_F_B`.
"""

from collections.abc import Iterable
from itertools import chain
from typing import Final, NamedTuple

from clustersim.common.enums import IdentityEnum


class ActionKind(IdentityEnum):
    """The value is the letter in the notation."""

    FORWARD = "F"
    BACKWARD = "B"
    INPUT_GRADIENT = "I"
    WEIGHT_GRADIENT = "W"


FORWARD: Final = ActionKind.FORWARD
BACKWARD: Final = ActionKind.BACKWARD
"""For what is done for each pass: CPython 3.11 finds members of an enumeration ten times more slowly than a global."""


class Action(NamedTuple):
    """One microbatch through one stage, forward or backward.

    A named tuple, as torch's: a step has tens of thousands of them, and they are keys of messages.
    """

    stage: int
    kind: ActionKind
    microbatch: int

    def __str__(self) -> str:
        return f"{self.stage}{self.kind.value}{self.microbatch}"


class OverlappedPair(NamedTuple):
    """A forward, and a backward of another microbatch or stage, side by side on one rank."""

    forward: Action
    backward: Action

    def __str__(self) -> str:
        return f"({self.forward};{self.backward})OVERLAP_F_B"


ScheduleEntry = Action | OverlappedPair
"""What a rank runs before it goes on."""
PipelineOrder = tuple[tuple[ScheduleEntry, ...], ...]
"""For each pipeline rank what it runs, in order."""


def flatten_entry(entry: ScheduleEntry) -> tuple[Action, ...]:
    """The one action of a step, or the forward and the backward of a pair."""
    return (entry,) if isinstance(entry, Action) else (entry.forward, entry.backward)


def flatten_entries(entries: Iterable[ScheduleEntry]) -> tuple[Action, ...]:
    """Actions of steps, those of pairs one after the other."""
    return tuple(chain.from_iterable(map(flatten_entry, entries)))
