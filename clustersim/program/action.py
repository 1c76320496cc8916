"""What is one step of a pipeline, and what is an order of them?

Actions and their text form follow torch.distributed.pipelining: stage, kind, microbatch, as in `0F0`, `2B1`.
Stages are numbered through the model (virtual stages; `placement` says on which rank each is). `B` is the whole
backward; `I` and `W` are its halves (input and weight gradients).
"""

from enum import Enum
from typing import NamedTuple


class ActionKind(Enum):
    """The value is the letter in the notation."""

    FORWARD = "F"
    BACKWARD = "B"
    INPUT_GRADIENT = "I"
    WEIGHT_GRADIENT = "W"


class Action(NamedTuple):
    """One microbatch through one stage, forward or backward.

    A named tuple, as torch's: a step has tens of thousands of them, and they are keys of messages.
    """

    stage: int
    kind: ActionKind
    microbatch: int

    def __str__(self) -> str:
        return f"{self.stage}{self.kind.value}{self.microbatch}"


Order = tuple[tuple[Action, ...], ...]
"""For each pipeline rank the actions that it runs, in order."""
