"""Which layers does each pipeline stage hold?

Virtual stages are numbered through the model; each is a slice of its stack of layers. Layers are dealt evenly; where
they do not divide, the stages that also hold the embedding and the logits give up layers first, the last before the
first, then their neighbours inwards (Llama 3 removed one layer each from the first and the last stage, section 3.3.2).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from clustersim.workload.stack import Stack, count, cut


@dataclass(frozen=True, slots=True)
class Stage:
    """Contents of one virtual stage."""

    number: int
    stack: Stack
    embedding: bool
    head: bool

    @property
    def layers(self) -> int:
        """How many layers it holds."""
        return count(self.stack)


def split_layers(layers: int, stages: int) -> tuple[int, ...]:
    """Layers of each virtual stage, in model order.

    >>> split_layers(126, 16)
    (7, 8, 8, 8, 8, 8, 8, 8, 8, 8, 8, 8, 8, 8, 8, 7)
    """
    most = -(-layers // stages)
    counts = [most] * stages
    for place in range(most * stages - layers):
        counts[-1 - place // 2 if place % 2 == 0 else place // 2] -= 1
    return tuple(counts)


def stages(stack: Stack, counts: Sequence[int]) -> tuple[Stage, ...]:
    """Virtual stages with the embedding on the first and final norm, logits and loss on the last. counts: of layers."""
    last, firsts = len(counts) - 1, accumulate(counts, initial=0)
    return tuple(
        Stage(number, cut(stack, first, layers), number == 0, number == last)
        for number, (first, layers) in enumerate(zip(firsts, counts, strict=False))
    )
